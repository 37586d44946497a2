"""From one run to table rows: its own, those of its checkpoints, and its logged steps as columns."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from openclip_scaling.flops import FLOP_PER_MAC, TRAINING_FACTOR
from openclip_scaling.reading.costs import Cost, cost_of, text_or_none
from openclip_scaling.reading.epochs import global_batch, whole_number
from openclip_scaling.reading.folders import Place, printable
from openclip_scaling.reading.records import FloatArray, IntArray
from openclip_scaling.reading.run_folder import Run, read_run
from openclip_scaling.reading.smoothing import divergence, smoothed_loss

_LAST = (
    "batch", "val_batch", "epoch", "step", "samples_seen", "unique_samples_bound", "train_flop", "hours", "gpu_hours",
    "train_loss", "val_loss",
)  # fmt: skip
_DETAILS = re.compile(r"'.*'|\".*\"|\d+")
_NAMED = 10  # notices that differ in their numbers and quotations alone, before the others are counted


@dataclass(frozen=True)
class RunRows:
    """What the tables say of one run: a row, rows of its checkpoints, columns of its logged steps, and notices."""

    name: str
    row: dict[str, Any]
    checkpoints: list[dict[str, Any]]
    curve: dict[str, IntArray | FloatArray]
    notices: list[str] = field(default_factory=list)


def rows_of(place: Place) -> RunRows:
    """Read a run and make its rows. Raises UserError where one of its files cannot be read."""
    run = read_run(place)
    cost = cost_of(run)
    ends = list(run.trajectory.ends.values())
    planned = whole_number(run.manifest.get("batch_size")) or global_batch(run.params)
    batch = ends[-1].batch if ends else planned
    contrastive = run.params.get("siglip") != "True"
    reason = divergence(run.trajectory.curve.loss, batch, contrastive)
    if reason:
        run.notices.append(f"diverged, and left out of every fit: {reason}")
    _note_training(run)
    common: dict[str, Any] = {
        "run": run.name,
        "model": text_or_none(run.manifest.get("model")) or run.params.get("model"),
        "attention": cost.attention,
        "text_attention": cost.text_attention,
        "image_parameters": cost.image_parameters,
        "text_parameters": cost.text_parameters,
        "parameters": cost.parameters,
        "gmac_per_pair": cost.gmac,
        "batch": batch,
        "val_batch": whole_number(run.params.get("batch_size")),
        "diverged": reason is not None,
        "learning_rate": _number(run.params.get("lr")),
        "seed": _number(run.params.get("seed")),
        "lr_schedule": run.params.get("lr_scheduler"),
    }
    checkpoints = [_checkpoint_row(run, common, cost, epoch) for epoch in _epoch_numbers(run)]
    row = _run_row(run, common, checkpoints)
    return RunRows(run.name, row, checkpoints, _curve(run), condensed(run.notices))


def condensed(notices: Sequence[str]) -> list[str]:
    """The notices, without most of those that are there many times but for their numbers and quotations."""
    kinds = [_DETAILS.sub("", text) for text in notices]
    counts, named = Counter(kinds), Counter[str]()
    kept = []
    for text, kind in zip(notices, kinds, strict=True):
        named[kind] += 1
        if named[kind] < _NAMED or counts[kind] == named[kind] == _NAMED:
            kept.append(text)
        elif named[kind] == _NAMED:
            kept.append(f"{text} (and {counts[kind] - _NAMED} more like this)")
    return kept


def training_flop(gmac: float, samples: float) -> float:
    """FLOP of training on `samples` pairs of `gmac` forward GMAC each: 3 x 2 x MAC x samples."""
    return TRAINING_FACTOR * FLOP_PER_MAC * gmac * 1e9 * samples


def _epoch_numbers(run: Run) -> list[int]:
    known = run.trajectory.ends
    unknown = sorted(set(run.metrics) - set(known) - {0})
    if unknown:
        run.notices.append(
            f"evaluated at epoch {', '.join(map(str, unknown))}, which the log does not show as finished; "
            "its steps and samples are not known"
        )
    return sorted({*known, *run.metrics})


def _checkpoint_row(run: Run, common: Mapping[str, Any], cost: Cost, epoch: int) -> dict[str, Any]:
    end = run.trajectory.ends.get(epoch)
    samples = end.samples if end else (0 if epoch == 0 else None)
    loss, error = smoothed_loss(run.trajectory.curve.losses_before(epoch)) if end else (None, None)
    known = samples is not None and cost.train_gmac is not None
    return {
        **common,
        "batch": end.batch if end else common["batch"],
        "val_batch": end.val_batch if end else common["val_batch"],
        "epoch": epoch,
        "step": end.steps if end else (0 if epoch == 0 else None),
        "samples_seen": samples,
        "unique_samples_bound": _unique_bound(run, samples),
        "train_flop": training_flop(cost.train_gmac or 0.0, samples or 0) if known else None,
        "hours": end.hours if end else None,
        "gpu_hours": end.gpu_hours if end else None,
        "train_loss": loss,
        "train_loss_se": error,
        **run.metrics.get(epoch, {}),
    }


def _unique_bound(run: Run, samples: int | None) -> int | None:
    """No more different samples than were seen, nor than the data holds, where run.json or the log tells."""
    if samples is None:
        return None
    bound = whole_number(run.manifest.get("unique_samples_bound"))
    sized_by_data = run.params.get("train_num_samples") in ("None", "0")
    if bound is None and sized_by_data and run.params.get("dataset_resampled") == "False":
        lengths = [int(segment.train.epoch_samples.max(initial=0)) for segment in run.log.segments]
        bound = max(lengths, default=0) or None
    return samples if bound is None else min(samples, bound)


def _note_training(run: Run) -> None:
    status = text_or_none(run.manifest.get("status"))
    planned = whole_number(run.params.get("epochs"))
    finished = max(run.trajectory.ends, default=0)
    curve = run.trajectory.curve
    if run.log.segments and not len(curve):
        run.notices.append("out.log holds no training step that can be read")
    if status not in (None, "finished"):
        run.notices.append(f"run.json says that it is {status}")
    elif planned and len(curve) and finished < planned:
        run.notices.append(f"it finished {finished} of {planned} planned epochs")
    if "True" in (run.params.get("lock_image"), run.params.get("lock_text")):
        run.notices.append(
            "a tower is locked, so its training compute is below the 3 x forward that is counted"
        )
    broken = int((~np.isfinite(curve.loss)).sum())
    if broken:
        run.notices.append(f"{broken} of {len(curve)} logged training losses are NaN or infinite")


def _run_row(run: Run, common: Mapping[str, Any], checkpoints: list[dict[str, Any]]) -> dict[str, Any]:
    last = checkpoints[-1] if checkpoints else {}
    return {
        **common,
        **{key: last.get(key, common.get(key)) for key in _LAST},
        "world_size": whole_number(run.manifest.get("world_size"))
        or whole_number(run.params.get("world_size")),
        "status": text_or_none(run.manifest.get("status")),
        "folder": printable(run.folder),
    }


def _curve(run: Run) -> dict[str, IntArray | FloatArray]:
    curve = run.trajectory.curve
    return {
        "epoch": curve.epoch,
        "step": curve.step,
        "samples_seen": curve.samples,
        "hours": curve.hours,
        "train_loss": curve.loss,
        "learning_rate": curve.learning_rate,
    }


def _number(text: str | None) -> float | None:
    """A finite number of params.txt, or None."""
    try:
        value = float(text or "nan")
    except ValueError:
        return None
    return value if np.isfinite(value) else None
