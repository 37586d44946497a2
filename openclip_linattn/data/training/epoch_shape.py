"""The arithmetic of an epoch as OpenCLIP cuts it from shards: rounding, what is left out or repeated, and its reach.

Without replacement every epoch shuffles the shards anew (seeded by --seed and the epoch, so a resumed run goes on where
an uninterrupted one would be), deals them out to processes and then to their data-loader workers, and each worker
reads its own until it has its number of batches. A short epoch therefore sees the first part of a new shuffle, not the
next part of the last one. The shuffle is a buffer of 2,000 shards that fills at two for each one taken: an epoch
that takes far fewer shards than the set has never gets to the later ones, whatever its number. Short epochs of a large
set need sampling with replacement.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

# OpenCLIP's buffers, which fill at two for each one taken: their size, and what is there before the first is taken.
SHARD_BUFFER = (2000, 500)
SAMPLE_BUFFER = (5000, 1000)


def worker_batches(samples: int, *, batch_size: int, world_size: int, workers: int) -> int:
    """Batches that each data-loader worker reads in an epoch of so many samples: rounded up, and up again."""
    batches = -(-samples // (batch_size * world_size))
    return -(-batches // max(1, workers))


@dataclass(frozen=True)
class Coverage:
    """What one epoch sees of a set, in expectation, where all shards are of one size.

    `drawn` samples in all, of which `unique` are different ones; `reach` is the number of samples, and `shards` of
    shards, that any epoch can get to. With replacement `unique` takes each sample as drawn by itself, which is a
    little low: a shard is read without repeats.
    """

    drawn: int
    unique: float
    reach: int
    shards: int


@dataclass(frozen=True)
class Reading:
    """How a set is read: `shards` with `held` usable samples in all, by `world_size` x `workers` readers."""

    held: int
    shards: int
    batch_size: int
    world_size: int
    workers: int

    def coverage(self, samples: int, *, resampled: bool) -> Coverage:
        """Coverage of an epoch of so many samples, before rounding."""
        batches = worker_batches(
            samples, batch_size=self.batch_size, world_size=self.world_size, workers=self.workers
        )
        drawn = batches * self.batch_size * self._readers
        if resampled:
            unique = self.held * (1 - (1 - 1 / self.held) ** drawn) if self.held else 0.0
            return Coverage(drawn, unique, self.held, self.shards)
        shards = self._shards_in_reach(batches * self.batch_size)
        unique = sum(readers * self._seen(load, batches) for load, readers in self._loads().items())
        return Coverage(drawn, unique, self.held * shards // self.shards, shards)

    @property
    def _readers(self) -> int:
        return self.world_size * max(1, self.workers)

    def _loads(self) -> Counter[int]:
        """How many readers get so many shards: dealt to the processes in turn, then to their workers."""
        workers = max(1, self.workers)
        shares = (len(range(rank, self.shards, self.world_size)) for rank in range(self.world_size))
        return Counter(len(range(worker, share, workers)) for share in shares for worker in range(workers))

    def _seen(self, load: int, batches: int) -> float:
        """Different samples that one reader is expected to see; the last, cut batch of every pass is dropped."""
        samples = load * self.held / self.shards
        whole = int(samples // self.batch_size)
        if not whole:
            return 0.0
        passes, rest = divmod(batches, whole)
        missed = (1 - whole * self.batch_size / samples) ** passes * (1 - rest * self.batch_size / samples)
        return samples * (1 - missed)

    def _shards_in_reach(self, samples: int) -> int:
        """The shards, from the first on, that can be among those of an epoch of so many samples for each reader."""
        if not self.held:
            return self.shards
        opened = -(-_read_through(samples, *SAMPLE_BUFFER) * self.shards // self.held)
        return min(self.shards, _read_through(opened * self._readers, *SHARD_BUFFER))


def _read_through(taken: int, size: int, initial: int) -> int:
    """How far a shuffling buffer has read when so many were taken from it."""
    return min(2 * taken + initial - 2, taken + size - 1)
