"""What is kept of the keys of a shard: enough to find keys that come up twice, in it and between shards."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field

SKETCH = 16
_DIGEST_BYTES = 16


@dataclass
class ShardKeys:
    """Keys of one shard: the first and the last sample's, with their suffixes in order, and the range of all.

    `low` and `high` bound all keys in string order. `sketch` holds the 16 smallest hashes of the keys: a sample
    of them that is the same for the same keys, whatever else the shard holds.
    """

    first: str | None = None
    first_suffixes: list[str] = field(default_factory=list)
    last: str | None = None
    last_suffixes: list[str] = field(default_factory=list)
    low: str | None = None
    high: str | None = None
    sketch: list[str] = field(default_factory=list)


class KeyTracker:
    """Follows the samples of a shard in order; `repeated` and `split` count what stands in it twice.

    `repeated` counts samples that write a suffix of their key again, and `split` the keys of which the members
    were pulled apart: several pieces, none of which repeats another's suffix.
    """

    def __init__(self) -> None:
        self.repeated = 0
        self._pieces: dict[str, set[str]] = {}
        self._split: set[str] = set()
        self._first: tuple[str, list[str]] | None = None
        self._last: tuple[str, list[str]] | None = None

    @property
    def split(self) -> int:
        """Keys whose members were pulled apart."""
        return len(self._split)

    def add(self, key: str, suffixes: Iterable[str]) -> None:
        """Take the next sample, with its suffixes in the order of the tar."""
        self._last = (key, list(suffixes))
        self._first = self._first or self._last
        seen = self._pieces.setdefault(key, set())
        if seen.intersection(self._last[1]):
            self.repeated += 1
        elif seen:
            self._split.add(key)
        seen.update(self._last[1])

    def summary(self, complete: bool) -> ShardKeys:
        """What is kept; of a shard that was not read to its end, only the first sample is certain."""
        if self._first is None or self._last is None:
            return ShardKeys()
        first, first_suffixes = self._first
        if not complete:
            return ShardKeys(first, first_suffixes)
        last, last_suffixes = self._last
        sketch = heapq.nsmallest(SKETCH, map(_hash, self._pieces))
        low, high = min(self._pieces), max(self._pieces)
        return ShardKeys(first, first_suffixes, last, last_suffixes, low, high, sketch)


class ContentDigest:
    """A digest of samples in any order: a shard that was written again need not keep its order."""

    def __init__(self) -> None:
        self._sum = 0

    def add(self, key: str, caption: str | None, size: tuple[int, int] | None) -> None:
        """Take a sample: its key, its caption and its image's width and height."""
        text = f"{key}\0{caption}\0{size}"
        digest = hashlib.blake2b(_bytes(text), digest_size=_DIGEST_BYTES).digest()
        self._sum = (self._sum + int.from_bytes(digest, "big")) % (1 << 8 * _DIGEST_BYTES)

    def hex(self) -> str:
        """The digest of what was taken so far."""
        return f"{self._sum:0{2 * _DIGEST_BYTES}x}"


def _hash(key: str) -> str:
    return hashlib.blake2b(_bytes(key), digest_size=8).hexdigest()


def _bytes(text: str) -> bytes:
    # The names in a tar may be in any encoding; Python keeps such bytes as surrogates.
    return text.encode("utf-8", "surrogatepass")
