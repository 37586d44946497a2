"""Figures for a paper: metric against scale with fit, band and residuals, and what every figure shares.

Figures are built as objects, without pyplot and its global state. Colours are those of Okabe and Ito (2008),
which stay apart for colour-blind readers; markers repeat the distinction.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import (
    FixedLocator,
    LogFormatterSciNotation,
    LogLocator,
    NullFormatter,
    ScalarFormatter,
)

from openclip_scaling.errors import UserError
from openclip_scaling.fitting.analysis import Analysis, GroupFit
from openclip_scaling.fitting.points import Points
from openclip_scaling.flops import ATTENTION_MACS
from openclip_scaling.reading.runs import write_atomically

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#888888")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "h")
LINES = ("-", "--", ":", "-.")
FORMATS = ("png", "svg", "pdf")
WIDTH = 6.4  # inches
_DPI = 200


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure atomically; the format is the suffix of `path`. Raises UserError on a foreign one.

    A letter that the font lacks, such as one of a script in the name of a run, is drawn as a box.
    """
    suffix = path.suffix.lstrip(".").lower()
    if suffix not in FORMATS:
        raise UserError(f"{path} must end in one of {', '.join('.' + name for name in FORMATS)}.")
    buffer = io.BytesIO()
    # A date in the file would make equal figures differ.
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(suffix)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        figure.savefig(buffer, format=suffix, dpi=_DPI, metadata=metadata)
    write_atomically(path, buffer.getvalue())


