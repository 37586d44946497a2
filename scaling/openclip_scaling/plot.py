"""Figures for a paper: metric against scale with fit, band and residuals, and learning curves.

Figures are built as objects, without pyplot and its global state. Colours are those of Okabe and Ito (2008),
which stay apart for colour-blind readers; markers repeat the distinction.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatterSciNotation, LogLocator, NullFormatter, ScalarFormatter

from openclip_scaling.analysis import UNKNOWN, Analysis, GroupFit
from openclip_scaling.errors import UserError
from openclip_scaling.flops import ATTENTION_MACS
from openclip_scaling.metrics import axis_label, numbers
from openclip_scaling.points import Points
from openclip_scaling.runs import write_atomically

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#888888")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "h")
FORMATS = ("png", "svg", "pdf")
_WIDTH = 6.4  # inches
_DPI = 200


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure atomically; the format is the suffix of `path`. Raises UserError on a foreign one."""
    suffix = path.suffix.lstrip(".").lower()
    if suffix not in FORMATS:
        raise UserError(f"{path} must end in one of {', '.join('.' + name for name in FORMATS)}.")
    buffer = io.BytesIO()
    # A date in the file would make equal figures differ.
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(suffix)
    figure.savefig(buffer, format=suffix, dpi=_DPI, metadata=metadata)
    write_atomically(path, buffer.getvalue())


def styles(groups: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Color and marker by group: attention kinds keep theirs in every figure, others take what is left."""
    names = list(dict.fromkeys(groups))
    slots = {name: list(ATTENTION_MACS).index(name) % len(COLORS) for name in names if name in ATTENTION_MACS}
    free = [slot for slot in range(len(COLORS)) if slot not in slots.values()] or list(range(len(COLORS)))
    others = [name for name in names if name not in slots]
    slots |= {name: free[index % len(free)] for index, name in enumerate(others)}
    return {name: (COLORS[slots[name]], MARKERS[slots[name]]) for name in names}


def scaling_figure(analysis: Analysis, law: str) -> Figure:
    """Metric against scale in log-log, one colour per group: points, fit, 95 % band; residuals below.

    Raises UserError when the analysis has no fit of that law.
    """
    fits = analysis.by_law(law)
    if not fits:
        raise UserError(f"There is no fit of the law {law!r} to draw.")
    figure = Figure(figsize=(_WIDTH, 5.4), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3.2, 1))
    style = styles(fits)
    for group, item in fits.items():
        color, marker = style[group]
        _draw_points(top, analysis.points[group], item.fit.points, color, marker)
        _draw_fit(top, item, color, legend_label(item), marker)
        residuals = 100 * np.expm1(item.fit.residuals)
        bottom.plot(item.fit.points.x, residuals, marker, color=color, markersize=4, alpha=0.85, mew=0)
    bottom.axhline(0, color="0.4", linewidth=0.8)
    _log_axes(top)
    top.set_ylabel(analysis.metric.label)
    top.legend(frameon=False, fontsize=7.5, title=_formula(next(iter(fits.values()))), title_fontsize=8)
    bottom.set_ylabel("residual (%)")
    bottom.set_xlabel(analysis.x_label)
    for axes in (top, bottom):
        _tidy(axes)
    return figure


def _formula(item: GroupFit) -> str:
    """The law in mathematical type."""
    return "$" + item.fit.law.formula.replace("E0", "E_0").replace("b C", r"b\,C") + "$"


def legend_label(item: GroupFit) -> str:
    """Group, exponent and its interval; says where the interval is not to be relied on."""
    exponent = item.fit.parameters["a"]
    interval = item.boot.intervals.get("a")
    if interval is None:
        return f"{item.group}: a = {exponent:.3f} (no interval)"
    text = f"{item.group}: a = {exponent:.3f} [{interval.low:.3f}, {interval.high:.3f}]"
    if not interval.identified:
        return f"{item.group}: a = {exponent:.3f}, not identified"
    return text if item.boot.reliable else f"{text}, {item.boot.runs} runs: not reliable"


def _draw_points(axes: Axes, everything: Points, used: Points, color: str, marker: str) -> None:
    if len(everything) > len(used):
        axes.plot(everything.x, everything.y, marker, color=color, markersize=3, alpha=0.25, mew=0)
    axes.plot(used.x, used.y, marker, color=color, markersize=4.5, alpha=0.85, mew=0)


def _draw_fit(axes: Axes, item: GroupFit, color: str, label: str, marker: str) -> None:
    x = item.fit.points.x
    grid = np.geomspace(x.min() / 1.15, x.max() * 1.15, 100)
    axes.plot(grid, item.fit.predict(grid), color=color, linewidth=1.4)
    # The key shows line and marker together, whatever was drawn apart.
    axes.plot([], [], marker, linestyle="-", color=color, markersize=4.5, linewidth=1.4, label=label)
    band = item.boot.band(grid)
    if band is not None:
        limits = axes.get_ylim()
        axes.fill_between(grid, *band, color=color, alpha=0.15, linewidth=0)
        # A band of few runs can be wider than all data; the points set the window.
        axes.set_ylim(limits)


def _log_axes(axes: Axes) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    values = np.concatenate([np.asarray(line.get_ydata(), dtype=np.float64) for line in axes.get_lines()])
    values = values[np.isfinite(values) & (values > 0)]
    low, high = float(values.min()), float(values.max())
    pad = max((high / low) ** 0.08, 1.02)
    axes.set_ylim(low / pad, high * pad)
    if high / low < 20:  # little more than a decade: ticks at plain numbers
        axes.yaxis.set_major_locator(LogLocator(base=10, subs=_subs(low, high, 4)))
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.yaxis.set_minor_formatter(NullFormatter())
    _log_ticks(axes)


def _log_ticks(axes: Axes) -> None:
    """Labels of a logarithmic x axis that do not run into each other."""
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    if high / low < 100:
        axes.xaxis.set_major_locator(LogLocator(base=10, subs=_subs(low, high, 2)))
        axes.xaxis.set_major_formatter(LogFormatterSciNotation(labelOnlyBase=False, minor_thresholds=(9, 9)))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _subs(low: float, high: float, wanted: int) -> Sequence[float]:
    """Where to put ticks within a decade so that at least `wanted` fall into [low, high]."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    fine = [[float(s) for s in np.round(np.arange(1, 10, step), 6)] for step in (1.0, 0.5, 0.2, 0.1, 0.05)]
    for subs in ([1.0], [1.0, 3.0], [1.0, 2.0, 5.0], *fine):
        if sum(low <= s * 10.0**d <= high for d in decades for s in subs) >= wanted:
            return subs
    return fine[-1]


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, which="major", color="0.92", linewidth=0.7)
    axes.set_axisbelow(True)


