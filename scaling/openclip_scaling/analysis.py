"""From a table of checkpoints to fits: picks the rows, refuses what must not be mixed, fits every group.

Rows that cannot be used (diverged runs, NaN, no compute) are left out and named in the notices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from openclip_scaling.errors import UserError
from openclip_scaling.fit import Fit, Loss, fit_law
from openclip_scaling.laws import law_named
from openclip_scaling.metrics import Metric, axis_label, metric_named, numbers
from openclip_scaling.points import Points, selection_named
from openclip_scaling.uncertainty import Bootstrap, bootstrap, seed_for

UNKNOWN = "unknown"
_COMPUTE = ("train_flop", "hours")
_WORTH_SAYING = 0.1  # share of resamples left out that the reader should know of
Progress = Callable[[str], None]
DEFAULT_DELTA = (
    0.03  # residuals beyond 3 % of E count by their size only, so that an outlier cannot rule a fit
)


@dataclass(frozen=True)
class Settings:
    """What to fit. x, metric and by are columns; where are conditions such as "dataset=imagenet1k" or
    "arch!=x".

    laws: names of laws. points: all, ends, frontier or bins. delta: corner of the Huber loss, None for least
    squares. batch keeps one global batch size; per_batch makes every batch size a group of its own.
    """

    metric: str = "val_loss"
    x: str = "train_flop"
    by: str = "attention"
    laws: tuple[str, ...] = ("power",)
    points: str = "all"
    min_samples: float = 0.0
    delta: float | None = DEFAULT_DELTA
    draws: int = 500
    seed: int = 0
    batch: int | None = None
    per_batch: bool = False
    where: tuple[str, ...] = ()


@dataclass(frozen=True)
class GroupFit:
    """One law fitted to one group: selected points, fit, and its resampling over runs."""

    group: str
    fit: Fit
    boot: Bootstrap

    @property
    def notices(self) -> list[str]:
        """What the reader of this fit must know."""
        found = list(self.fit.notices)
        if self.boot.notice:
            found.append(self.boot.notice)
        open_names = [
            name for name, interval in self.boot.intervals.items() if not interval.identified and name != "b"
        ]
        if open_names:
            found.append(f"not identified: {', '.join(open_names)}")
        draws = self.boot.failed + len(self.boot.thetas)
        if self.boot.intervals and self.boot.failed > _WORTH_SAYING * draws:
            found.append(
                f"{self.boot.failed} of {draws} resamples had too few different scales and are left out"
            )
        return found

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready numbers."""
        fit, boot = self.fit, self.boot
        return {
            "group": self.group,
            "law": fit.law.name,
            "formula": fit.law.formula,
            "parameters": fit.parameters,
            "intervals95": {k: [v.low, v.high] for k, v in boot.intervals.items()},
            "identified": {k: v.identified for k, v in boot.intervals.items()},
            "reliable": boot.reliable,
            "standard_errors": fit.standard_errors,
            "degrees_of_freedom": fit.degrees_of_freedom,
            "points": len(fit.points),
            "runs": boot.runs,
            "decades": fit.points.decades,
            "loss": fit.loss.name,
            "objective": fit.objective,
            "rmse_log": fit.rmse,
            "aic": fit.aic,
            "starts": fit.starts,
            "starts_at_optimum": fit.starts_at_optimum,
            "condition": fit.condition,
            "notices": self.notices,
        }


@dataclass
class Analysis:
    """All fits of one metric; points holds every usable point by group, before selection."""

    settings: Settings
    metric: Metric
    fits: list[GroupFit]
    points: dict[str, Points]
    notices: list[str] = field(default_factory=list)

    @property
    def x_label(self) -> str:
        return axis_label(self.settings.x)

    @property
    def remarks(self) -> list[str]:
        """Every notice once, with the fits that it belongs to."""
        where: dict[str, list[str]] = {}
        for item in self.fits:
            for text in item.notices:
                where.setdefault(text, []).append(f"{item.group} ({item.fit.law.name})")
        everywhere = len(self.fits) if len(self.fits) > 1 else 2
        listed = (
            f"{'all fits' if len(names) == everywhere else ', '.join(names)}: {text}"
            for text, names in where.items()
        )
        return [*listed, *self.notices]

    def by_law(self, law: str) -> dict[str, GroupFit]:
        """The fits of one law, by group."""
        return {item.group: item for item in self.fits if item.fit.law.name == law}


