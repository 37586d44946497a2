"""Collects run folders into tables: checkpoints with their evaluations, runs, and training-loss curves.

A run folder is OpenCLIP's own `<logs>/<name>/`. Its run.json is used where there is one; params.txt, out.log and
results.jsonl serve any other OpenCLIP run. Checkpoint files are not opened.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from openclip_scaling.architecture import read_architecture
from openclip_scaling.errors import UserError
from openclip_scaling.evaluations import Metrics, read_json_lines, validation_metrics, zeroshot_metrics
from openclip_scaling.flops import FLOP_PER_MAC, TRAINING_FACTOR, ClipCost, clip_cost
from openclip_scaling.logs import Log, read_log, read_params
from openclip_scaling.trajectory import (
    Trajectory,
    divergence,
    global_batch,
    smoothed_loss,
    trace,
    whole_number,
)

_LOG_NAMES = ("out.log", "out-0.log")
_RUN_FILES = (*_LOG_NAMES, "params.txt", "run.json")
# Columns that describe a checkpoint; every other column of the table is a metric.
RUN_COLUMNS = (
    "run", "model", "attention", "text_attention", "image_parameters", "text_parameters", "parameters",
    "gmac_per_pair", "batch", "val_batch", "diverged",
)  # fmt: skip
CHECKPOINT_COLUMNS = (
    *RUN_COLUMNS, "epoch", "step", "samples_seen", "unique_samples_bound", "train_flop", "hours", "train_loss",
    "train_loss_se",
)  # fmt: skip


@dataclass(frozen=True)
class Notice:
    """Something that was repaired, assumed or left out while reading a run."""

    run: str
    text: str

    def __str__(self) -> str:
        return f"{self.run}: {self.text}"


@dataclass
class Collection:
    """Three tables (one row per checkpoint, per run, per logged step) and the notices.

    Units: samples_seen in image-text pairs, gmac_per_pair in 1e9 forward multiply-adds, train_flop in FLOP
    (3 x 2 x MAC x samples), hours of wall-clock time, batch in pairs over all processes.
    """

    checkpoints: pd.DataFrame
    runs: pd.DataFrame
    curves: pd.DataFrame
    notices: list[Notice] = field(default_factory=list)


@dataclass
class _Run:
    """Everything read from one folder, before it becomes table rows."""

    name: str
    folder: Path
    manifest: Mapping[str, Any]
    params: Mapping[str, str]
    log: Log
    notices: list[str]
    trajectory: Trajectory = field(default_factory=Trajectory)
    metrics: dict[int, Metrics] = field(default_factory=dict)


def find_run_folders(sources: Iterable[Path]) -> list[Path]:
    """Run folders among and below `sources`, each once, sorted within each source. Raises UserError where none is."""
    found: dict[Path, None] = {}
    for source in sources:
        if not source.is_dir():
            raise UserError(f"{source} is not a folder; give run folders or a folder that holds them.")
        below = {path.parent for name in _RUN_FILES for path in source.rglob(name)}
        if not below:
            raise UserError(f"No OpenCLIP run (out.log, params.txt or run.json) in {source} or below it.")
        found.update(dict.fromkeys(sorted(folder.resolve() for folder in below)))
    return list(found)


def collect(sources: Sequence[Path]) -> Collection:
    """Read every run among and below `sources`. Raises UserError when there is none."""
    folders = find_run_folders(sources)
    names = _names(folders)
    runs = [_read_run(folder, names[folder]) for folder in folders]
    run_rows: list[dict[str, Any]] = []
    checkpoint_rows: list[dict[str, Any]] = []
    curve_rows: list[dict[str, Any]] = []
    for run in runs:
        row, checkpoints = _rows(run)
        run_rows.append(row)
        checkpoint_rows += checkpoints
        curve_rows += _curve_rows(run)
    notices = [Notice(run.name, text) for run in runs for text in run.notices]
    curve_columns = ["run", "epoch", "step", "samples_seen", "hours", "train_loss", "learning_rate"]
    return Collection(
        checkpoints=_frame(checkpoint_rows, list(CHECKPOINT_COLUMNS)),
        runs=_frame(run_rows, list(RUN_COLUMNS)),
        curves=_frame(curve_rows, curve_columns),
        notices=notices,
    )


def _frame(rows: list[dict[str, Any]], first: list[str]) -> pd.DataFrame:
    columns = list(dict.fromkeys([*first, *(key for row in rows for key in row)]))
    return pd.DataFrame(rows, columns=pd.Index(columns))


def _names(folders: Sequence[Path]) -> dict[Path, str]:
    """Folder names; where two are the same, as many parents as tell them apart."""
    names: dict[Path, str] = {}
    for folder in folders:
        depth = 1
        while any(other != folder and _tail(other, depth) == _tail(folder, depth) for other in folders):
            depth += 1
        names[folder] = _tail(folder, depth)
    return names


def _tail(folder: Path, depth: int) -> str:
    return "/".join(folder.parts[-depth:])


def _read_run(folder: Path, name: str) -> _Run:
    notices: list[str] = []
    manifest = _manifest(folder / "run.json", notices)
    path = next((folder / log for log in _LOG_NAMES if (folder / log).is_file()), None)
    log = read_log(path) if path else Log([], ["there is no out.log"])
    notices += log.notices
    params = read_params(folder / "params.txt") or (log.segments[-1].params if log.segments else {})
    run = _Run(name, folder, manifest, params, log, notices)
    run.trajectory = trace(log, params)
    notices += run.trajectory.notices
    printed = [record for segment in log.segments for record in segment.evals]
    results = read_json_lines(folder / "checkpoints" / "results.jsonl", notices)
    run.metrics = validation_metrics(results, printed, notices)
    rows = read_json_lines(folder / "checkpoints" / "zeroshot.jsonl", notices)
    for epoch, values in zeroshot_metrics(rows, notices).items():
        run.metrics.setdefault(epoch, {}).update(values)
    return run


def _manifest(path: Path, notices: list[str]) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        manifest = None
    if not isinstance(manifest, dict):
        notices.append("run.json cannot be read as a JSON object and is not used")
        return {}
    return manifest


@dataclass(frozen=True)
class _Cost:
    """Size and forward cost of a run's model, each None where it is not known."""

    attention: str | None = None
    text_attention: str | None = None
    image_parameters: int | None = None
    text_parameters: int | None = None
    parameters: int | None = None
    gmac: float | None = None
    train_gmac: float | None = None