def styles(groups: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Color and marker by group: attention kinds keep theirs in every figure, others take what is left.

    A group that is named for a kind and more, such as "linear, batch 256", has that of the kind where it is free.
    """
    names = list(dict.fromkeys(groups))
    kinds = {name: slot % len(COLORS) for slot, name in enumerate(ATTENTION_MACS)}
    slots = {name: kinds[name] for name in names if name in kinds}
    for name in names:
        slot = kinds.get(re.split("[ ,]", name, maxsplit=1)[0])
        if slot is not None and slot not in slots.values():
            slots[name] = slot
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
    # The legend stands above, where it hides nothing: a line for each group, bands, and points that were not fitted.
    figure = Figure(figsize=(WIDTH, 5.2 + 0.16 * (len(fits) + 2)), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3.2, 1))
    style = styles(analysis.points)
    for group, item in fits.items():
        color, marker = style[group]
        _draw_points(top, analysis.points[group], item.fit.points, color, marker)
        _draw_fit(top, item, color, legend_label(item), marker)
        residuals = 100 * np.expm1(item.fit.residuals)
        bottom.plot(item.fit.points.x, residuals, marker, color=color, markersize=4, alpha=0.85, mew=0)
    bottom.axhline(0, color="0.4", linewidth=0.8)
    log_axes(top, _values(analysis, fits))
    _band_keys(top, fits.values())
    if any(len(analysis.points[group]) > len(item.fit.points) for group, item in fits.items()):
        label = f"not fitted (points: {analysis.settings.points})"
        top.plot([], [], "o", color="0.4", markersize=3, alpha=0.35, mew=0, label=label)
    top.set_ylabel(analysis.metric.label)
    _legend_above(top, title=f"${next(iter(fits.values())).fit.law.latex}$")
    bottom.set_ylabel("residual (%)")
    bottom.set_xlabel(analysis.x_label)
    for axes in (top, bottom):
        tidy(axes)
    return figure


def _legend_above(axes: Axes, title: str) -> None:
    axes.legend(
        frameon=False,
        fontsize=8,
        title=title,
        title_fontsize=9,
        alignment="left",
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        borderaxespad=0.2,
    )


def legend_label(item: GroupFit) -> str:
    """Group, exponents and their intervals; says where the intervals are not to be relied on."""
    return f"{item.group}: {exponents_label(item)}"


def exponents_label(item: GroupFit) -> str:
    """The same without the group."""
    exponents = [_exponent(item, name) for name in item.fit.law.exponents]
    text = ", ".join(exponents)
    shown = item.boot.intervals and not any("not identified" in exponent for exponent in exponents)
    return f"{text}, {item.boot.runs} runs: not reliable" if shown and not item.boot.reliable else text


def _exponent(item: GroupFit, name: str) -> str:
    text = f"{name} = {item.fit.parameters[name]:.3f}"
    interval = item.boot.intervals.get(name)
    if interval is None:
        return f"{text} (no interval)"
    if not interval.identified:
        return f"{text}, not identified"
    return f"{text} [{interval.low:.3f}, {interval.high:.3f}]"


def _draw_points(axes: Axes, everything: Points, used: Points, color: str, marker: str) -> None:
    if len(everything) > len(used):
        axes.plot(everything.x, everything.y, marker, color=color, markersize=3, alpha=0.25, mew=0)
    for rows in used.rows_of().values():  # a thin line joins the checkpoints of a run
        axes.plot(used.x[rows], used.y[rows], color=color, linewidth=0.6, alpha=0.35)
    axes.plot(used.x, used.y, marker, color=color, markersize=4.5, alpha=0.85, mew=0)


def _draw_fit(axes: Axes, item: GroupFit, color: str, label: str, marker: str) -> None:
    x = item.fit.points.x
    grid = np.geomspace(x.min() / 1.15, x.max() * 1.15, 100)
    axes.plot(grid, item.fit.predict(grid), color=color, linewidth=1.4)
    # The key shows line and marker together, whatever was drawn apart.
    axes.plot([], [], marker, linestyle="-", color=color, markersize=4.5, linewidth=1.4, label=label)
    band = item.boot.band(grid)
    if band is None:
        return
    limits = axes.get_ylim()
    if item.boot.reliable:
        axes.fill_between(grid, *band, color=color, alpha=0.15, linewidth=0)
    else:
        for edge in band:  # filled, the bands of few runs would cover everything
            axes.plot(grid, edge, ":", color=color, linewidth=0.9, alpha=0.8, scalex=False, scaley=False)
    # A band of few runs can be wider than all data; the points set the window.
    axes.set_ylim(limits)


def _band_keys(axes: Axes, fits: Iterable[GroupFit]) -> None:
    kinds = {item.boot.reliable for item in fits if item.boot.intervals}
    if True in kinds:
        axes.fill_between([], [], color="0.5", alpha=0.3, linewidth=0, label="95 % band")
    if False in kinds:
        axes.plot([], [], ":", color="0.3", linewidth=0.9, label="95 % band, not reliable")


def _values(analysis: Analysis, fits: Mapping[str, GroupFit]) -> np.ndarray:
    """Everything that must be seen: points, and fits over their range."""
    points = [analysis.points[group].y for group in fits]
    return np.concatenate([*points, *(item.fit.predict(item.fit.points.x) for item in fits.values())])


def log_axes(axes: Axes, values: np.ndarray) -> None:
    """Logarithmic axes around the values, with plain numbers where they span little more than a decade."""
    axes.set_xscale("log")
    axes.set_yscale("log")
    low, high = float(values.min()), float(values.max())
    pad = max((high / low) ** 0.08, 1.02)
    axes.set_ylim(low / pad, high * pad)
    if high / low < 20:  # little more than a decade: ticks at plain numbers
        axes.yaxis.set_major_locator(FixedLocator(plain_ticks(*axes.get_ylim())))
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.yaxis.set_minor_formatter(NullFormatter())
    log_ticks(axes)


def plain_ticks(low: float, high: float) -> list[float]:
    """Five or more round numbers in [low, high], the roundest first chosen, none too near to another for its label."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (0.5, 0.2, 0.1, 0.05, 0.02, 0.01)
    rounds = [[1.0], [2.0, 5.0], [3.0], *(np.arange(1, 10, step).round(3).tolist() for step in steps)]
    apart = 0.07 * math.log(high / low)
    ticks: list[float] = []
    for values in rounds:
        for tick in (value * 10.0**decade for decade in decades for value in values):
            near = any(abs(math.log(tick / other)) < apart for other in ticks)
            if low <= tick <= high and not near:
                ticks.append(tick)
        if len(ticks) >= 5:
            break
    return sorted(ticks)


def log_ticks(axes: Axes) -> None:
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


def tidy(axes: Axes) -> None:
    """A light grid and no frame above and at the right."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, which="major", color="0.92", linewidth=0.7)
    axes.set_axisbelow(True)