def analyse(frame: pd.DataFrame, settings: Settings, progress: Progress | None = None) -> Analysis:
    """Fit every group. Raises UserError when nothing can be fitted, or batch sizes would be mixed."""
    notices: list[str] = []
    metric = metric_named(settings.metric).on(frame, notices)
    groups = grouped_points(frame, settings, metric, notices)
    select, loss = selection_named(settings.points), Loss(settings.delta)
    several = any(len(points.runs) < len(points) for points in groups.values())
    if settings.points == "all" and several and not _constant_rate(frame):
        notices.append(
            "checkpoints before the end of a run are taken before its learning rate has decayed, unless it is "
            "constant; --points ends uses the last of each run only"
        )
    if settings.points == "all" and settings.x in _COMPUTE and several and _several_sizes(frame):
        notices.append(
            "model sizes are fitted together, so at one compute a small model after many samples stands beside a "
            "large one after few; --points frontier fits only what is best at its compute"
        )
    fits: list[GroupFit] = []
    for group, points in groups.items():
        for name in settings.laws:
            if progress:
                progress(f"{group}: {name}")
            try:
                fit = fit_law(select(points), law_named(name), loss)
            except UserError as error:
                notices.append(f"{group}: no {name} fit: {error}")
                continue
            boot = bootstrap(points, fit, select, settings.draws, seed_for(group, settings.seed))
            fits.append(GroupFit(group, fit, boot))
    if not fits:
        raise UserError(f"Nothing could be fitted to {metric.column}: {' '.join(notices) or 'no points.'}")
    return Analysis(settings, metric, fits, groups, notices)


def grouped_points(
    frame: pd.DataFrame, settings: Settings, metric: Metric, notices: list[str]
) -> dict[str, Points]:
    """Usable points by group, sorted by name. Raises UserError as `analyse` does."""
    frame = _filtered(frame, settings)
    frame = _without_repeats(frame, notices)
    frame = _without_diverged(frame, notices)
    rows = pd.DataFrame(
        {
            "x": numbers(frame, settings.x),
            "y": metric.values(frame),
            "group": _group_names(frame, settings.by, notices),
            "run": _run_names(frame, notices),
            "label": _row_labels(frame),
        }
    )
    for column in ("batch", "val_batch"):
        if column in frame.columns:
            rows[column] = numbers(frame, column)
    rows = _usable(rows, settings, metric, notices)
    rows = _one_batch(rows, settings, metric)
    return {
        str(group): Points(part["x"].to_numpy(), part["y"].to_numpy(), tuple(part["run"]))
        for group, part in rows.groupby("group", sort=True)
    }


def _several_sizes(frame: pd.DataFrame) -> bool:
    """Whether the largest model costs more than attention kinds of one size differ by."""
    if "gmac_per_pair" not in frame.columns:
        return False
    cost = numbers(frame, "gmac_per_pair")
    cost = cost[np.isfinite(cost)]
    return bool(cost.size) and float(cost.max()) > 1.25 * float(cost.min())


def _constant_rate(frame: pd.DataFrame) -> bool:
    """Whether every run is known to keep its learning rate after warm-up."""
    return "lr_schedule" in frame.columns and bool((frame["lr_schedule"].astype(str) == "const").all())


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
    reasons: Sequence[tuple[str, str]] = (("x", settings.x), ("y", metric.column))
    for column, name in reasons:
        values = rows[column].to_numpy(dtype=np.float64)
        bad = ~(np.isfinite(values) & (values > 0))
        if bad.any():
            labels = list(rows["label"][bad])
            shown = ", ".join(labels[:5]) + (f" and {len(labels) - 5} more" if len(labels) > 5 else "")
            notices.append(f"left out, {name} is missing or not a positive finite number: {shown}")
        rows = rows[~bad]
    if rows.empty:
        raise UserError(
            f"No row has both {settings.x} and {metric.column}. {' '.join(f'{n}.' for n in notices)}"
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