def _cost(run: _Run) -> _Cost:
    """From run.json where it says so, and otherwise by arithmetic from the printed model."""
    manifest = run.manifest
    counts = manifest.get("parameters")
    counts = counts if isinstance(counts, Mapping) else {"total": counts}
    gmac = manifest.get("gmac_per_pair")
    gmac = _positive(gmac.get("total") if isinstance(gmac, Mapping) else gmac)
    counted = None if gmac is not None and manifest.get("attention") else _counted(run)
    if counted is None:
        return _Cost(
            attention=_text(manifest.get("attention")),
            text_attention=_text(manifest.get("text_attention")),
            image_parameters=whole_number(counts.get("image")),
            text_parameters=whole_number(counts.get("text")),
            parameters=whole_number(counts.get("total")),
            gmac=gmac,
            train_gmac=gmac,
        )
    return _Cost(
        attention=_text(manifest.get("attention")) or counted.image_attention,
        text_attention=_text(manifest.get("text_attention")) or counted.text_attention,
        image_parameters=whole_number(counts.get("image")) or counted.image_parameters,
        text_parameters=whole_number(counts.get("text")) or counted.text_parameters,
        parameters=whole_number(counts.get("total")) or counted.parameters,
        gmac=gmac or counted.gmac,
        train_gmac=gmac or counted.train_gmac,
    )


def _counted(run: _Run) -> ClipCost | None:
    segment = next((s for s in reversed(run.log.segments) if s.model_repr), None)
    context = whole_number(run.params.get("force_context_length"))
    try:
        if segment is None:
            raise UserError("no printed model in out.log")
        found = read_architecture(segment.model_repr, segment.image_size, context)
        dropout = _positive(run.params.get("force_patch_dropout"))
        found.config["vision_cfg"]["patch_dropout"] = dropout or 0.0
        cost = clip_cost(found.config, found.image_attention, found.text_attention)
    except UserError as error:
        run.notices.append(f"its compute is not known: {str(error).rstrip('.')}")
        return None
    run.notices.extend(found.notices)
    return cost


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _positive(value: Any) -> float | None:
    try:
        number = float(str(value))
    except ValueError:
        return None
    return number if math.isfinite(number) and number > 0 else None


