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
from openclip_scaling.metrics import axis_label, numbers, value_label
from openclip_scaling.plot import LINES, WIDTH, log_ticks, styles, tidy
from openclip_scaling.table import UNKNOWN


def curves_figure(curves: pd.DataFrame, runs: pd.DataFrame, x: str = "samples_seen") -> Figure:
    """Smoothed training loss of every run over `x` (samples_seen, step or hours).

    Colour by attention, line style by model size. The thin line is every logged step, the thick one a running
    mean over a twentieth of them. Raises UserError where there is no curve.
    """
    if curves.empty:
        raise UserError("No training loss was logged, so there is no curve to draw.")
    looks = _looks(runs)
    figure = Figure(figsize=(WIDTH, 3.8), layout="constrained")
    axes = figure.subplots()
    for run, part in curves.groupby("run", sort=True):
        look = looks.get(str(run), _Look(UNKNOWN, "0.5", "o", "-", ""))
        along, loss = numbers(part, x), numbers(part, "train_loss")
        axes.plot(along, loss, color=look.color, linewidth=0.4, alpha=0.25)
        axes.plot(along, _running_mean(loss), look.line, color=look.color, linewidth=1.3)
    _finish(axes, x, "train_loss", looks.values(), markers=False)
    return figure


def metric_figure(frame: pd.DataFrame, metric: str, x: str = "samples_seen") -> Figure:
    """A metric of every run's checkpoints over `x`, one line per run: colour and marker by attention, style by size."""
    figure = Figure(figsize=(WIDTH, 3.8), layout="constrained")
    axes = figure.subplots()
    frame = frame[np.isfinite(numbers(frame, metric))]
    looks = _looks(frame)
    for run, part in frame.groupby("run", sort=True):
        look = looks[str(run)]
        axes.plot(
            numbers(part, x),
            numbers(part, metric),
            look.line,
            color=look.color,
            marker=look.marker,
            markersize=3.5,
            linewidth=1,
        )
    _finish(axes, x, metric, looks.values(), markers=True)
    return figure


@dataclass(frozen=True)
class _Look:
    """How a run is drawn; size is its number of parameters in words, empty where it is not known."""

    kind: str
    color: str
    marker: str
    line: str
    size: str


def _looks(frame: pd.DataFrame) -> dict[str, _Look]:
    """A look per run: attention gives colour and marker, size (to two digits) the line style, largest solid."""
    runs = frame.drop_duplicates("run")
    kinds = [UNKNOWN if pd.isna(value) else str(value) for value in runs["attention"]]
    style = styles(sorted(set(kinds)))
    counts = numbers(runs, "parameters") if "parameters" in runs.columns else np.full(len(runs), np.nan)
    sizes = [float(f"{count:.2g}") for count in counts]
    lines = dict(zip(sorted({s for s in sizes if s == s}, reverse=True), cycle(LINES)))
    return {
        str(run): _Look(kind, *style[kind], lines.get(size, "-"), _count(size))
        for run, kind, size in zip(runs["run"], kinds, sizes, strict=True)
    }


def _count(parameters: float) -> str:
    if not math.isfinite(parameters):
        return ""
    unit, name = (1e9, "B") if parameters >= 1e9 else (1e6, "M") if parameters >= 1e6 else (1e3, "k")
    return f"{parameters / unit:.3g} {name} parameters"


def _finish(axes: Axes, x: str, y: str, looks: Iterable[_Look], *, markers: bool) -> None:
    """Axes, labels and a legend beside the data: attention kinds, then sizes where there are several."""
    looks = list(looks)
    for kind, color, marker in sorted({(look.kind, look.color, look.marker) for look in looks}):
        axes.plot(
            [], [], color=color, marker=marker if markers else "", markersize=3.5, linewidth=1.4, label=kind
        )
    sizes = {look.size: look.line for look in looks if look.size}
    if len(sizes) > 1:
        for line in LINES:
            for size in (size for size, own in sizes.items() if own == line):
                axes.plot([], [], line, color="0.3", linewidth=1.2, label=size)
    log_ticks(axes)
    axes.set_xlabel(axis_label(x))
    axes.set_ylabel(value_label(y))
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    tidy(axes)


def _running_mean(values: np.ndarray) -> np.ndarray:
    window = max(1, len(values) // 20)
    return pd.Series(values).rolling(window, min_periods=1).mean().to_numpy()
