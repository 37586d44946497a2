"""The figure of a law of two scales: metric against the second scale, one curve for each value of the first."""

from __future__ import annotations

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from openclip_scaling.errors import UserError
from openclip_scaling.fitting.analysis import Analysis, GroupFit
from openclip_scaling.fitting.metrics import axis_label
from openclip_scaling.pictures.plot import exponents_label, log_axes, log_ticks, tidy

_CURVES = 6  # of one panel; more sizes than that are points between the curves
_PANEL = 4.4  # inches


def surface_figure(analysis: Analysis, law: str) -> Figure:
    """A column per group: points and fit above, residuals below; colour is the first scale.

    Raises UserError when the analysis has no fit of that law.
    """
    fits = analysis.by_law(law)
    if not fits:
        raise UserError(f"There is no fit of the law {law!r} to draw.")
    figure = Figure(figsize=(_PANEL * len(fits) + 1.2, 5.4), layout="constrained")
    panels = figure.subplots(2, len(fits), sharex=True, sharey="row", height_ratios=(3.2, 1), squeeze=False)
    sizes = np.concatenate([item.fit.points.x[:, 0] for item in fits.values()])
    norm = LogNorm(float(sizes.min()), float(sizes.max()) * (1 + 1e-9))
    for (group, item), (top, bottom) in zip(fits.items(), panels.T, strict=True):
        _draw(top, item, norm)
        points = item.fit.points
        residuals = 100 * np.expm1(item.fit.residuals)
        bottom.scatter(points.x[:, 1], residuals, c=_colors(points.x[:, 0], norm), s=12, linewidths=0)
        bottom.axhline(0, color="0.4", linewidth=0.8)
        bottom.set_xlabel(axis_label(analysis.settings.scales[1]))
        top.set_title(f"{group}\n{exponents_label(item)}", fontsize=8)
    figure.suptitle(f"${next(iter(fits.values())).fit.law.latex}$", fontsize=9)
    values = np.concatenate([item.fit.points.y for item in fits.values()])
    for axes in panels.flat:
        tidy(axes)
    log_axes(panels[0, 0], values)
    for axes in panels[1]:
        log_ticks(axes)
    panels[0, 0].set_ylabel(analysis.metric.label)
    panels[1, 0].set_ylabel("residual (%)")
    scale = figure.colorbar(_mappable(norm), ax=panels[:, -1], fraction=0.05)
    scale.set_label(axis_label(analysis.settings.scales[0]))
    return figure


def _draw(axes: Axes, item: GroupFit, norm: LogNorm) -> None:
    points = item.fit.points
    axes.scatter(points.x[:, 1], points.y, c=_colors(points.x[:, 0], norm), s=16, alpha=0.85, linewidths=0)
    sizes = np.unique(points.x[:, 0])
    wanted = np.log(np.geomspace(sizes[0], sizes[-1], _CURVES))
    shown = np.unique([sizes[np.abs(np.log(sizes) - log).argmin()] for log in wanted])
    grid = np.geomspace(points.x[:, 1].min() / 1.15, points.x[:, 1].max() * 1.15, 100)
    for size in shown:
        curve = item.fit.predict(np.column_stack([np.full_like(grid, size), grid]))
        axes.plot(grid, curve, color=_colors(np.array([size]), norm)[0], linewidth=1.2)


def _colors(sizes: np.ndarray, norm: LogNorm) -> np.ndarray:
    return np.asarray(colormaps["viridis"](norm(sizes)))


def _mappable(norm: LogNorm) -> ScalarMappable:
    return ScalarMappable(norm, colormaps["viridis"])
