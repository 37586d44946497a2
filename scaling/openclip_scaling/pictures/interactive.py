"""Metric against scale as an interactive figure, with points that say what they are."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from openclip_scaling.fitting.analysis import Analysis, GroupFit
from openclip_scaling.fitting.metrics import numbers
from openclip_scaling.fitting.points import Points
from openclip_scaling.fitting.selections import lower_hull, strict_frontier
from openclip_scaling.forms.law import Array
from openclip_scaling.pictures.interactive_layout import (
    GREY,
    SYMBOLS,
    Figure,
    Trace,
    broken_lines,
    describe,
    figure,
    key_trace,
    linear_axis,
    log_axis,
    short,
)
from openclip_scaling.pictures.plot import legend_label, styles

_Key = tuple[str, float, float]  # run, x and y of a point


def scaling(analysis: Analysis, law: str, frame: pd.DataFrame) -> Figure:
    """Points, fits, 95 % bands, residuals, frontier and hull of every group; frame is the table of checkpoints.

    The legend switches groups on and off, and the marks of frontier and hull, which are off at first where the
    frontier is not what was fitted.
    """
    fits = analysis.by_law(law)
    style = styles(analysis.points)
    known = _descriptions(analysis, frame)
    traces: list[Trace] = []
    for group, item in fits.items():
        color, marker = style[group]
        drawn = [*_band(item, color), _joined_runs(item.fit.points, color), _line(item, color)]
        drawn += _points(analysis, item, known, color, marker)
        own = {"legendgroup": group, "showlegend": False}
        traces += [{**own, **trace} for trace in drawn]
        traces.append({"legendgroup": group, **key_trace(legend_label(item), color, "solid", marker)})
    traces += [*_keys_of_bands(fits.values()), *_marks(analysis, list(fits))]
    window = _window([analysis.points[group].y for group in fits], fits.values())
    return figure(traces, _axes(analysis, window), legend_lines=len(fits) + 4, extra=170)


def _descriptions(analysis: Analysis, frame: pd.DataFrame) -> dict[_Key, str]:
    """What is known of each point, by its run and place."""
    if "run" not in frame.columns:
        return {}
    x, y = numbers(frame, analysis.settings.x), analysis.metric.values(frame)
    rows = frame.to_dict("records")
    return {
        (str(row["run"]), float(a), float(b)): describe(row) for row, a, b in zip(rows, x, y, strict=True)
    }


def _keys(points: Points) -> list[_Key]:
    return list(zip(points.run, points.x.tolist(), points.y.tolist(), strict=True))


def _hover(group: str, x_label: str, y_label: str) -> str:
    x, y = html.escape(x_label, quote=False), html.escape(y_label, quote=False)
    return (
        f"%{{text}}<br>{x}: %{{x:.4~g}}<br>{y}: %{{y:.4~g}}<extra>{html.escape(group, quote=False)}</extra>"
    )


def _points(
    analysis: Analysis, item: GroupFit, known: Mapping[_Key, str], color: str, marker: str
) -> list[Trace]:
    """The points that were fitted, the others pale, and the residuals, each with what it is."""
    look = {"color": color, "symbol": SYMBOLS[marker]}
    used = _keys(item.fit.points)
    left_out = sorted(set(_keys(analysis.points[item.group])) - set(used))
    hover = _hover(item.group, analysis.x_label, analysis.metric.label)
    parts = [(used, 0.85)] + ([(left_out, 0.25)] if left_out else [])
    traces = [
        {**_markers(keys, known), "marker": {**look, "size": 7, "opacity": opacity}, "hovertemplate": hover}
        for keys, opacity in parts
    ]
    residuals = {
        **_markers(used, known),
        "y": short(100 * np.expm1(item.fit.residuals)),
        "yaxis": "y2",
        "marker": {**look, "size": 5, "opacity": 0.85},
        "hovertemplate": _hover(item.group, analysis.x_label, "residual (%)"),
    }
    return [*traces, residuals]


def _markers(keys: Sequence[_Key], known: Mapping[_Key, str]) -> Trace:
    return {
        "type": "scatter",
        "mode": "markers",
        "x": short([x for _, x, _ in keys]),
        "y": short([y for _, _, y in keys]),
        "text": [known.get(key, html.escape(key[0], quote=False)) for key in keys],
    }


def _joined_runs(points: Points, color: str) -> Trace:
    rows = points.rows_of().values()
    return {
        "type": "scatter", "mode": "lines", "hoverinfo": "skip", "opacity": 0.35,
        "line": {"color": color, "width": 0.8},
        **broken_lines((points.x[own], points.y[own]) for own in rows if len(own) > 1),
    }  # fmt: skip


def _line(item: GroupFit, color: str) -> Trace:
    grid = _grid(item)
    return {
        "type": "scatter", "mode": "lines", "hoverinfo": "skip", "line": {"color": color, "width": 2},
        "x": short(grid), "y": short(item.fit.predict(grid)),
    }  # fmt: skip


def _grid(item: GroupFit) -> Array:
    x = item.fit.points.x
    return np.geomspace(x.min() / 1.15, x.max() * 1.15, 60)


def _band(item: GroupFit, color: str) -> list[Trace]:
    grid = _grid(item)
    band = item.boot.band(grid)
    if band is None:
        return []
    edge: Trace = {"type": "scatter", "mode": "lines", "x": short(grid), "hoverinfo": "skip"}
    # Filled, the bands of few runs would cover everything.
    edge["line"] = {"color": color, "width": 0 if item.boot.reliable else 1, "dash": "dot"}
    low, high = ({**edge, "y": [v if np.isfinite(v) else None for v in short(side)]} for side in band)
    if item.boot.reliable:
        high |= {"fill": "tonexty", "fillcolor": _translucent(color)}
    return [low, high]


def _keys_of_bands(fits: Iterable[GroupFit]) -> list[Trace]:
    kinds = {item.boot.reliable for item in fits if item.boot.intervals}
    keys: list[Trace] = []
    if True in kinds:
        filled = {"fill": "toself", "fillcolor": _translucent(GREY)}
        keys.append({**key_trace("95 % band", GREY, "solid"), **filled, "line": {"width": 0}})
    if False in kinds:
        keys.append(key_trace("95 % band, not reliable", GREY, "dot"))
    return keys


def _translucent(color: str) -> str:
    red, green, blue = (int(color[start : start + 2], 16) for start in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.16)"


def _marks(analysis: Analysis, groups: Sequence[str]) -> list[Trace]:
    """Rings around the frontier of each group and around its convex part."""
    selected = analysis.settings.points
    kinds = (
        ("frontier", strict_frontier, "circle-open", 12, "frontier of each"),
        ("hull", lower_hull, "diamond-open", 16, "convex hull of each"),
    )
    traces = []
    for name, select, symbol, size, words in kinds:
        found = [select(analysis.points[group]) for group in groups]
        traces.append(
            {
                "type": "scatter", "mode": "markers", "hoverinfo": "skip", "legendgroup": name,
                "x": short(np.concatenate([points.x for points in found])),
                "y": short(np.concatenate([points.y for points in found])),
                "name": f"{words} {analysis.settings.by}", "visible": True if name == selected else "legendonly",
                "marker": {"symbol": symbol, "size": size, "color": GREY, "line": {"width": 1.2}},
            }
        )  # fmt: skip
    return traces


def _window(points: Sequence[Array], fits: Iterable[GroupFit]) -> list[float]:
    """log10 of the ends of the y axis: the points and fits set it, since a band of few runs can be wider than all."""
    values = np.concatenate([*points, *(item.fit.predict(item.fit.points.x) for item in fits)])
    low, high = np.log10([values.min(), values.max()])
    pad = max(0.06 * (high - low), 0.01)
    return [float(low - pad), float(high + pad)]


def _axes(analysis: Analysis, window: list[float]) -> dict[str, Any]:
    return {
        "xaxis": log_axis(analysis.x_label, anchor="y2"),
        "yaxis": log_axis(analysis.metric.label, domain=[0.28, 1.0], range=window),
        "yaxis2": linear_axis("residual (%)", domain=[0.0, 0.2], zeroline=True, zerolinecolor=GREY),
    }