def curves_figure(curves: pd.DataFrame, runs: pd.DataFrame, x: str = "samples_seen") -> Figure:
    """Smoothed training loss of every run over `x` (samples_seen, step or hours); colour by attention.

    The thin line is every logged step, the thick one a running mean over a twentieth of them. Raises
    UserError where there is no curve.
    """
    if curves.empty:
        raise UserError("No training loss was logged, so there is no curve to draw.")
    kinds = dict(zip(runs["run"].astype(str), _kinds(runs), strict=True))
    style = styles(sorted(set(kinds.values())))
    figure = Figure(figsize=(_WIDTH, 3.8), layout="constrained")
    axes = figure.subplots()
    for run, part in curves.groupby("run", sort=True):
        color = style[kinds[str(run)]][0] if str(run) in kinds else "0.5"
        along, loss = numbers(part, x), numbers(part, "train_loss")
        axes.plot(along, loss, color=color, linewidth=0.4, alpha=0.25)
        axes.plot(along, _running_mean(loss), color=color, linewidth=1.3)
    for kind, (color, _) in style.items():
        axes.plot([], [], color=color, linewidth=1.4, label=kind)
    _label(axes, x, "train_loss")
    return figure


def _kinds(frame: pd.DataFrame) -> list[str]:
    return [UNKNOWN if pd.isna(value) else str(value) for value in frame["attention"]]


def _label(axes: Axes, x: str, y: str) -> None:
    _log_ticks(axes)
    axes.set_xlabel(axis_label(x))
    axes.set_ylabel(axis_label(y))
    axes.legend(frameon=False, fontsize=8)
    _tidy(axes)


def _running_mean(values: np.ndarray) -> np.ndarray:
    window = max(1, len(values) // 20)
    return pd.Series(values).rolling(window, min_periods=1).mean().to_numpy()


def metric_figure(frame: pd.DataFrame, metric: str, x: str = "samples_seen") -> Figure:
    """A metric of every run's checkpoints over `x`, one line per run, colour and marker by attention."""
    figure = Figure(figsize=(_WIDTH, 3.8), layout="constrained")
    axes = figure.subplots()
    kinds = _kinds(frame)
    style = styles(sorted(set(kinds)))
    for run, part in frame.assign(kind=kinds).groupby("run", sort=True):
        del run
        color, marker = style[str(part["kind"].iloc[0])]
        axes.plot(
            numbers(part, x), numbers(part, metric), color=color, marker=marker, markersize=3.5, linewidth=1
        )
    for kind, (color, marker) in style.items():
        axes.plot([], [], color=color, marker=marker, markersize=3.5, linewidth=1, label=kind)
    _label(axes, x, metric)
    return figure
