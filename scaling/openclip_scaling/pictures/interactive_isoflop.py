"""The isoFLOP view as an interactive figure: all groups in one, colour by group and line style by compute."""

from __future__ import annotations

import html
from itertools import cycle

import numpy as np

from openclip_scaling.fitting.metrics import axis_label
from openclip_scaling.isoflops.isoflop import IsoFlop, IsoFlopView
from openclip_scaling.pictures.interactive_layout import (
    DASHES,
    GREY,
    SYMBOLS,
    Figure,
    Trace,
    figure,
    key_trace,
    log_axis,
    short,
)
from openclip_scaling.pictures.plot import styles


def isoflop(view: IsoFlopView) -> Figure:
    """Points, curves and minima with the intervals of their sizes."""
    style = styles(view.groups)
    dashes = dict(zip(view.budgets, cycle(DASHES.values()), strict=False))
    traces: list[Trace] = []
    for profile in view.profiles:
        color, marker = style[profile.group]
        own = {"legendgroup": profile.group, "showlegend": False, "type": "scatter"}
        traces += [{**own, **trace} for trace in _drawn(view, profile, color, marker, dashes[profile.flop])]
    keys = [{"legendgroup": group, **key_trace(group, color, "solid", marker)}
            for group, (color, marker) in style.items() if group in view.drawn]  # fmt: skip
    keys += [key_trace(f"{flop:.3g} FLOP", GREY, dashes[flop]) for flop in view.budgets]
    axes = {"xaxis": log_axis(axis_label(view.size)), "yaxis": log_axis(view.metric.label)}
    return figure([*traces, *keys], axes, legend_lines=-(-len(keys) // 2))


def _drawn(view: IsoFlopView, profile: IsoFlop, color: str, marker: str, dash: str) -> list[Trace]:
    points, flop = profile.points, f"{profile.flop:.3g} training FLOP"
    label = html.escape(view.metric.label, quote=False)
    size = html.escape(axis_label(view.size), quote=False)
    group = html.escape(profile.group, quote=False)
    place = f"{size}: %{{x:.4~g}}<br>{label}: %{{y:.4~g}}<extra>{group}</extra>"
    traces: list[Trace] = [
        {"mode": "lines", "x": short(profile.sizes), "y": short(profile.values), "hoverinfo": "skip",
         "line": {"color": color, "dash": dash, "width": 1.5}},
        {"mode": "markers", "x": short(points.x), "y": short(points.y),
         "text": [html.escape(run, quote=False) for run in points.run],
         "hovertemplate": f"%{{text}}, at {flop}<br>{place}",
         "marker": {"color": color, "symbol": SYMBOLS[marker], "size": 6, "opacity": 0.8}},
    ]  # fmt: skip
    minimum = profile.minimum
    if minimum is None:
        return traces
    if minimum.interval is not None:
        low, high = np.clip(minimum.interval, profile.sizes[0], profile.sizes[-1])
        traces.append(
            {"mode": "lines", "x": short([low, high]), "y": short([minimum.value] * 2), "hoverinfo": "skip",
             "opacity": 0.6, "line": {"color": color, "width": 4, "dash": "solid" if minimum.reliable else "dot"}}
        )  # fmt: skip
    traces.append(
        {"mode": "markers", "x": short([minimum.size]), "y": short([minimum.value]),
         "hovertemplate": f"minimum at {flop}: {minimum.label}<br>{place}",
         "marker": {"color": color, "symbol": "star", "size": 13, "line": {"color": "white", "width": 1}}}
    )  # fmt: skip
    return traces
