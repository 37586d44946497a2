"""Between the passes: duplicates are dropped, and the sum of all plans is written down for good."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from openclip_linattn.data.clean.plan import ShardSummary, load_plan
from openclip_linattn.files import read_json, write_json

_CHUNK = 1 << 20


@dataclass(frozen=True)
class Sealed:
    """The input shards in order, and a digest of what becomes of each of their samples."""

    digest: str
    shards: list[ShardSummary]

    @property
    def samples(self) -> int:
        """Samples that were read."""
        return sum(shard.samples for shard in self.shards)

    @property
    def kept(self) -> int:
        """Samples to write."""
        return sum(shard.kept for shard in self.shards)


def seal(path: Path, plans: Sequence[Path], *, deduplicate: bool) -> Sealed:
    """Drop duplicates where asked for, sum the plans up and write the sum to `path`, atomically."""
    if deduplicate:
        drop_repeats(plans)
    digest = blake2b(digest_size=16)
    shards = []
    for plan_path in plans:
        plan = load_plan(plan_path)
        digest.update(f"{plan.summary.url}\0{plan.summary.identity}\0".encode(errors="surrogateescape"))
        digest.update(plan.kept.tobytes() + plan.prints.tobytes())
        shards.append(plan.summary)
    sealed = Sealed(digest.hexdigest(), shards)
    write_json(path, {"digest": sealed.digest, "shards": [asdict(shard) for shard in shards]})
    return sealed


def read_sealed(path: Path) -> Sealed:
    """What `seal` wrote to `path`; raises UserError where that cannot be read."""
    value = read_json(path)
    return Sealed(value["digest"], [ShardSummary(**shard) for shard in value["shards"]])


def drop_repeats(plans: Sequence[Path]) -> None:
    """Drop, in the plans at these paths, every sample whose hash one that is kept before it has.

    This takes about 20 bytes of memory for each sample that is not dropped for another reason, 8 GB for
    LAION-400M. Two different values share a 64-bit hash once in 2^64 pairs: among 400 million samples one is
    dropped wrongly with a probability of 0.5 %. What an earlier call dropped is looked at anew: it may have been
    ended half-way, and a shard have changed since.
    """
    hashes = [_candidates(path) for path in plans]
    starts = np.cumsum([0, *map(len, hashes)])
    joined = np.concatenate(hashes)
    del hashes
    again = repeats(joined)
    for number, path in enumerate(plans):
        first, last = np.searchsorted(again, starts[number : number + 2])
        plan = load_plan(path)
        marks = np.zeros(len(plan.codes), np.bool_)
        marks[np.flatnonzero(plan.candidates)[again[first:last] - starts[number]]] = True
        if not np.array_equal(marks, plan.repeats):
            plan.mark_repeats(marks)
            plan.save(path)


def repeats(hashes: NDArray[np.uint64]) -> NDArray[np.intp]:
    """Places of the hashes that occurred before, in order; a hash of 0 repeats nothing."""
    order = np.argsort(hashes, kind="stable")
    again = [np.empty(0, np.intp)]
    for start in range(1, len(order), _CHUNK):  # in parts: the comparison of all would take as much again
        places = order[start : start + _CHUNK]
        values, before = hashes[places], hashes[order[start - 1 : start - 1 + len(places)]]
        again.append(places[(values == before) & (values != 0)])
    return np.sort(np.concatenate(again))


def _candidates(path: Path) -> NDArray[np.uint64]:
    plan = load_plan(path)
    return plan.hashes[plan.candidates]
