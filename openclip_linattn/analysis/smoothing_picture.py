"""The picture of smoothing: the measures of every model against its number of tokens."""

from collections.abc import Sequence
from typing import Any, Literal

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from openclip_scaling.pictures.plot import log_ticks, styles, tidy

_LINES: dict[bool, tuple[Literal["-", "--"], str]] = {True: ("-", "trained"), False: ("--", "random weights")}
_PANELS = {
    "contrast": "largest weight over the mean",
    "unevenness": "1 - entropy / log N",
    "gradient": "|dw / dq|",
    "relative_gradient": "|dw / dq| |q| / |w|",
}


def smoothing_figure(rows: Sequence[dict[str, Any]]) -> Figure:
    """One panel per measure, a line per model: trained ones full, random ones broken.

    Rows have `model`, `attention`, `trained`, `tokens` and the measures of `over_layers`. A measure that spans more
    than a factor of ten has a logarithmic axis, where values of zero (weights that are all equal) have no place:
    they are left out.
    """
    figure = Figure(figsize=(9.6, 7.2), layout="constrained")
    FigureCanvasAgg(figure)
    looks = styles(row["attention"] for row in rows)
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        entropy = row["evenness"]
        groups.setdefault(row["model"], []).append(
            {**row, "unevenness": None if entropy is None else 1 - entropy}
        )
    for axes, (measure, label) in zip(figure.subplots(2, 2).ravel(), _PANELS.items(), strict=True):
        values: list[float] = []
        for group in groups.values():
            points = [(row["tokens"], row[measure]) for row in group if (row[measure] or 0) > 0]
            color, marker = looks[group[0]["attention"]]
            x, y = [tokens for tokens, _ in points], [value for _, value in points]
            axes.plot(x, y, _LINES[group[0]["trained"]][0], color=color, marker=marker, markersize=4)
            values += y
        wide = max(values, default=1) > 10 * min(values, default=1)
        axes.set(yscale="log" if wide else "linear", xlabel="tokens N", ylabel=label)
        log_ticks(axes)
        tidy(axes)
    keys = [Line2D([], [], color=color, marker=marker, label=kind) for kind, (color, marker) in looks.items()]
    for trained in sorted({row["trained"] for row in rows}, reverse=True):
        line, label = _LINES[trained]
        keys.append(Line2D([], [], color="0.3", linestyle=line, label=label))
    figure.legend(handles=keys, loc="outside upper center", ncols=5, fontsize=8, frameon=False)
    return figure
