"""A short markdown report on a set of runs: exponents with intervals, verdicts, pictures, notices, runs."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from openclip_scaling.analysis import Analysis, Progress, Settings, analyse
from openclip_scaling.compare import Comparison, compare_groups
from openclip_scaling.curves_plot import curves_figure, metric_figure
from openclip_scaling.errors import UserError
from openclip_scaling.laws import BOTH
from openclip_scaling.loss import Loss
from openclip_scaling.markdown import READING, cell, comparisons_table, fits_table, summary
from openclip_scaling.metrics import axis_label, metric_columns, metric_named, numbers
from openclip_scaling.plot import save_figure, scaling_figure
from openclip_scaling.runs import Collection, grouped, write_atomically
from openclip_scaling.uncertainty import LEVEL, MINIMUM_RUNS

_DEFAULT_METRICS = re.compile(r"(^val_loss|^train_loss|top-?1)$")


def json_ready(value: Any) -> Any:
    """The same value with NaN and infinities as None, and numpy scalars as Python's."""
    if isinstance(value, dict):
        return {str(key): json_ready(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_ready(item) for item in value]
    if isinstance(value, np.generic):
        return json_ready(value.item())
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a table, JSON-ready."""
    return [
        {str(key): None if pd.isna(value) else json_ready(value) for key, value in row.items()}
        for row in frame.to_dict("records")
    ]


def comparison_dict(item: Comparison) -> dict[str, Any]:
    """A comparison as JSON-ready numbers."""
    return {
        "first": item.first,
        "second": item.second,
        "law": item.law,
        "exponent_difference": item.difference,
        "interval95": item.interval,
        "predicted_ratio": item.ratio,
        "ratio_interval95": item.ratio_interval,
        "exponent": item.exponent,
        "scale": item.scale[0] if len(item.scale) == 1 else item.scale,
        "runs": item.runs,
        "reliable": item.reliable,
        "distinguishable": item.distinguishable,
        "verdict": item.verdict,
    }


def predictions(analysis: Analysis, scales: Sequence[Sequence[float]]) -> list[dict[str, Any]]:
    """The metric that every fit predicts at every scale, JSON-ready; decades_beyond is 0 among the points.

    A scale has a number for every column of x; beyond is that of the column which leads furthest.
    """
    columns = np.asarray(scales, dtype=np.float64)
    at = columns[:, 0] if columns.shape[1] == 1 else columns
    rows = []
    for item in analysis.fits:
        values, band = item.fit.predict(at), item.boot.band(at)
        x = item.fit.points.x.reshape(len(item.fit.points), -1)
        logs, reached = np.log10(columns), np.log10([x.min(axis=0), x.max(axis=0)])
        beyond = np.maximum(reached[0] - logs, logs - reached[1]).max(axis=1)
        for index, scale in enumerate(at):
            interval = None if band is None else (float(band[0][index]), float(band[1][index]))
            rows.append(
                {"group": item.group, "law": item.fit.law.name, "scale": scale.tolist(),
                 "predicted": float(values[index]), "interval95": interval,
                 "decades_beyond": max(0.0, float(beyond[index])), "reliable": item.boot.reliable}
            )  # fmt: skip
    return rows


def default_metrics(collection: Collection) -> list[str]:
    """Losses and top-1 accuracies that the table has."""
    return [name for name in metric_columns(collection.checkpoints) if _DEFAULT_METRICS.search(name)]


def write_report(
    folder: Path,
    collection: Collection,
    metrics: Sequence[str] | None = None,
    settings: Settings | None = None,
    progress: Progress | None = None,
) -> Path:
    """Write report.md with its pictures and fits.json into `folder`; returns the path of report.md.

    Every metric is fitted under every law, as verdicts can depend on the form. A metric that cannot be
    fitted is named with the reason. Raises UserError when there is no metric at all.
    """
    settings = settings or Settings()
    names = list(metrics) if metrics else default_metrics(collection)
    if not names:
        raise UserError("The runs have neither a loss nor a top-1 accuracy; name a column with --metric.")
    for name in names:
        numbers(
            collection.checkpoints, metric_named(name).column
        )  # a column that is not there is a wrong name
    found: list[Analysis] = []
    sections, stored = [], []
    for name in names:
        if progress:
            progress(name)
        wanted = replace(settings, metric=name, laws=BOTH)
        try:
            analysis = analyse(collection.checkpoints, wanted)
        except UserError as error:
            sections.append(f"## {metric_named(name).label}\n\nNot fitted: {error}")
            stored.append({"metric": name, "error": str(error)})
            continue
        text, result = _metric_section(folder, analysis)
        found.append(analysis)
        sections.append(text)
        stored.append(result)
    parts = [
        _head(collection, settings, found),
        summary(found, names),
        *sections,
        _curves_section(folder, collection),
    ]
    parts += [_notices_section(collection), _runs_section(collection), _reading(settings)]
    write_atomically(folder / "fits.json", json.dumps(json_ready(stored), indent=1, allow_nan=False) + "\n")
    path = folder / "report.md"
    write_atomically(path, "\n\n".join(part for part in parts if part) + "\n")
    return path


def _head(collection: Collection, settings: Settings, analyses: Sequence[Analysis]) -> str:
    frame = collection.checkpoints
    runs = frame["run"].nunique() if "run" in frame.columns else len(frame)
    lines = [
        "# Scaling report",
        f"{len(frame)} checkpoints of {runs} runs; scale: {axis_label(settings.x)}. `a` is the exponent of a law: "
        "the metric goes as scale to the power `a`, so the more negative, the faster it falls. In brackets: "
        f"{LEVEL:.0%} interval.",
    ]
    counts: dict[str, int] = {}
    for item in (item for analysis in analyses for item in analysis.fits):
        counts[item.group] = max(item.boot.runs, counts.get(item.group, 0))
    few = {name: count for name, count in sorted(counts.items()) if count < MINIMUM_RUNS}
    if few:
        listed = ", ".join(f"{name}: {count}" for name, count in few.items())
        lines.append(
            f"**Intervals are not reliable with fewer than {MINIMUM_RUNS} runs per {settings.by}** "
            f"({listed}). Read the verdicts as descriptions of these runs."
        )
    return "\n\n".join(lines)


def _reading(settings: Settings) -> str:
    return (
        "## How the numbers were made\n\n"
        f"Fits by {Loss(settings.delta, settings.residuals).name}, points: {settings.points}. Intervals are t "
        "intervals over whole runs: the jackknife's standard error, and degrees of freedom runs less parameters. "
        f"Where points are selected by their values they take in the middle of {settings.draws} resamples of the runs, "
        f"and where a floor E0 is held at a bound the profile of the fit over it. {READING} Training FLOP = "
        "3 x 2 x forward MAC x samples seen."
    )


def _metric_section(folder: Path, analysis: Analysis) -> tuple[str, dict[str, Any]]:
    settings = analysis.settings
    comparisons = [item for law in settings.laws for item in compare_groups(analysis.boots(law))]
    lines = [f"## {analysis.metric.label}", fits_table(analysis)]
    lines += [comparisons_table(comparisons, analysis), _listed("To keep in mind", analysis.remarks)]
    for law in settings.laws:
        if analysis.by_law(law):
            path = folder / f"{slug(settings.metric)}-{law}.png"
            save_figure(scaling_figure(analysis, law), path)
            lines.append(f"![{analysis.metric.label} against {analysis.x_label}, {law} law]({path.name})")
    stored = {
        "metric": settings.metric,
        "x": settings.x,
        "fits": [item.as_dict() for item in analysis.fits],
        "comparisons": [comparison_dict(item) for item in comparisons],
        "notices": analysis.notices,
    }
    return "\n\n".join(line for line in lines if line), stored


def slug(name: str) -> str:
    """A metric's name as a file name."""
    return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-").lower() or "metric"


def _listed(title: str, texts: Sequence[str]) -> str:
    return "\n".join([f"{title}:", "", *(f"- {text}" for text in texts)]) if texts else ""


def _curves_section(folder: Path, collection: Collection) -> str:
    frame = collection.checkpoints
    lines = []
    if not collection.curves.empty and not collection.runs.empty:
        save_figure(curves_figure(collection.curves, collection.runs), folder / "training-loss.png")
        lines.append("![Training loss of every run](training-loss.png)")
    drawable = {"run", "attention", "samples_seen"} <= set(frame.columns)
    for name in default_metrics(collection) if drawable else []:
        if name != "train_loss":
            path = folder / f"{slug(name)}-curves.png"
            save_figure(metric_figure(frame, name), path)
            lines.append(f"![{name} of every checkpoint]({path.name})")
    return "\n\n".join(["## Learning curves", *lines]) if lines else ""


def _notices_section(collection: Collection) -> str:
    if not collection.notices:
        return ""
    return "\n".join(
        [
            "## What was repaired, assumed or left out",
            "",
            *(f"- {text}" for text in grouped(collection.notices)),
        ]
    )


_RUN_TABLE = {
    "run": "run", "model": "model", "attention": "attention", "parameters": "parameters",
    "gmac_per_pair": "GMAC per pair", "batch": "batch", "samples_seen": "samples seen",
    "unique_samples_bound": "different samples, at most", "train_flop": "training FLOP", "hours": "hours",
    "train_loss": "training loss", "val_loss": "validation loss", "diverged": "diverged",
}  # fmt: skip


def _runs_section(collection: Collection) -> str:
    frame = collection.runs
    columns = [column for column in _RUN_TABLE if column in frame.columns]
    if not columns:
        return ""
    head = "| " + " | ".join(_RUN_TABLE[column] for column in columns) + " |"
    rows = ["| " + " | ".join(cell(row[column]) for column in columns) + " |" for row in records(frame)]
    return "\n".join(["## Runs", "", head, "|" + "---|" * len(columns), *rows])
