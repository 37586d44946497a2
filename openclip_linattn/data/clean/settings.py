"""What a cleaning keeps, drops and changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from openclip_linattn.data.layout import MAX_SAMPLES_PER_SHARD, check_part_sizes
from openclip_linattn.errors import UserError

IMAGE = "image"
CAPTION = "caption"
NSFW = "NSFW"
SIMILARITY = "similarity"


@dataclass(frozen=True)
class Settings:
    """The filters, None where there is none, and the form of what is written.

    `resize` is the longest that the shorter side of an image stays, in pixels. `drop_nsfw` lists values of the
    json's field NSFW, and `min_similarity` bounds its field `similarity`, as LAION's metadata have them. Sides
    are those of the image itself, in pixels; `max_aspect` is the longer side over the shorter; captions are
    counted in characters, without the blanks around them. `deduplicate` is `image` (its bytes), `caption` (the
    txt member) or the name of a field of the json. Raises UserError for values out of range.
    """

    samples_per_shard: int = MAX_SAMPLES_PER_SHARD
    resize: int | None = None
    drop_nsfw: tuple[str, ...] = ()
    min_similarity: float | None = None
    min_side: int | None = None
    min_caption: int | None = None
    max_caption: int | None = None
    max_aspect: float | None = None
    deduplicate: str | None = None
    keep_empty_captions: bool = False

    def __post_init__(self) -> None:
        check_part_sizes(0, self.samples_per_shard)
        for name in ("resize", "min_side", "min_caption", "max_caption", "max_aspect"):
            value = getattr(self, name)
            if value is not None and not value >= 1:
                raise UserError(f"{flag(name)} must be at least 1, not {value:g}.")
        if self.min_similarity is not None and not -1 <= self.min_similarity <= 1:
            raise UserError(
                f"--min-similarity is a cosine, between -1 and 1 (LAION-400M was cut at 0.3), not "
                f"{self.min_similarity:g}."
            )
        if self.min_caption and self.max_caption and self.min_caption > self.max_caption:
            raise UserError(
                f"No caption has at least {self.min_caption} and at most {self.max_caption} characters: "
                "change --min-caption or --max-caption."
            )
        if self.deduplicate == "" or "" in self.drop_nsfw:
            raise UserError("--deduplicate and --drop-nsfw need names: `url`, `NSFW,UNSURE`.")

    def fields(self) -> Iterator[tuple[str, str]]:
        """Yield (field of the json, flag) for each flag that needs one."""
        if self.drop_nsfw:
            yield NSFW, "--drop-nsfw"
        if self.min_similarity is not None:
            yield SIMILARITY, "--min-similarity"
        if self.deduplicate not in (None, IMAGE, CAPTION):
            yield self.deduplicate, "--deduplicate"

    def to_json(self) -> dict[str, Any]:
        """The settings as JSON values."""
        return {**asdict(self), "drop_nsfw": list(self.drop_nsfw)}


def flag(name: str) -> str:
    """The flag that sets the field `name` of Settings."""
    return "--" + name.replace("_", "-")
