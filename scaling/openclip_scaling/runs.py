"""Collects run folders into tables: checkpoints with their evaluations, runs, and training-loss curves."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from openclip_scaling.errors import UserError
from openclip_scaling.flops import FLOP_PER_MAC, TRAINING_FACTOR
from openclip_scaling.run_folder import (
    Cost,
    Run,
    cost_of,
    find_run_folders,
    read_run,
    run_names,
    text_or_none,
)
from openclip_scaling.trajectory import divergence, global_batch, smoothed_loss, whole_number

# Columns that describe a checkpoint; every other column of the table is a metric.
RUN_COLUMNS = (
    "run", "model", "attention", "text_attention", "image_parameters", "text_parameters", "parameters",
    "gmac_per_pair", "batch", "val_batch", "lr_schedule", "diverged",
)  # fmt: skip
CHECKPOINT_COLUMNS = (
    *RUN_COLUMNS, "epoch", "step", "samples_seen", "unique_samples_bound", "train_flop", "hours",
    "train_loss", "train_loss_se",
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


def collect(sources: Sequence[Path]) -> Collection:
    """Read every run among and below `sources`. Raises UserError when there is none."""
    folders = find_run_folders(sources)
    names = run_names(folders)
    runs = [read_run(folder, names[folder]) for folder in folders]
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


def grouped(notices: Sequence[Notice]) -> list[str]:
    """Every notice once, with the runs that it belongs to."""
    where: dict[str, list[str]] = {}
    for notice in notices:
        where.setdefault(notice.text, []).append(notice.run)
    return [f"{_shortened(names)}: {text}" for text, names in where.items()]


def _shortened(names: Sequence[str]) -> str:
    unique = list(dict.fromkeys(names))
    return ", ".join(unique[:6]) + (f" and {len(unique) - 6} more" if len(unique) > 6 else "")


def _frame(rows: list[dict[str, Any]], first: list[str]) -> pd.DataFrame:
    columns = list(dict.fromkeys([*first, *(key for row in rows for key in row)]))
    return pd.DataFrame(rows, columns=pd.Index(columns))


def _rows(run: Run) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The run's row and the rows of its checkpoints."""
    cost = cost_of(run)
    batch = whole_number(run.manifest.get("batch_size")) or global_batch(run.params)
    if batch is None and run.trajectory.ends:
        batch = next(reversed(run.trajectory.ends.values())).batch
    contrastive = run.params.get("siglip") != "True"
    reason = divergence(run.trajectory.losses, batch, contrastive)
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
    }
    if "lr_scheduler" in run.params:
        common["lr_schedule"] = run.params["lr_scheduler"]
    checkpoints = [_checkpoint_row(run, common, cost, epoch) for epoch in _epoch_numbers(run)]
    return _run_row(run, common, checkpoints), checkpoints


def _epoch_numbers(run: Run) -> list[int]:
    known = run.trajectory.ends
    unknown = sorted(set(run.metrics) - set(known) - {0})
    if unknown:
        run.notices.append(
            f"evaluated at epoch {', '.join(map(str, unknown))}, which the log does not show as finished; "
            "its steps and samples are not known"
        )
    return sorted({*known, *run.metrics})


