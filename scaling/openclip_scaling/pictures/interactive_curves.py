"""Learning curves as interactive figures: training loss and metrics of every run."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping

import numpy as np
import pandas as pd

from openclip_scaling.fitting.metrics import axis_label, numbers, value_label
from openclip_scaling.fitting.table import UNKNOWN
from openclip_scaling.forms.law import Array
from openclip_scaling.pictures.curves_plot import Look, X, looks_of, running_mean, size_keys
from openclip_scaling.pictures.interactive_layout import (
    DASHES,
    GREY,
    SYMBOLS,
    Figure,
    Trace,
    describe,
    figure,
    key_trace,
    linear_axis,
    log_axis,
    short,
)

_MOST_POINTS = 200  # of one curve: more than a screen can show apart
_UNKNOWN = Look(UNKNOWN, GREY, "o")


def loss_curves(curves: pd.DataFrame, runs: pd.DataFrame) -> Figure:
    """The running mean of every run's training loss over samples seen."""
    looks = looks_of(runs)
    names = {str(row["run"]): describe({**row, "epoch": None}) for row in runs.to_dict("records")}
    traces = []
    for run, part in curves.groupby("run", sort=True):
        rows = _thinned(len(part))
        name = names.get(str(run), html.escape(str(run), quote=False))
        x, y = numbers(part, X)[rows], running_mean(numbers(part, "train_loss"))[rows]
        traces.append({**_curve(x, y, looks.get(str(run), _UNKNOWN), "lines"), **_hover(name, "train_loss")})
    return _finished(traces, looks, "train_loss")


def metric_curves(frame: pd.DataFrame, metric: str) -> Figure:
    """A metric of every run's checkpoints over samples seen."""
    frame = frame[np.isfinite(numbers(frame, metric))]
    looks = looks_of(frame)
    traces = []
    for run, part in frame.groupby("run", sort=True):
        trace = _curve(numbers(part, X), numbers(part, metric), looks[str(run)], "lines+markers")
        names = [describe(row) for row in part.to_dict("records")]
        traces.append({**trace, "text": names, **_hover("%{text}", metric)})
    return _finished(traces, looks, metric)


def _thinned(count: int) -> Array:
    """The places of at most _MOST_POINTS of `count` values, first and last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, _MOST_POINTS)).round().astype(int))


def _curve(x: Array, y: Array, look: Look, mode: str) -> Trace:
    keep = np.isfinite(x) & np.isfinite(y)
    return {
        "type": "scatter", "mode": mode, "x": short(x[keep]), "y": short(y[keep]),
        "legendgroup": look.kind, "showlegend": False,
        "line": {"color": look.color, "dash": DASHES[look.line], "width": 1.4},
        "marker": {"color": look.color, "symbol": SYMBOLS[look.marker], "size": 5},
    }  # fmt: skip


def _hover(name: str, metric: str) -> Trace:
    label = html.escape(value_label(metric), quote=False)
    return {"hovertemplate": f"{name}<br>{axis_label(X)}: %{{x:.4~s}}<br>{label}: %{{y:.4~g}}<extra></extra>"}


def _finished(traces: Iterable[Trace], looks: Mapping[str, Look], metric: str) -> Figure:
    """With a key for each attention, which switches its runs, and one for each size where there are several."""
    kinds = sorted({(look.kind, look.color, look.marker) for look in looks.values()})
    keys = [{"legendgroup": kind, **key_trace(kind, color, "solid", marker)} for kind, color, marker in kinds]
    keys += [key_trace(name, GREY, DASHES[line]) for name, line in size_keys(looks.values())]
    axes = {"xaxis": log_axis(axis_label(X), exponentformat="SI"), "yaxis": linear_axis(value_label(metric))}
    return figure([*traces, *keys], axes, legend_lines=-(-len(keys) // 2))
