"""What becomes of the samples of one input shard, kept in a small file between the two passes."""

from __future__ import annotations

import json
import zipfile
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from openclip_linattn.errors import UserError
from openclip_linattn.files import atomic_path

KEPT, RECOVERED, FIRST_REASON = range(3)
_ARRAYS = ("codes", "prints", "sizes", "hashes", "repeats")
_UNREADABLE = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile)


@dataclass
class ShardSummary:
    """Counts of one input shard; `fault` is a clause about its file, such as "is empty (0 bytes)".

    `usable` counts samples with a good image and caption, kept or not, and `lacking` those of them whose json
    lacks a field that a filter needs. `kept_bytes` is the space that kept samples take in a tar, without the
    images that will be resized.
    """

    url: str
    identity: str | None
    fault: str | None = None
    samples: int = 0
    kept: int = 0
    recovered: int = 0
    usable: int = 0
    kept_bytes: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    lacking: dict[str, int] = field(default_factory=dict)


@dataclass
class ShardPlan:
    """The samples of one input shard in order, an entry for each in every array.

    `codes` are KEPT, RECOVERED or FIRST_REASON + the place of the reason in `reasons`. `prints` tell a sample
    from other content, `sizes` are its bytes in a tar, and `hashes` (empty without deduplication) what is
    compared, 0 for nothing. `repeats` marks those that are dropped as duplicates of earlier samples, for the
    reason `repeated`; their codes stay, so that they can be looked for anew. `fields` are names in the jsons.
    """

    summary: ShardSummary
    reasons: list[str]
    repeated: str
    fields: list[str]
    codes: NDArray[np.uint8]
    prints: NDArray[np.uint32]
    sizes: NDArray[np.uint32]
    hashes: NDArray[np.uint64]
    repeats: NDArray[np.bool_]

    def __post_init__(self) -> None:
        self._count()

    def _count(self) -> None:
        counts = Counter(self.codes[~self.repeats].tolist())
        summary = self.summary
        summary.samples, summary.recovered = len(self.codes), counts[RECOVERED]
        summary.kept = counts[KEPT] + counts[RECOVERED]
        summary.kept_bytes = int(self.sizes[self.kept].sum(dtype=np.int64))
        summary.dropped = {reason: counts[FIRST_REASON + place] for place, reason in enumerate(self.reasons)}
        if self.repeats.any():
            summary.dropped[self.repeated] = int(self.repeats.sum())

    @property
    def candidates(self) -> NDArray[np.bool_]:
        """Which samples are kept unless they repeat others."""
        return self.codes < FIRST_REASON

    @property
    def kept(self) -> NDArray[np.bool_]:
        """Which samples are kept."""
        return self.candidates & ~self.repeats

    def mark_repeats(self, repeats: NDArray[np.bool_]) -> None:
        """Drop these samples as duplicates, and no others."""
        self.repeats = repeats
        self._count()

    def save(self, path: Path) -> None:
        """Write the plan to `path`, atomically."""
        words = {
            "summary": asdict(self.summary),
            "reasons": self.reasons,
            "repeated": self.repeated,
            "fields": self.fields,
        }
        with atomic_path(path) as temporary, temporary.open("wb") as file:
            np.savez(
                file, words=np.array(json.dumps(words)), **{name: getattr(self, name) for name in _ARRAYS}
            )


def load_plan(path: Path) -> ShardPlan:
    """The plan at `path`; raises UserError where there is no whole one."""
    try:
        with np.load(path, allow_pickle=False) as file:
            words = json.loads(str(file["words"]))
            arrays = {name: file[name] for name in _ARRAYS}
    except _UNREADABLE as error:
        raise UserError(
            f"{path} cannot be read ({error}): delete the folder that is cleaned into, and start again."
        ) from error
    return ShardPlan(ShardSummary(**words.pop("summary")), **words, **arrays)
