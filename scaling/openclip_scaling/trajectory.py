"""Follows a run through its log: steps and samples that the final weights have really seen, epoch by epoch.

A resumed process starts at an epoch's first sample, so what an earlier process logged from that epoch on is
superseded. Samples are added up from the log, because epochs may change their length on resume.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from openclip_scaling.logs import Log, Segment, TrainRecord


@dataclass(frozen=True)
class CurvePoint:
    """One logged step: epoch from 0; steps, global samples and hours since the start of the run."""

    epoch: int
    step: int
    samples: int
    hours: float
    loss: float
    learning_rate: float | None


@dataclass(frozen=True)
class EpochEnd:
    """A finished epoch (counted from 1): totals since the start of the run.

    batch is global (all processes and accumulation steps); val_batch is that of one process, which is the one
    that the validation loss is computed with.
    """

    epoch: int
    steps: int
    samples: int
    hours: float
    batch: int
    val_batch: int | None


@dataclass
class Trajectory:
    """The logged steps in order, the finished epochs by number, and a sentence for each repair."""

    curve: list[CurvePoint] = field(default_factory=list)
    ends: dict[int, EpochEnd] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)

    @property
    def losses(self) -> list[float]:
        return [point.loss for point in self.curve]


@dataclass(frozen=True)
class _Epoch:
    """The records of one epoch, and the process that wrote them."""

    records: list[TrainRecord]
    segment: int
    batch: int
    val_batch: int | None

    @property
    def seen(self) -> int:
        return self.records[-1].seen

    @property
    def complete(self) -> bool:
        # The epoch is rounded to full batches, and accumulation drops an incomplete tail.
        return self.records[-1].epoch_samples - self.seen < self.batch


def trace(log: Log, params: Mapping[str, str]) -> Trajectory:
    """Follow the run; params (of params.txt) fill in where a segment does not print its own."""
    result = Trajectory()
    epochs = _surviving_epochs(log.segments, params, result.notices)
    if not epochs:
        return result
    starts = _segment_hours(log.segments)
    steps = samples = 0
    for number in range(max(epochs) + 1):
        epoch = epochs.get(number)
        if epoch is None:
            epoch = _stand_in(epochs, number)
            result.notices.append(
                f"epoch {number} is not in the log; it is counted like epoch {epoch.records[0].epoch} "
                f"({epoch.records[-1].epoch_samples} samples)"
            )
            length = epoch.records[-1].epoch_samples
            steps, samples = steps + length // epoch.batch, samples + length
            continue
        offset = starts[epoch.segment]
        begin = log.segments[epoch.segment].first_time
        for record in epoch.records:
            hours = offset + ((record.time - begin).total_seconds() / 3600 if begin else 0.0)
            result.curve.append(
                CurvePoint(
                    epoch=number,
                    step=steps + record.seen // epoch.batch,
                    samples=samples + record.seen,
                    hours=hours,
                    loss=record.loss,
                    learning_rate=record.learning_rate,
                )
            )
        steps, samples = steps + epoch.seen // epoch.batch, samples + epoch.seen
        if epoch.complete:
            result.ends[number + 1] = EpochEnd(
                number + 1, steps, samples, result.curve[-1].hours, epoch.batch, epoch.val_batch
            )
        else:
            result.notices.append(
                f"epoch {number} stopped after {epoch.seen} of {epoch.records[-1].epoch_samples} samples"
            )
    _note_changes(epochs, steps, samples, result.notices)
    return result


def _surviving_epochs(
    segments: Sequence[Segment], params: Mapping[str, str], notices: list[str]
) -> dict[int, _Epoch]:
    epochs: dict[int, _Epoch] = {}
    for index, segment in enumerate(segments):
        own: dict[int, list[TrainRecord]] = {}
        for record in segment.train:
            own.setdefault(record.epoch, []).append(record)
        if not own:
            continue
        for old in [number for number in epochs if number >= min(own)]:
            superseded = epochs.pop(old)
            state = "whole" if superseded.complete else f"up to sample {superseded.seen}"
            notices.append(
                f"epoch {old} was trained again after a resume; the earlier try ({state}) is left out"
            )
        settings = {**params, **segment.params}
        for number, records in own.items():
            batch = global_batch(settings) or records[0].seen
            epochs[number] = _Epoch(records, index, batch, whole_number(settings.get("batch_size")))
    return epochs


def global_batch(params: Mapping[str, str]) -> int | None:
    """Pairs per optimizer step over all processes (batch_size x accum_freq x world_size), if known."""
    batch = whole_number(params.get("batch_size"))
    if batch is None:
        return None
    return (
        batch * (whole_number(params.get("accum_freq")) or 1) * (whole_number(params.get("world_size")) or 1)
    )


def whole_number(value: object) -> int | None:
    """A positive whole number from text or JSON, else None."""
    try:
        number = float(str(value))
    except ValueError:
        return None
    return int(number) if math.isfinite(number) and number >= 1 and number == int(number) else None


def _stand_in(epochs: Mapping[int, _Epoch], number: int) -> _Epoch:
    """The nearest logged epoch, the later one of two."""
    return epochs[min(epochs, key=lambda other: (abs(other - number), other < number))]


def _segment_hours(segments: Sequence[Segment]) -> list[float]:
    """Hours of all earlier processes, per segment; the pauses between them are not counted."""
    total, starts = 0.0, []
    for segment in segments:
        starts.append(total / 3600)
        total += segment.seconds
    return starts


def _note_changes(epochs: Mapping[int, _Epoch], steps: int, samples: int, notices: list[str]) -> None:
    ordered = [epochs[number] for number in sorted(epochs)]
    lengths = list(dict.fromkeys(epoch.records[-1].epoch_samples for epoch in ordered))
    if len(lengths) > 1:
        notices.append(
            f"the epoch length changed on resume ({' -> '.join(map(str, lengths))} samples); "
            f"counted from the log: {steps} steps, {samples} samples"
        )
    batches = list(dict.fromkeys(epoch.batch for epoch in ordered))
    if len(batches) > 1:
        notices.append(f"the batch size changed on resume ({' -> '.join(map(str, batches))})")


def smoothed_loss(losses: Sequence[float]) -> tuple[float | None, float | None]:
    """Training loss at the end of `losses`: mean of the last tenth (at least 5 logged steps), and its error.

    The error is the standard error of that mean about a straight line, so that a slope is not taken for
    noise. Steps that are not finite are left out. None where there is nothing to average.
    """
    count = max(5, math.ceil(len(losses) / 10))
    tail = [(i, loss) for i, loss in enumerate(losses[-count:]) if math.isfinite(loss)]
    if not tail:
        return None, None
    n = len(tail)
    mean = sum(loss for _, loss in tail) / n
    if n < 4:
        return mean, None
    centre = sum(i for i, _ in tail) / n
    spread = sum((i - centre) ** 2 for i, _ in tail)
    slope = sum((i - centre) * (loss - mean) for i, loss in tail) / spread
    rest = sum((loss - mean - slope * (i - centre)) ** 2 for i, loss in tail)
    return mean, math.sqrt(rest / (n - 2) / n)


def divergence(losses: Sequence[float], batch: int | None, contrastive: bool = True) -> str | None:
    """Why a run counts as diverged, or None.

    A run has diverged when its last logged loss is not finite, or when its smoothed final loss exceeds
    1.2 ln(batch), 1.2 times the InfoNCE loss of guessing, and also its loss at the start.
    """
    if not losses:
        return None
    if not math.isfinite(losses[-1]):
        return "its training loss ends as NaN or infinity"
    final, _ = smoothed_loss(losses)
    start = next(loss for loss in losses if math.isfinite(loss))
    if final is None or not contrastive or batch is None:
        return None
    limit = 1.2 * math.log(batch)
    if final > limit and final > start:
        return f"its training loss ends at {final:.3g}, above 1.2 ln(batch) = {limit:.3g}"
    return None