def _checkpoint_row(run: Run, common: dict[str, Any], cost: Cost, epoch: int) -> dict[str, Any]:
    end = run.trajectory.ends.get(epoch)
    samples = end.samples if end else (0 if epoch == 0 else None)
    loss, error = (
        smoothed_loss([p.loss for p in run.trajectory.curve if p.epoch < epoch]) if end else (None, None)
    )
    flop = None
    if samples is not None and cost.train_gmac is not None:
        flop = TRAINING_FACTOR * FLOP_PER_MAC * cost.train_gmac * 1e9 * samples
    return {
        **common,
        "batch": end.batch if end else common["batch"],
        "val_batch": end.val_batch if end else common["val_batch"],
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


def _unique_bound(run: Run, samples: int | None) -> int | None:
    """No more different samples than were seen, nor than the data holds, where run.json or the log tells."""
    if samples is None:
        return None
    bound = whole_number(run.manifest.get("unique_samples_bound"))
    sized_by_data = run.params.get("train_num_samples") in ("None", "0")
    if bound is None and sized_by_data and run.params.get("dataset_resampled") == "False":
        lengths = [record.epoch_samples for segment in run.log.segments for record in segment.train]
        bound = max(lengths, default=None)
    return samples if bound is None else min(samples, bound)


def _note_training(run: Run) -> None:
    status = text_or_none(run.manifest.get("status"))
    planned = whole_number(run.params.get("epochs"))
    finished = max(run.trajectory.ends, default=0)
    if status not in (None, "finished"):
        run.notices.append(f"run.json says that it is {status}")
    elif planned and run.trajectory.curve and finished < planned:
        run.notices.append(f"it finished {finished} of {planned} planned epochs")
    if "True" in (run.params.get("lock_image"), run.params.get("lock_text")):
        run.notices.append(
            "a tower is locked, so its training compute is below the 3 x forward that is counted"
        )
    broken = sum(not math.isfinite(loss) for loss in run.trajectory.losses)
    if broken:
        run.notices.append(
            f"{broken} of {len(run.trajectory.losses)} logged training losses are NaN or infinite"
        )


def _run_row(run: Run, common: dict[str, Any], checkpoints: list[dict[str, Any]]) -> dict[str, Any]:
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
        **common,
        **{key: last.get(key) for key in keys},
        "world_size": whole_number(run.manifest.get("world_size"))
        or whole_number(run.params.get("world_size")),
        "status": text_or_none(run.manifest.get("status")),
        "folder": str(run.folder),
    }


def _curve_rows(run: Run) -> list[dict[str, Any]]:
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


def companion(path: Path, part: str) -> Path:
    """Where the other tables of a collection lie: beside table.csv as table.runs.csv and so on."""
    return path.with_name(f"{path.stem}.{part}")


def save(collection: Collection, path: Path) -> list[Path]:
    """Write the checkpoints to `path` (CSV), and beside it the runs, the curves and the notices."""
    texts = {
        path: collection.checkpoints.to_csv(index=False),
        companion(path, "runs.csv"): collection.runs.to_csv(index=False),
        companion(path, "curves.csv"): collection.curves.to_csv(index=False),
        companion(path, "notices.json"): json.dumps(
            [{"run": notice.run, "text": notice.text} for notice in collection.notices], indent=1
        ),
    }
    for target, text in texts.items():
        write_atomically(target, text)
    return list(texts)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file under a temporary name beside it, then rename. Raises UserError where it cannot."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise UserError(f"Cannot write {path}: {error.strerror}.") from error


def load(path: Path) -> Collection:
    """Read what `save` wrote; any other CSV of results is a collection of checkpoints alone."""
    runs, curves = companion(path, "runs.csv"), companion(path, "curves.csv")
    notices = companion(path, "notices.json")
    return Collection(
        checkpoints=read_csv(path),
        runs=read_csv(runs) if runs.is_file() else pd.DataFrame(),
        curves=read_csv(curves) if curves.is_file() else pd.DataFrame(),
        notices=_load_notices(notices) if notices.is_file() else [],
    )


def _load_notices(path: Path) -> list[Notice]:
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))
        return [Notice(str(item["run"]), str(item["text"])) for item in listed]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path} does not hold the notices that `collect` writes; collect again.") from error


def read_csv(path: Path) -> pd.DataFrame:
    """Read a CSV file. Raises UserError when it is absent, empty or malformed."""
    try:
        return pd.read_csv(path).rename(columns=lambda name: str(name).strip())
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror}.") from error
    except (pd.errors.EmptyDataError, pd.errors.ParserError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not a CSV table: {str(error).strip().rstrip('.')}.") from error
