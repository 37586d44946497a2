"""Shard folders: img2dataset's layout for training, clip_benchmark's for evaluation.

Training: `00000.tar`, `00000_stats.json`, ..., `sizes.json`; members `<key>.jpg .txt .json` side by side.
Evaluation: `0.tar`, `1.tar`, ..., `nshards.txt`; members `<key>.jpg .cls .txt .json`.
A key is nine digits, five for the shard and four for the place within it.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openclip_linattn.errors import UserError
from openclip_linattn.files import atomic_path, write_json, write_text

MAX_SAMPLES_PER_SHARD = 10_000
MAX_SHARDS = 100_000


@dataclass(frozen=True)
class Sample:
    """One sample of a generated set: the JPEG, its caption, its attributes and, for evaluation, its class."""

    jpeg: bytes
    caption: str
    attributes: Mapping[str, Any]
    label: int | None = None

    def members(self, key: str) -> Iterator[tuple[str, bytes]]:
        """Yield (member name, content) in the order in which the members stand in the tar."""
        yield f"{key}.jpg", self.jpeg
        if self.label is not None:
            yield f"{key}.cls", str(self.label).encode()
        yield f"{key}.txt", self.caption.encode()
        record = {"key": key, "status": "success", "caption": self.caption, **self.attributes}
        yield f"{key}.json", json.dumps(record, allow_nan=False).encode()


@dataclass(frozen=True)
class Part:
    """One folder of shards: `count` samples, sample i made by `make(i)`, `per_shard` of them in each tar."""

    folder: Path
    count: int
    per_shard: int
    make: Callable[[int], Sample]
    evaluation: bool = False

    @property
    def shards(self) -> int:
        """Number of tars."""
        return -(-self.count // self.per_shard)

    def tar(self, shard: int) -> Path:
        """Path of tar number `shard`."""
        return self.folder / (f"{shard}.tar" if self.evaluation else f"{shard:05d}.tar")

    def size(self, shard: int) -> int:
        """Number of samples in tar number `shard`."""
        return min(self.per_shard, self.count - shard * self.per_shard)


def check_part_sizes(count: int, per_shard: int) -> None:
    """Raise UserError where the nine-digit keys cannot number so many samples."""
    if not 1 <= per_shard <= MAX_SAMPLES_PER_SHARD:
        raise UserError(
            f"Samples per shard must lie between 1 and {MAX_SAMPLES_PER_SHARD:,}, not {per_shard:,}."
        )
    if count > per_shard * MAX_SHARDS:
        raise UserError(
            f"{count:,} samples at {per_shard:,} per shard make more than {MAX_SHARDS:,} shards: "
            "raise the samples per shard."
        )


def write_tar(path: Path, members: Iterable[tuple[str, bytes]]) -> None:
    """Write a tar of (name, content) pairs, atomically, with no trace of time, user or machine in it."""
    with atomic_path(path) as temporary, tarfile.open(temporary, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def write_shard(part: Part, shard: int, progress: Callable[[int], None]) -> None:
    """Write tar number `shard` of `part`, calling `progress(1)` for each sample."""

    def members() -> Iterator[tuple[str, bytes]]:
        for place in range(part.size(shard)):
            yield from part.make(shard * part.per_shard + place).members(f"{shard:05d}{place:04d}")
            progress(1)

    write_tar(part.tar(shard), members())


def write_index(part: Part) -> None:
    """Write what stands beside the tars: nshards.txt, or `_stats.json` files and sizes.json."""
    if part.evaluation:
        write_text(part.folder / "nshards.txt", f"{part.shards}\n")
        return
    for shard in range(part.shards):
        tar = part.tar(shard)
        write_json(tar.with_name(f"{tar.stem}_stats.json"), shard_stats(part.size(shard)))
    sizes = {part.tar(shard).name: part.size(shard) for shard in range(part.shards)}
    write_json(part.folder / "sizes.json", sizes)


def shard_stats(count: int) -> dict[str, Any]:
    """What img2dataset writes into the `_stats.json` beside a shard of `count` samples, none of which failed."""
    # The duration stays 0 so that the same set has the same bytes.
    return {
        "count": count,
        "successes": count,
        "failed_to_download": 0,
        "failed_to_resize": 0,
        "duration": 0.0,
        "status_dict": {"success": count},
    }
