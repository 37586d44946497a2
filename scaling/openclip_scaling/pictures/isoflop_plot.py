"""The isoFLOP figure: metric against model size, a panel for each group and a colour for each training compute."""

from __future__ import annotations

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from openclip_scaling.fitting.metrics import axis_label
from openclip_scaling.isoflops.isoflop import IsoFlop, IsoFlopView
from openclip_scaling.pictures.plot import log_axes, tidy

_COLUMNS = 3
_PANEL = (3.9, 3.3)  # inches
_SHADES = (0.05, 0.8)  # of viridis, whose yellow end is too pale for lines


def isoflop_figure(view: IsoFlopView) -> Figure:
    """Points, curves, and a star at each minimum with the interval of its size; colour is the training compute."""
    groups = view.drawn
    columns = min(_COLUMNS, len(groups))
    rows = -(-len(groups) // columns)
    figure = Figure(figsize=(_PANEL[0] * columns + 0.6, _PANEL[1] * rows + 0.9), layout="constrained")
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    colors = budget_colors(view)
    for group, axes in zip(groups, panels.flat, strict=False):
        axes.set_title(group, fontsize=9)
        for profile in view.profiles:
            if profile.group == group:
                _draw(axes, profile, colors[profile.flop])
    for axes in panels.flat[len(groups) :]:
        axes.set_visible(False)
    values = np.concatenate([np.concatenate([p.points.y, p.values]) for p in view.profiles])
    for index, axes in enumerate(panels.flat[: len(groups)]):
        tidy(axes)
        if index % columns == 0:
            axes.set_ylabel(view.metric.label)
        if index + columns >= len(groups):
            axes.set_xlabel(axis_label(view.size))
            axes.tick_params(labelbottom=True)
    sizes = np.concatenate([p.sizes for p in view.profiles])
    panels[0, 0].set_xlim(sizes.min() / 1.05, sizes.max() * 1.05)
    log_axes(panels[0, 0], values)
    _legend(figure, panels[0, 0], view, colors)
    return figure


def budget_colors(view: IsoFlopView) -> dict[float, str]:
    """A shade of viridis for each budget, dark to light with rising compute."""
    shades = np.linspace(*_SHADES, max(2, len(view.budgets)))
    colors = (colormaps["viridis"](shade) for shade in shades)
    return {
        flop: "#" + "".join(f"{round(255 * part):02x}" for part in color[:3])
        for flop, color in zip(view.budgets, colors, strict=False)
    }


def _draw(axes: Axes, profile: IsoFlop, color: str) -> None:
    axes.plot(profile.points.x, profile.points.y, "o", color=color, markersize=4, alpha=0.85, mew=0)
    axes.plot(profile.sizes, profile.values, color=color, linewidth=1.2)
    minimum = profile.minimum
    if minimum is None:
        return
    if minimum.interval is not None:
        # Clipped to the curve: an interval may reach far beyond every size.
        low, high = np.clip(minimum.interval, profile.sizes[0], profile.sizes[-1])
        style = "-" if minimum.reliable else ":"
        axes.plot([low, high], [minimum.value] * 2, style, color=color, linewidth=2.2, alpha=0.6)
    axes.plot(minimum.size, minimum.value, "*", color=color, markersize=10, mec="white", mew=0.7)


def _legend(figure: Figure, axes: Axes, view: IsoFlopView, colors: dict[float, str]) -> None:
    """Above the panels: the budgets, and what star and bar mean."""
    keys = [
        axes.plot([], [], "o-", color=colors[f], markersize=4, label=f"{f:.3g} FLOP")[0] for f in view.budgets
    ]
    minima = [p.minimum for p in view.profiles if p.minimum is not None]
    if minima:
        keys += axes.plot([], [], "*", color="0.3", markersize=9, label="minimum")
    for reliable, style, words in ((True, "-", ""), (False, ":", ", not reliable")):
        if any(m.interval is not None and m.reliable == reliable for m in minima):
            label = f"95 % interval of its size{words}"
            keys += axes.plot([], [], style, color="0.3", linewidth=2.2, alpha=0.6, label=label)
    figure.legend(
        handles=keys, loc="outside upper left", ncols=2 if len(view.drawn) == 1 else 4, frameon=False,
        fontsize=8, title=f"training compute; curves: {view.curve}", title_fontsize=8, alignment="left",
    )  # fmt: skip
