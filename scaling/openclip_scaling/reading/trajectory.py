"""Follows a run through its log: steps and samples that the final weights have really seen, epoch by epoch.

Samples are added up from the log, because epochs may change their length on resume.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from openclip_scaling.reading.epochs import Epoch, surviving_epochs
from openclip_scaling.reading.logs import Segment
from openclip_scaling.reading.records import FloatArray, IntArray


@dataclass(frozen=True)
class Curve:
    """The logged steps in order, as columns: epoch from 0; steps, global samples and hours since the start of the run.

    learning_rate is NaN where it is not known.
    """

    epoch: IntArray
    step: IntArray
    samples: IntArray
    hours: FloatArray
    loss: FloatArray
    learning_rate: FloatArray

    def __len__(self) -> int:
        return len(self.epoch)

    def losses_before(self, epoch: int) -> FloatArray:
        """Losses of the epochs before this one."""
        return self.loss[: int(np.searchsorted(self.epoch, epoch))]


@dataclass(frozen=True)
class EpochEnd:
    """A finished epoch (counted from 1): totals since the start of the run.

    batch is global (all processes and accumulation steps); val_batch is that of one process, which is the one
    that the validation loss is computed with. hours and gpu_hours are NaN where they are not known.
    """

    epoch: int
    steps: int
    samples: int
    hours: float
    gpu_hours: float
    batch: int
    val_batch: int | None


@dataclass
class Trajectory:
    """The logged steps, the finished epochs by number, and a sentence for each repair.

    gaps: whether epochs are missing or unfinished, or nothing was logged at all.
    """

    curve: Curve
    ends: dict[int, EpochEnd] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)
    gaps: bool = True


@dataclass
class _Totals:
    """Steps and samples so far, and the parts of the curve."""

    steps: int = 0
    samples: int = 0
    parts: list[tuple[IntArray | FloatArray, ...]] = field(default_factory=list)

    def add(self, number: int, epoch: Epoch) -> None:
        self.parts.append(
            (
                np.full(len(epoch.seen), number, dtype=np.int64),
                self.steps + epoch.seen // epoch.batch,
                self.samples + epoch.seen,
                epoch.hours,
                epoch.losses,
                epoch.learning_rates,
            )
        )
        self.steps, self.samples = self.steps + epoch.samples // epoch.batch, self.samples + epoch.samples

    def skip(self, count: int, like: Epoch) -> None:
        self.steps += count * (like.length // like.batch)
        self.samples += count * like.length

    def curve(self) -> Curve:
        kinds = (np.int64, np.int64, np.int64, np.float64, np.float64, np.float64)
        columns = [
            np.concatenate([part[index] for part in self.parts] or [np.zeros(0, dtype=kind)])
            for index, kind in enumerate(kinds)
        ]
        return Curve(*columns)


def trace(segments: Sequence[Segment], params: Mapping[str, str]) -> Trajectory:
    """Follow the run; params (of params.txt) fill in where a segment does not print its own."""
    notices: list[str] = []
    epochs = surviving_epochs(segments, params, notices)
    totals, ends, gaps = _Totals(), {}, not epochs
    previous = -1
    for number, epoch in sorted(epochs.items()):
        for first, last, like in _missing(epochs, previous, number):
            notices.append(_missing_text(first, last, like, epochs[like].length))
            totals.skip(last - first + 1, epochs[like])
            gaps = True
        totals.add(number, epoch)
        if epoch.whole:
            ends[number + 1] = _end(number + 1, epoch, totals)
        else:
            notices.append(f"epoch {number} stopped after {epoch.samples} of {epoch.length} samples")
            gaps = True
        previous = number
    _note_changes([epoch for _, epoch in sorted(epochs.items())], totals, notices)
    return Trajectory(totals.curve(), ends, notices, gaps)


def _end(number: int, epoch: Epoch, totals: _Totals) -> EpochEnd:
    return EpochEnd(
        number,
        totals.steps,
        totals.samples,
        float(epoch.hours[-1]),
        float(epoch.gpu_hours[-1]),
        epoch.batch,
        epoch.val_batch,
    )


def _missing(epochs: Mapping[int, Epoch], previous: int, number: int) -> Iterator[tuple[int, int, int]]:
    """Runs of missing epochs between two logged ones: first, last, and the nearest logged one (of two the later)."""
    first = previous + 1
    # Epochs nearer to the earlier one: m - previous < number - m.
    middle = max(first, (previous + number + 1) // 2) if previous in epochs else first
    if first < middle:
        yield first, middle - 1, previous
    if middle < number:
        yield middle, number - 1, number


def _missing_text(first: int, last: int, like: int, length: int) -> str:
    which = f"epoch {first} is" if first == last else f"epochs {first} to {last} are"
    them = "it is" if first == last else "they are"
    return f"{which} not in the log; {them} counted like epoch {like} ({length} samples)"


def _note_changes(epochs: Sequence[Epoch], totals: _Totals, notices: list[str]) -> None:
    lengths = list(dict.fromkeys(epoch.length for epoch in epochs))
    if len(lengths) > 1:
        notices.append(
            f"the epoch length changed on resume ({_arrows(lengths)} samples); "
            f"counted from the log: {totals.steps} steps, {totals.samples} samples"
        )
    batches = list(dict.fromkeys(epoch.batch for epoch in epochs))
    if len(batches) > 1:
        notices.append(f"the batch size changed on resume ({_arrows(batches)})")
    worlds = list(dict.fromkeys(epoch.world_size for epoch in epochs if epoch.world_size is not None))
    if len(worlds) > 1:
        notices.append(f"the number of processes changed on resume ({_arrows(worlds)})")


def _arrows(values: Sequence[int]) -> str:
    return " -> ".join(map(str, values))
