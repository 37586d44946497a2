"""From a table of checkpoints to points by group: what is left out and named, and what must not be mixed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from openclip_scaling.errors import UserError
from openclip_scaling.fitting.best_rate import chosen_points, rate_notices, uneven_notices
from openclip_scaling.fitting.experiments import Plan, plans_of
from openclip_scaling.fitting.metrics import Metric, numbers
from openclip_scaling.fitting.points import Points
from openclip_scaling.fitting.settings import Settings

UNKNOWN = "unknown"
_SHOWN = 5  # rows that are named before the others are counted
_TOLD_APART = {
    "batch": "batch", "val_batch": "val_batch", "parameters": "size", "samples_seen": "samples", "seed": "seed",
    "learning_rate": "rate",
}  # fmt: skip


def usable_rows(frame: pd.DataFrame, settings: Settings, metric: Metric, notices: list[str]) -> pd.DataFrame:
    """The rows that can be fitted, with their group; what is left out is added to notices.

    Columns: x0 (and x1), y, group, run, and those of the table that tell experiments apart: batch, val_batch, size
    (parameters, or else the model's name), samples, seed and rate. Raises UserError when no row is left, and where
    batch sizes would be mixed in a loss.
    """
    frame = _filtered(frame, settings)
    frame = _without_repeats(frame, notices)
    frame = _without_diverged(frame, notices)
    rows = pd.DataFrame(
        {
            **{f"x{index}": numbers(frame, column) for index, column in enumerate(settings.scales)},
            "y": metric.values(frame),
            "group": _group_names(frame, settings.by, notices),
            "run": _run_names(frame, notices),
            "label": _row_labels(frame),
        }
    )
    for column, name in _TOLD_APART.items():
        if column in frame.columns:
            rows[name] = numbers(frame, column)
    if "model" in frame.columns and not ("size" in rows and np.isfinite(rows["size"]).all()):
        rows["size"] = frame["model"]
    rows = _usable(rows, settings, metric, notices)
    return _one_batch(rows, settings, metric)


@dataclass(frozen=True)
class Groups:
    """Points by group, sorted by name: all that are usable, with their plan, and of a sweep those at its best rates."""

    everything: dict[str, Points]
    chosen: dict[str, Points]
    plans: dict[str, Plan]


def groups_of(frame: pd.DataFrame, settings: Settings, metric: Metric, notices: list[str]) -> Groups:
    """The groups of a table; what is left out, and which learning rates were chosen, is added to notices."""
    rows = usable_rows(frame, settings, metric, notices)
    everything, plans = _points_by_group(rows, settings), plans_of(rows)
    notices += _untold_sweeps(rows, plans)
    for group, points in everything.items():
        notices += rate_notices(points, plans[group])
    notices += uneven_notices(plans.values())
    chosen = {group: chosen_points(points, plans[group]) for group, points in everything.items()}
    return Groups(everything, chosen, plans)


def grouped_points(
    frame: pd.DataFrame, settings: Settings, metric: Metric, notices: list[str]
) -> dict[str, Points]:
    """The points of every group, of a sweep those at its best learning rates."""
    return groups_of(frame, settings, metric, notices).chosen


def _untold_sweeps(rows: pd.DataFrame, plans: dict[str, Plan]) -> list[str]:
    """A word where several learning rates are fitted together because nothing tells which runs belong together."""
    if "rate" not in rows.columns:
        return []
    rates = rows.groupby("group")["rate"].nunique()
    return [
        f"{group}: several learning rates are fitted together; a sweep is told by columns samples_seen and parameters "
        "(or model) that have a value for every run"
        for group, plan in plans.items()
        if not plan.runs and rates[group] > 1
    ]


def _points_by_group(rows: pd.DataFrame, settings: Settings) -> dict[str, Points]:
    columns = "x0" if len(settings.scales) == 1 else [f"x{index}" for index in range(len(settings.scales))]
    return {
        str(group): Points(part[columns].to_numpy(), part["y"].to_numpy(), tuple(part["run"]))
        for group, part in rows.groupby("group", sort=True)
    }


def _filtered(frame: pd.DataFrame, settings: Settings) -> pd.DataFrame:
    if frame.empty:
        raise UserError("The table has no rows.")
    if not settings.min_samples >= 0:
        raise UserError(f"--min-samples must be a number of at least 0, not {settings.min_samples:g}.")
    keep = np.ones(len(frame), dtype=bool)
    for condition in settings.where:
        column, found, value = condition.partition("=")
        negated = column.endswith("!")
        column = column.rstrip("!").strip()
        if not found or column not in frame.columns:
            raise UserError(
                f"Condition {condition!r} must be COLUMN=VALUE or COLUMN!=VALUE with a column of the table."
            )
        keep &= (frame[column].astype(str) == value.strip()).to_numpy() != negated
    if settings.min_samples > 0:
        keep &= numbers(frame, "samples_seen") >= settings.min_samples
    if settings.batch is not None:
        keep &= numbers(frame, "batch") == settings.batch
    if not keep.any():
        raise UserError("No row of the table meets the conditions (--where, --min-samples, --batch).")
    return frame[keep].reset_index(drop=True)


def _without_repeats(frame: pd.DataFrame, notices: list[str]) -> pd.DataFrame:
    repeated = frame.duplicated().to_numpy()
    if repeated.any():
        notices.append(f"left out, equal to another row in every column: {int(repeated.sum())} rows")
    return frame[~repeated].reset_index(drop=True)


def _without_diverged(frame: pd.DataFrame, notices: list[str]) -> pd.DataFrame:
    if "diverged" not in frame.columns:
        return frame
    diverged = (frame["diverged"].astype(str) == "True").to_numpy()
    if diverged.any() and "run" in frame.columns:
        names = ", ".join(sorted(set(frame["run"][diverged].astype(str))))
        notices.append(f"left out, diverged: {names}")
    return frame[~diverged].reset_index(drop=True)


def _group_names(frame: pd.DataFrame, by: str, notices: list[str]) -> list[str]:
    """Values of the column; for attention the text tower's kind too, where it is not softmax."""
    if by not in frame.columns:
        raise UserError(
            f"The table has no column {by!r} to group by; its columns: {', '.join(map(str, frame.columns))}."
        )
    names = [UNKNOWN if pd.isna(value) else str(value) for value in frame[by]]
    if UNKNOWN in names:
        notices.append(f"rows without {by} form the group {UNKNOWN!r}")
    if by != "attention" or "text_attention" not in frame.columns:
        return names
    texts = ["softmax" if pd.isna(value) else str(value) for value in frame["text_attention"]]
    return [
        name if text == "softmax" else f"{name} (text: {text})"
        for name, text in zip(names, texts, strict=True)
    ]


def _run_names(frame: pd.DataFrame, notices: list[str]) -> list[str]:
    width = len(str(len(frame)))
    own = [f"row {number:0{width}d}" for number in range(len(frame))]
    if "run" not in frame.columns:
        notices.append("the table has no column run; every row is taken as a run of its own")
        return own
    unnamed = int(frame["run"].isna().sum())
    if unnamed:
        notices.append(f"rows without a run, each taken as a run of its own: {unnamed}")
    return [row if pd.isna(name) else str(name) for row, name in zip(own, frame["run"], strict=True)]


def _row_labels(frame: pd.DataFrame) -> list[str]:
    if "run" not in frame.columns:
        return [f"row {number + 1}" for number in range(len(frame))]
    epochs = frame["epoch"] if "epoch" in frame.columns else [None] * len(frame)
    return [
        f"{run} epoch {epoch}" if epoch is not None else str(run)
        for run, epoch in zip(frame["run"], epochs, strict=True)
    ]


def _usable(rows: pd.DataFrame, settings: Settings, metric: Metric, notices: list[str]) -> pd.DataFrame:
    reasons = [(f"x{index}", column) for index, column in enumerate(settings.scales)]
    for column, name in [*reasons, ("y", metric.column)]:
        values = rows[column].to_numpy(dtype=np.float64)
        bad = ~(np.isfinite(values) & (values > 0))
        if bad.any():
            labels = list(rows["label"][bad])
            more = f" and {len(labels) - _SHOWN} more" if len(labels) > _SHOWN else ""
            shown = ", ".join(labels[:_SHOWN]) + more
            notices.append(f"left out, {name} is missing or not a positive finite number: {shown}")
        rows = rows[~bad]
    if rows.empty:
        raise UserError(
            f"No row has both {' and '.join(settings.scales)} and {metric.column} ({'; '.join(notices)})."
        )
    return rows


def _one_batch(rows: pd.DataFrame, settings: Settings, metric: Metric) -> pd.DataFrame:
    """Refuse loss fits over several batch sizes, or make each a group of its own."""
    columns = [column for column in metric.batch_columns if column in rows.columns]
    if not columns:
        return rows
    sizes = rows[columns].drop_duplicates()
    if len(sizes) == 1:
        return rows
    if settings.per_batch:
        names = ["batch " + "/".join(map(_size, values)) for values in rows[columns].to_numpy()]
        groups = [f"{group}, {name}" for group, name in zip(rows["group"], names, strict=True)]
        return rows.assign(group=groups)
    listed = "; ".join(
        ", ".join(f"{column} {_size(value)}" for column, value in zip(columns, values, strict=True))
        for values in sorted(sizes.to_numpy().tolist())
    )
    raise UserError(
        f"{metric.column} depends on the batch size and the runs have several ({listed}); "
        "choose one with --batch, or fit each with --per-batch."
    )


def _size(batch: float) -> str:
    return UNKNOWN if np.isnan(batch) else f"{batch:g}"
