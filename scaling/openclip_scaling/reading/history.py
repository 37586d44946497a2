"""Turns scalars by step, as tensorboard and wandb keep them, into the segments that out.log would have given.

OpenCLIP numbers its steps from 0 through all epochs, so the steps of one epoch must be known to tell the epochs
apart: from evaluations (which name their epoch), from the planned samples, or from run.json.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from openclip_scaling.reading.epochs import global_batch, whole_number
from openclip_scaling.reading.logs import LR_RESOLUTION, EvalRecord, Segment
from openclip_scaling.reading.records import TrainRecords

_NO_METRICS = ("epoch",)


@dataclass(frozen=True)
class Step:
    """One logged step (from 0), and its time in seconds by any clock (NaN where it is not known)."""

    step: int
    time: float
    loss: float
    learning_rate: float | None = None


@dataclass(frozen=True)
class Evaluation:
    """Metrics of a finished epoch (from 1), and the steps that were made before it, where they are known."""

    epoch: int
    metrics: dict[str, float]
    steps: int | None = None


@dataclass
class History:
    """What one process logged."""

    steps: list[Step] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)


def segment_of(
    history: History, params: Mapping[str, str], manifest: Mapping[str, Any], notices: list[str]
) -> Segment:
    """The segment of a history; where epochs cannot be told apart it has evaluations only, and a notice says so."""
    per_epoch = _steps_per_epoch(history.evaluations, params, manifest)
    batch = global_batch(params) or whole_number(manifest.get("batch_size"))
    segment = Segment(evals=[EvalRecord(item.epoch, item.metrics) for item in history.evaluations])
    if history.steps and (per_epoch is None or batch is None):
        lacking = "the steps of an epoch are" if per_epoch is None else "the batch size is"
        notices.append(f"{lacking} not known, so its {len(history.steps)} logged steps cannot be used")
    elif history.steps and per_epoch is not None and batch is not None:
        segment.train, segment.batch = _records(history.steps, per_epoch, batch), batch
        segment.seconds = segment.train[len(segment.train) - 1].seconds
        evaluated = max((item.epoch for item in history.evaluations), default=0)
        # A history may be thinned out: an epoch whose last step is not in it is whole where a later one was begun.
        segment.finished = max(evaluated, segment.train[len(segment.train) - 1].epoch)
    return segment


def _records(steps: Iterable[Step], per_epoch: int, batch: int) -> TrainRecords:
    records = TrainRecords()
    ordered = sorted(steps, key=lambda item: item.step)
    for item in ordered:
        epoch, index = divmod(item.step, per_epoch)
        rate = item.learning_rate or 0.0
        known_rate = rate if rate >= LR_RESOLUTION else math.nan
        records.append(
            epoch, (index + 1) * batch, per_epoch * batch, item.loss, known_rate, item.time - ordered[0].time
        )
    return records


def _steps_per_epoch(
    evaluations: Sequence[Evaluation], params: Mapping[str, str], manifest: Mapping[str, Any]
) -> int | None:
    votes = Counter(
        item.steps // item.epoch
        for item in evaluations
        if item.epoch and item.steps and item.steps % item.epoch == 0
    )
    if votes:
        return votes.most_common(1)[0][0]
    return _planned_by_params(params) or _planned_by_manifest(manifest)


def _planned_by_params(params: Mapping[str, str]) -> int | None:
    """Steps that OpenCLIP makes of --train-num-samples with shards: whole batches for every loading worker."""
    samples, batch = whole_number(params.get("train_num_samples")), whole_number(params.get("batch_size"))
    shards = params.get("dataset_type") == "webdataset" or ".tar" in params.get("train_data", "")
    if samples is None or batch is None or not shards:
        return None
    workers = whole_number(params.get("workers")) or 1
    batches = math.ceil(samples / (batch * (whole_number(params.get("world_size")) or 1)))
    return math.ceil(batches / workers) * workers // (whole_number(params.get("accum_freq")) or 1) or None


def _planned_by_manifest(manifest: Mapping[str, Any]) -> int | None:
    planned = manifest.get("planned")
    planned = planned if isinstance(planned, Mapping) else {}
    steps, epochs = whole_number(planned.get("steps")), whole_number(planned.get("epochs"))
    return steps // epochs if steps and epochs and steps % epochs == 0 else None


def number_of(value: Any) -> float | None:
    """A number from JSON or text, NaN and infinities too, else None."""
    if value is None or isinstance(value, bool) or value == "":
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def metrics_of(scalars: Mapping[str, Any]) -> dict[str, float]:
    """The validation metrics of a row of scalars, by OpenCLIP's own names."""
    found = {name[4:]: number_of(value) for name, value in scalars.items() if name[:4] == "val/"}
    return {name: value for name, value in found.items() if value is not None and name not in _NO_METRICS}
