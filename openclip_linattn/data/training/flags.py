"""OpenCLIP's data flags for sources of shards: sources, counts, weights and workers that fit each other."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from openclip_linattn.data.reading import scheme_of
from openclip_linattn.data.sources.pipe_forms import stock_form
from openclip_linattn.data.training.weights import Source, Weighted, samples_of, weigh
from openclip_linattn.errors import UserError

_LONGEST_ARGUMENT = 131_071  # bytes that Linux takes as one argument
_LARGE_BATCH = 8192  # samples of one process; more are hardly ever asked for


@dataclass(frozen=True)
class Loaders:
    """The processes of a training, and the most data-loader workers that each may have."""

    processes: int
    max_workers: int


@dataclass(frozen=True)
class DataFlags:
    """The flags that make OpenCLIP read `sources` with `workers` in each of `processes`.

    `num_samples` are those of an epoch, and `whole` says that they are all there are. `resampled` shards are drawn
    with replacement, `weighted` ones by the factors of their sources. `stock`: OpenCLIP's own entrypoint reads them.
    """

    sources: list[Weighted]
    num_samples: int
    workers: int
    processes: int
    resampled: bool
    weighted: bool
    whole: bool
    stock: bool

    @property
    def train_data(self) -> str:
        """The value of --train-data."""
        pattern = "::".join(row.source.pattern for row in self.sources)
        return "::".join(map(stock_form, pattern.split("::"))) if self.stock else pattern

    @property
    def arguments(self) -> list[str]:
        """The flags, each name and value a string of its own."""
        flags = ["--train-data", self.train_data, "--dataset-type", "webdataset"]
        flags += ["--train-num-samples", str(self.num_samples)]
        if self.resampled:
            flags.append("--dataset-resampled")
        if self.weighted:
            factors = [f"{row.factor:.12g}" for row in self.sources for _ in range(row.source.components)]
            flags += ["--train-data-upsampling-factors", "::".join(factors)]
        return [*flags, "--workers", str(self.workers)]

    @property
    def line(self) -> str:
        """The flags as they are pasted into a shell."""
        return shlex.join(self.arguments)

    @property
    def shards(self) -> int:
        """Shards of all sources."""
        return sum(row.source.shards for row in self.sources)

    @property
    def loads(self) -> tuple[int, int]:
        """Shards that the fullest and the emptiest reader get, without replacement."""
        readers = self.processes * self.workers
        return -(-self.shards // readers), self.shards // readers

    @property
    def notes(self) -> list[str]:
        """What is worth knowing before these flags are used."""
        return [*self._reading(), *self._opening()]

    def to_json(self) -> dict[str, Any]:
        """Flags, sources, loads and notes as JSON values."""
        return {
            "arguments": self.arguments,
            "line": self.line,
            "num_samples": self.num_samples,
            "workers": self.workers,
            "processes": self.processes,
            "shards_of_fullest_reader": None if self.resampled else self.loads[0],
            "shards_of_emptiest_reader": None if self.resampled else self.loads[1],
            "sources": [row.to_json(self.num_samples) for row in self.sources],
            "notes": self.notes,
        }

    def _reading(self) -> list[str]:
        if self.resampled:
            return []
        notes = []
        most, fewest = self.loads
        readers = f"{self.processes} x {self.workers} readers"
        if most > fewest:
            notes.append(
                f"{self.shards:,} shards for {readers}: the fullest gets {most:,} and the emptiest {fewest:,}, so in "
                "an epoch the emptiest repeat some samples and the fullest leave some out."
            )
        held = self._held_by_emptiest()
        if held is not None and held < _LARGE_BATCH:
            notes.append(
                f"The emptiest reader has about {held:,} samples, and OpenCLIP waits for ever for one with less than a "
                "batch: keep --batch-size below that."
            )
        if self.whole:
            notes.append(
                f"OpenCLIP rounds an epoch up to whole batches for each reader: {self.num_samples:,} samples to the "
                f"next multiple of {self.processes * self.workers} x --batch-size."
            )
        return notes

    def _held_by_emptiest(self) -> int | None:
        """Samples of the reader with the fewest shards, all of one size; None where their counts are not known."""
        counts = [row.source.samples for row in self.sources]
        known = [count for count in counts if count is not None]
        return sum(known) * self.loads[1] // self.shards if len(known) == len(counts) else None

    def _opening(self) -> list[str]:
        notes = []
        if self.stock and any(scheme_of(part) in ("http", "https") for part in self.train_data.split("::")):
            notes.append(
                "OpenCLIP reads http with curl and loses the rest of a shard where the connection drops: "
                "'pipe:python -m openclip_linattn.data.cat URL' does not."
            )
        size = len(os.fsencode(self.train_data))
        if size > _LONGEST_ARGUMENT:
            notes.append(
                f"--train-data is {size:,} bytes long and no shell passes more than {_LONGEST_ARGUMENT:,} as one "
                "argument: name the shards with fewer gaps, or give `python -m openclip_linattn.train` the list file."
            )
        return notes


def data_flags(
    sources: Sequence[Source],
    loaders: Loaders,
    *,
    factors: Sequence[float] | None = None,
    resampled: bool = False,
    num_samples: int | None = None,
    stock: bool = False,
) -> DataFlags:
    """The flags for `sources`, whose weights, if any, are `factors`; weighted sources are drawn with replacement.

    Without `num_samples` an epoch has as many as there are. Raises UserError where counts that are needed are not
    known, weights do not fit the sources, or there are fewer shards than processes.
    """
    resampled = resampled or factors is not None
    weighted = weigh(sources, factors or [1.0] * len(sources))
    shards = sum(source.shards for source in sources)
    return DataFlags(
        sources=weighted,
        num_samples=sum(map(samples_of, sources)) if num_samples is None else num_samples,
        workers=loaders.max_workers if resampled else choose_workers(shards, loaders),
        processes=loaders.processes,
        resampled=resampled,
        weighted=factors is not None,
        whole=num_samples is None,
        stock=stock,
    )


def choose_workers(shards: int, loaders: Loaders) -> int:
    """Workers of each process: as many as there are shards for, or fewer where these share the shards out evenly.

    Half as many is the least that an even share is worth. Raises UserError where a process would get no shard.
    """
    if shards < loaders.processes:
        raise UserError(
            f"{loaders.processes} processes need a shard each and there are {shards}: use fewer processes, or draw "
            "with replacement (--resampled)."
        )
    most = min(loaders.max_workers, shards // loaders.processes)
    even = (n for n in range(most, 0, -1) if shards % (n * loaders.processes) == 0)
    best = next(even, 0)
    return best if 2 * best >= most else most
