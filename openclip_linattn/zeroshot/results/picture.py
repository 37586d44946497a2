"""Puts panels into one picture, with the runs named below them."""

from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

Panel = Callable[[Axes], None]

_PANEL = (4.6, 3.4)  # inches
_COLUMNS = 3


def figure_of(panels: Sequence[Panel], runs: int) -> Figure:
    """Return a figure of one or more panels; the legend, of `runs` lines, stands below."""
    columns = min(_COLUMNS, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(_PANEL[0] * columns, _PANEL[1] * lines + 0.2 * runs), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False).ravel()
    for axes, draw in zip(grid, panels, strict=False):
        draw(axes)
    for axes in grid[len(panels) :]:
        axes.remove()
    keys = [axes.get_legend_handles_labels() for axes in figure.axes]
    lines_of = {label: line for key in keys for line, label in zip(*key, strict=True)}
    figure.legend(
        list(lines_of.values()), list(lines_of), loc="outside lower left", frameon=False, fontsize=8
    )
    return figure
