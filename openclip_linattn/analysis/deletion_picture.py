"""The picture of deletion curves: the probability left against the share deleted, a panel per model."""

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from openclip_linattn.analysis.controls import CONTROLS
from openclip_linattn.analysis.faithfulness import Faithfulness
from openclip_scaling.pictures.plot import COLORS, styles, tidy


def deletion_figure(found: Mapping[str, Faithfulness]) -> Figure:
    """Mean curves by model: above the most relevant first (MoRF), below the least (LeRF); controls are broken lines."""
    figure = Figure(figsize=(1.2 + 3.4 * len(found), 6.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, len(found), squeeze=False, sharex=True, sharey=True)
    for column, (name, each) in enumerate(found.items()):
        _draw(axes[0, column], each.morf)
        _draw(axes[1, column], each.lerf)
        axes[0, column].set_title(name.replace("$", r"\$"), fontsize=9)
        axes[1, column].set_xlabel("share deleted")
    # The panels share this axis, and a limit set before all curves are there would cut off the later ones.
    axes[0, 0].set_ylim(bottom=0)
    axes[0, 0].set_ylabel("probability, most relevant first")
    axes[1, 0].set_ylabel("probability, least relevant first")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), fontsize=8, frameon=False)
    return figure


def _draw(axes: Axes, curves: Mapping[str, list[float]]) -> None:
    looks = styles(name for name in curves if name not in CONTROLS)
    greys = dict(zip(CONTROLS, (COLORS[6], COLORS[7]), strict=True))
    for name, curve in curves.items():
        share = np.linspace(0, 1, len(curve))
        if name in CONTROLS:
            axes.plot(share, curve, "--", color=greys[name], label=name)
        else:
            color, marker = looks[name]
            axes.plot(share, curve, "-", color=color, marker=marker, markersize=3, label=name)
    tidy(axes)
