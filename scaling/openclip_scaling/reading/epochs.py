"""The epochs that one process after another logged, and which try of each the final weights come from.

A resumed process starts at an epoch's first sample, so what an earlier process logged from that epoch on is
superseded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from openclip_scaling.reading.logs import Segment
from openclip_scaling.reading.records import FloatArray, IntArray

_GPUS = ("cuda", "xpu", "mps")
_PAUSE = 3000.0  # seconds: a clock that changes to summer time goes forward by 3600


@dataclass(frozen=True)
class Epoch:
    """The logged steps of one epoch: samples within it, losses, and hours since the start of the run.

    length is the epoch's samples; gpu_hours is NaN where it is not known that the run used GPUs.
    """

    seen: IntArray
    losses: FloatArray
    learning_rates: FloatArray
    hours: FloatArray
    gpu_hours: FloatArray
    length: int
    whole: bool
    batch: int
    val_batch: int | None
    world_size: int | None

    @property
    def samples(self) -> int:
        """Samples that were seen in it."""
        return self.length if self.whole and self.length - self.seen[-1] >= self.batch else int(self.seen[-1])


@dataclass(frozen=True)
class _Before:
    """Hours of all earlier processes, and GPU-hours, which are NaN once one process did not run on known GPUs."""

    hours: float
    gpu_hours: float


def surviving_epochs(
    segments: Sequence[Segment], params: Mapping[str, str], notices: list[str]
) -> dict[int, Epoch]:
    """The last try of every epoch that is in the log, by number; what is left out is said in the notices."""
    epochs: dict[int, Epoch] = {}
    seconds, gpu_hours = 0.0, 0.0
    for segment in segments:
        settings = {**params, **segment.params}
        if segment.processes:
            settings.setdefault("world_size", str(segment.processes))
        gpus = _gpus(settings.get("device") or segment.device, settings)
        if len(segment.train):
            own = dict(_epochs(segment, settings, _Before(seconds / 3600, gpu_hours), gpus, notices))
            _drop_superseded(epochs, min(own), notices)
            epochs.update(own)
        seconds += segment.seconds
        gpu_hours += segment.seconds / 3600 * gpus if segment.seconds else 0.0
    return epochs


def _drop_superseded(epochs: dict[int, Epoch], first: int, notices: list[str]) -> None:
    for old in [number for number in epochs if number >= first]:
        superseded = epochs.pop(old)
        state = "whole" if superseded.whole else f"up to sample {superseded.samples}"
        notices.append(f"epoch {old} was trained again after a resume; the earlier try ({state}) is left out")


def _epochs(
    segment: Segment, settings: Mapping[str, str], before: _Before, gpus: float, notices: list[str]
) -> Iterator[tuple[int, Epoch]]:
    train = segment.train
    seen, lengths, losses, rates = train.seen, train.epoch_samples, train.losses, train.learning_rates
    seconds = train.seconds
    hours = seconds / 3600
    numbers, starts = np.unique(train.epochs, return_index=True)  # the steps of a segment are in order
    stops = [*starts[1:].tolist(), len(seen)]
    for number, start, stop in zip(numbers.tolist(), starts.tolist(), stops, strict=True):
        rows = start + _last_of_each(seen[start:stop])
        if len(rows) < stop - start:
            notices.append(
                f"epoch {number}: {stop - start - len(rows)} logged steps are there twice; the later line is used"
            )
        batch = global_batch(settings) or segment.batch or int(seen[start]) or 1
        length = int(lengths[rows[-1]])
        _note_pause(number, seconds[rows], notices)
        yield (
            number,
            Epoch(
                seen=seen[rows],
                losses=losses[rows],
                learning_rates=rates[rows],
                hours=before.hours + hours[rows],
                gpu_hours=before.gpu_hours + hours[rows] * gpus,
                length=length,
                # The epoch is rounded to full batches, and accumulation drops an incomplete tail.
                whole=number < segment.finished or length - int(seen[rows[-1]]) < batch,
                batch=batch,
                val_batch=whole_number(settings.get("batch_size")),
                world_size=whole_number(settings.get("world_size")),
            ),
        )


def _last_of_each(seen: IntArray) -> IntArray:
    return np.flatnonzero(np.append(seen[1:] != seen[:-1], True))


def _note_pause(number: int, seconds: FloatArray, notices: list[str]) -> None:
    gaps = np.diff(seconds)
    longest = gaps.max(initial=0.0)
    if longest > _PAUSE and longest > 20 * np.median(gaps):
        notices.append(
            f"epoch {number}: the log stands still for {longest / 3600:.1f} hours (a pause, or a clock set forward), "
            "which are counted as hours of training"
        )


def _gpus(device: str | None, settings: Mapping[str, str]) -> float:
    """GPUs of a process group, one for each process; NaN where it ran on none or it is not known."""
    processes = whole_number(settings.get("world_size"))
    return float(processes or math.nan) if (device or "").startswith(_GPUS) else math.nan


def global_batch(params: Mapping[str, str]) -> int | None:
    """Pairs per optimizer step over all processes (batch_size x accum_freq x world_size), if known."""
    batch = whole_number(params.get("batch_size"))
    if batch is None:
        return None
    return (
        batch * (whole_number(params.get("accum_freq")) or 1) * (whole_number(params.get("world_size")) or 1)
    )


def whole_number(value: object) -> int | None:
    """A positive whole number from text or JSON (below 2^53, as far as floats are exact), else None."""
    try:
        number = float(str(value))
    except ValueError:
        return None
    return int(number) if 1 <= number < 2**53 and number == int(number) else None
