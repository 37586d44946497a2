"""Learning curves: training loss and metrics of every run, colour by attention and line style by model size."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import cycle

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from openclip_scaling.errors import UserError
from openclip_scaling.fitting.metrics import axis_label, numbers, value_label
from openclip_scaling.fitting.table import UNKNOWN
from openclip_scaling.pictures.plot import LINES, WIDTH, log_ticks, styles, tidy

X = "samples_seen"
Line = str | tuple[int, tuple[float, ...]]
# Of model sizes; the last two are long dashes, without and with dots.
SIZE_LINES: tuple[Line, ...] = (*LINES, (0, (9.0, 2.0)), (0, (9.0, 2.0, 1.5, 2.0)))


def curves_figure(curves: pd.DataFrame, runs: pd.DataFrame) -> Figure:
    """Smoothed training loss of every run over samples seen.

    Colour by attention, line style by model size. The thin line is every logged step, the thick one a running
    mean over a twentieth of them. Raises UserError where there is no curve.
    """
    if curves.empty:
        raise UserError("No training loss was logged, so there is no curve to draw.")
    looks = looks_of(runs)
    figure = Figure(figsize=(WIDTH, 3.8), layout="constrained")
    axes = figure.subplots()
    for run, part in curves.groupby("run", sort=True):
        look = looks.get(str(run), Look(UNKNOWN, "0.5", "o"))
        along, loss = numbers(part, X), numbers(part, "train_loss")
        axes.plot(along, loss, color=look.color, linewidth=0.4, alpha=0.25)
        axes.plot(along, running_mean(loss), linestyle=look.line, color=look.color, linewidth=1.3)
    _finish(axes, "train_loss", looks.values(), markers=False)
    return figure


def metric_figure(frame: pd.DataFrame, metric: str) -> Figure:
    """A metric of every run's checkpoints over samples seen: colour and marker by attention, line style by size."""
    figure = Figure(figsize=(WIDTH, 3.8), layout="constrained")
    axes = figure.subplots()
    frame = frame[np.isfinite(numbers(frame, metric))]
    looks = looks_of(frame)
    for run, part in frame.groupby("run", sort=True):
        look = looks[str(run)]
        axes.plot(
            numbers(part, X),
            numbers(part, metric),
            linestyle=look.line,
            color=look.color,
            marker=look.marker,
            markersize=3.5,
            linewidth=1,
        )
    _finish(axes, metric, looks.values(), markers=True)
    return figure


@dataclass(frozen=True)
class Look:
    """How a run is drawn; size is its number of parameters to two digits, NaN where it is not known."""

    kind: str
    color: str
    marker: str
    line: Line = "-"
    size: float = math.nan


def looks_of(frame: pd.DataFrame) -> dict[str, Look]:
    """A look per run: attention gives colour and marker, size (to two digits) the line style, largest solid."""
    runs = frame.drop_duplicates("run")
    kinds = [UNKNOWN if pd.isna(value) else str(value) for value in runs["attention"]]
    style = styles(sorted(set(kinds)))
    counts = numbers(runs, "parameters") if "parameters" in runs.columns else np.full(len(runs), np.nan)
    sizes = [float(f"{count:.2g}") for count in counts]
    lines = dict(zip(sorted({s for s in sizes if s == s}, reverse=True), cycle(SIZE_LINES)))
    return {
        str(run): Look(kind, *style[kind], lines.get(size, "-"), size)
        for run, kind, size in zip(runs["run"], kinds, sizes, strict=True)
    }


def size_keys(looks: Iterable[Look]) -> list[tuple[str, Line]]:
    """Name and line of every size, the largest first; none where there are not several."""
    sizes = {look.size: look.line for look in looks if math.isfinite(look.size)}
    if len(sizes) < 2:
        return []
    return [(_count(size), line) for size, line in sorted(sizes.items(), reverse=True)]


def _count(parameters: float) -> str:
    unit, name = (1e9, "B") if parameters >= 1e9 else (1e6, "M") if parameters >= 1e6 else (1e3, "k")
    return f"{parameters / unit:.3g} {name} parameters"


def _finish(axes: Axes, y: str, looks: Iterable[Look], *, markers: bool) -> None:
    """Axes, labels and a legend beside the data: attention kinds, then sizes where there are several."""
    looks = list(looks)
    for kind, color, marker in sorted({(look.kind, look.color, look.marker) for look in looks}):
        axes.plot(
            [], [], color=color, marker=marker if markers else "", markersize=3.5, linewidth=1.4, label=kind
        )
    for name, line in size_keys(looks):
        axes.plot([], [], linestyle=line, color="0.3", linewidth=1.2, label=name)
    log_ticks(axes)
    axes.set_xlabel(axis_label(X))
    axes.set_ylabel(value_label(y))
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0), handlelength=3)
    tidy(axes)


def running_mean(values: np.ndarray) -> np.ndarray:
    """Mean over a twentieth of the values, up to each."""
    window = max(1, len(values) // 20)
    return pd.Series(values).rolling(window, min_periods=1).mean().to_numpy()
