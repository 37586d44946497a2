"""Reads one run folder: its manifest, log, evaluations, and what tensorboard and wandb kept where the log is cut.

A run folder is OpenCLIP's own `<logs>/<name>/`. Its run.json is used where there is one; params.txt, out.log
and results.jsonl serve any other OpenCLIP run. Checkpoint files are not opened.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openclip_scaling.errors import UserError
from openclip_scaling.reading.backups import Backup, best_backup, note_differences
from openclip_scaling.reading.epochs import whole_number
from openclip_scaling.reading.evaluations import (
    Metrics,
    read_json_lines,
    validation_metrics,
    zeroshot_metrics,
)
from openclip_scaling.reading.folders import LOG_NAMES, Place
from openclip_scaling.reading.logs import EvalRecord, Log, read_log, read_params
from openclip_scaling.reading.trajectory import Trajectory, trace
from openclip_scaling.reading.wandb_files import wandb_params


@dataclass
class Run:
    """Everything read from one folder, before it becomes table rows."""

    name: str
    folder: Path
    manifest: Mapping[str, Any]
    params: Mapping[str, str]
    log: Log
    trajectory: Trajectory
    notices: list[str]
    metrics: dict[int, Metrics] = field(default_factory=dict)


def read_run(place: Place) -> Run:
    """Read one run. Raises UserError where one of its files cannot be read."""
    try:
        return _read(place)
    except OSError as error:
        raise UserError(f"Cannot read {error.filename or place.folder}: {error.strerror}.") from error


def _read(place: Place) -> Run:
    notices: list[str] = []
    folder = place.folder
    manifest = _manifest(folder / "run.json", notices)
    path = next((folder / log for log in LOG_NAMES if (folder / log).is_file()), None)
    log = read_log(path) if path else Log([], ["there is no out.log"])
    notices += log.notices
    params = (
        read_params(folder / "params.txt")
        or (log.segments[-1].params if log.segments else {})
        or wandb_params(place.wandb, notices)
    )
    trajectory = trace(log.segments, params)
    backup = best_backup(place, params, manifest, notices) if _is_cut(trajectory, params) else None
    printed = [record for segment in log.segments for record in segment.evals]
    if backup is not None:
        trajectory = _chosen(trajectory, backup, path is not None, notices)
    notices += trajectory.notices
    run = Run(place.name, folder, manifest, params, log, trajectory, notices)
    run.metrics = _metrics(run, printed, backup)
    return run


def _is_cut(trajectory: Trajectory, params: Mapping[str, str]) -> bool:
    planned = whole_number(params.get("epochs"))
    return trajectory.gaps or (planned is not None and max(trajectory.ends, default=0) < planned)


def _chosen(trajectory: Trajectory, backup: Backup, logged: bool, notices: list[str]) -> Trajectory:
    """The log's trajectory, unless the backup has followed the run for more samples."""
    note_differences(trajectory.curve, backup, notices)
    if len(trajectory.curve) and not backup.reaches_beyond(trajectory):
        return trajectory
    if len(backup.trajectory.curve):
        lack = "out.log does not hold the whole training; " if logged else ""
        notices.append(f"{lack}steps, losses and hours are those of {backup.name}")
        return backup.trajectory
    return trajectory


def _metrics(run: Run, printed: list[EvalRecord], backup: Backup | None) -> dict[int, Metrics]:
    """Evaluations by epoch: those of the backup give way to the log's, and these to results.jsonl."""
    results = read_json_lines(run.folder / "checkpoints" / "results.jsonl", run.notices)
    metrics = validation_metrics(results, printed, run.notices)
    if backup is not None:
        backup.fill_in(metrics, run.notices)
    rows = read_json_lines(run.folder / "checkpoints" / "zeroshot.jsonl", run.notices)
    for epoch, values in zeroshot_metrics(rows, run.notices).items():
        metrics.setdefault(epoch, {}).update(values)
    return metrics


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
