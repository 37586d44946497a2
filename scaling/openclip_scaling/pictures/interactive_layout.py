"""What the interactive figures share: layout, axes, keys of the legend, and what a point is called.

Figures are plain data for plotly.js. Colours and markers are those of the pictures in files.
"""

from __future__ import annotations

import html
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from openclip_scaling.forms.law import Array
from openclip_scaling.pictures.curves_plot import SIZE_LINES
from openclip_scaling.pictures.plot import MARKERS
from openclip_scaling.reporting.markdown import cell

Figure = dict[str, Any]
Trace = dict[str, Any]

SYMBOLS = dict(
    zip(
        MARKERS,
        ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "x", "hexagon"),
        strict=True,
    )
)
DASHES = dict(zip(SIZE_LINES, ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot"), strict=True))
GREY = "#777777"  # seen on white and on black
_HEIGHT = 430  # pixels, without the legend
_LEGEND_LINE = 21
_DIGITS = 6


def figure(traces: list[Trace], axes: dict[str, Any], legend_lines: int, extra: int = 0) -> Figure:
    """Traces with axes and the layout that all share; the legend stands below, where a phone has room for it."""
    height = _HEIGHT + extra
    layout = {
        "height": height + _LEGEND_LINE * legend_lines,
        "margin": {"l": 62, "r": 12, "t": 30, "b": 50},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"size": 12, "color": "#222222"},
        "hovermode": "closest",
        "hoverlabel": {"align": "left"},
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": GREY, "activecolor": "#222222"},
        "legend": {
            "orientation": "h", "x": 0, "xanchor": "left", "y": -70 / (height - 80), "yanchor": "top",
            "groupclick": "togglegroup",
        },
        **axes,
    }  # fmt: skip
    return {"data": traces, "layout": layout}


def log_axis(title: str, **more: Any) -> dict[str, Any]:
    """A logarithmic axis with its label."""
    upright = {"tickangle": 0, "nticks": 6}  # labels such as 1.5x10^12 are long
    return {**linear_axis(title), "type": "log", "exponentformat": "power", **upright, **more}


def linear_axis(title: str, **more: Any) -> dict[str, Any]:
    """An axis with its label and a light grid."""
    return {"title": {"text": html.escape(title, quote=False)}, "gridcolor": "#e4e4e4", "linecolor": GREY,
            "ticks": "outside", "zeroline": False, "automargin": True, **more}  # fmt: skip


def short(values: Array | Sequence[float]) -> list[float]:
    """Numbers with six digits: what a screen shows, in a smaller file."""
    return [float(f"{value:.{_DIGITS}g}") for value in np.asarray(values, dtype=np.float64)]


def key_trace(name: str, color: str, dash: str, marker: str = "") -> Trace:
    """A line, with a marker or without, that is in the legend only."""
    look = {"marker": {"symbol": SYMBOLS[marker], "size": 8, "color": color}} if marker else {}
    return {"type": "scatter", "mode": "lines+markers" if marker else "lines", "x": [None], "y": [None],
            "name": html.escape(name, quote=False), "hoverinfo": "skip",
            "line": {"color": color, "dash": dash, "width": 2}, **look}  # fmt: skip


def broken_lines(parts: Iterable[tuple[Array, Array]]) -> dict[str, list[float | None]]:
    """Several lines as one trace, with gaps between them."""
    x: list[float | None] = []
    y: list[float | None] = []
    for xs, ys in parts:
        x += [*short(xs), None]
        y += [*short(ys), None]
    return {"x": x, "y": y}


def describe(row: Mapping[Hashable, Any]) -> str:
    """Which checkpoint a point is: run, epoch, size and samples, as far as the table knows them."""
    words = [html.escape(str(row["run"]), quote=False)]
    shown = {"epoch": "epoch {}", "parameters": "{} parameters", "gmac_per_pair": "{} GMAC per pair",
             "samples_seen": "{} pairs seen"}  # fmt: skip
    for column, text in shown.items():
        value = row.get(column)
        if value is not None and not pd.isna(value):
            words.append(text.format(cell(value)))
    return "<br>".join(words)