def _rows(run: _Run) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The run's row and the rows of its checkpoints."""
    cost = _cost(run)
    batch = whole_number(run.manifest.get("batch_size")) or global_batch(run.params)
    if batch is None and run.trajectory.ends:
        batch = next(reversed(run.trajectory.ends.values())).batch
    contrastive = run.params.get("siglip") != "True"
    reason = divergence(run.trajectory.losses, batch, contrastive)
    if reason:
        run.notices.append(f"diverged, and left out of every fit: {reason}")
    _note_unfinished(run)
    shared: dict[str, Any] = {
        "run": run.name,
        "model": _text(run.manifest.get("model")) or run.params.get("model"),
        "attention": cost.attention,
        "text_attention": cost.text_attention,
        "image_parameters": cost.image_parameters,
        "text_parameters": cost.text_parameters,
        "parameters": cost.parameters,
        "gmac_per_pair": cost.gmac,
        "batch": batch,
        "val_batch": whole_number(run.params.get("batch_size")),
        "diverged": reason is not None,
    }
    checkpoints = [_checkpoint_row(run, shared, cost, epoch) for epoch in _epoch_numbers(run)]
    return _run_row(run, shared, checkpoints), checkpoints


def _epoch_numbers(run: _Run) -> list[int]:
    known = run.trajectory.ends
    unknown = sorted(set(run.metrics) - set(known) - {0})
    if unknown:
        run.notices.append(
            f"evaluated at epoch {', '.join(map(str, unknown))}, which the log does not show as finished; "
            "its steps and samples are not known"
        )
    return sorted({*known, *run.metrics})


def _checkpoint_row(run: _Run, shared: dict[str, Any], cost: _Cost, epoch: int) -> dict[str, Any]:
    end = run.trajectory.ends.get(epoch)
    samples = end.samples if end else (0 if epoch == 0 else None)
    loss, error = (
        smoothed_loss([p.loss for p in run.trajectory.curve if p.epoch < epoch]) if end else (None, None)
    )
    flop = None
    if samples is not None and cost.train_gmac is not None:
        flop = TRAINING_FACTOR * FLOP_PER_MAC * cost.train_gmac * 1e9 * samples
    return {
        **shared,
        "batch": end.batch if end else shared["batch"],
        "val_batch": end.val_batch if end else shared["val_batch"],
        "epoch": epoch,
        "step": end.steps if end else (0 if epoch == 0 else None),
        "samples_seen": samples,
        "unique_samples_bound": _unique_bound(run, samples),
        "train_flop": flop,
        "hours": end.hours if end else None,
        "train_loss": loss,
        "train_loss_se": error,
        **run.metrics.get(epoch, {}),
    }


def _unique_bound(run: _Run, samples: int | None) -> int | None:
    """No more different samples than were seen, nor than the data holds (where run.json or the epoch tells)."""
    if samples is None:
        return None
    bound = whole_number(run.manifest.get("unique_samples_bound"))
    sized_by_data = run.params.get("train_num_samples") in ("None", "0")
    if bound is None and sized_by_data and run.params.get("dataset_resampled") == "False":
        lengths = [record.epoch_samples for segment in run.log.segments for record in segment.train]
        bound = max(lengths, default=None)
    return samples if bound is None else min(samples, bound)


def _note_unfinished(run: _Run) -> None:
    status = _text(run.manifest.get("status"))
    planned = whole_number(run.params.get("epochs"))
    finished = max(run.trajectory.ends, default=0)
    if status not in (None, "finished"):
        run.notices.append(f"run.json says that it is {status}")
    elif planned and run.trajectory.curve and finished < planned:
        run.notices.append(f"it finished {finished} of {planned} planned epochs")
    broken = sum(not math.isfinite(loss) for loss in run.trajectory.losses)
    if broken:
        run.notices.append(
            f"{broken} of {len(run.trajectory.losses)} logged training losses are NaN or infinite"
        )


def _run_row(run: _Run, shared: dict[str, Any], checkpoints: list[dict[str, Any]]) -> dict[str, Any]:
    last = checkpoints[-1] if checkpoints else {}
    keys = (
        "epoch",
        "step",
        "samples_seen",
        "unique_samples_bound",
        "train_flop",
        "hours",
        "train_loss",
        "val_loss",
    )
    return {
        **shared,
        **{key: last.get(key) for key in keys},
        "world_size": whole_number(run.manifest.get("world_size"))
        or whole_number(run.params.get("world_size")),
        "status": _text(run.manifest.get("status")),
        "folder": str(run.folder),
    }


def _curve_rows(run: _Run) -> list[dict[str, Any]]:
    return [
        {
            "run": run.name,
            "epoch": point.epoch,
            "step": point.step,
            "samples_seen": point.samples,
            "hours": point.hours,
            "train_loss": point.loss,
            "learning_rate": point.learning_rate,
        }
        for point in run.trajectory.curve
    ]
