"""The picture of `bench reading`: the parts of one sample, and the whole loader by its workers."""

from typing import Any

from matplotlib.figure import Figure

from openclip_scaling.pictures.plot import COLORS


def reading_figure(report: dict[str, Any]) -> Figure:
    """Left the time of every part of a sample, right the loader's samples per second; every round is a dot."""
    panels = Figure(figsize=(9.6, 3.6), layout="constrained")
    left, right = panels.subplots(1, 2, width_ratios=(1.4, 1))
    parts = report["parts"]
    for place, row in enumerate(parts):
        left.barh(place, 1e6 * row["seconds"], color=COLORS[0])
        left.annotate(
            f" {row['share']:.0%}",
            (1e6 * max(row["times"]), place),
            va="center",
            fontsize=9,
            xytext=(4, 0),
            textcoords="offset points",
        )
        left.plot(
            [1e6 * seconds for seconds in row["times"]], [place] * len(row["times"]), ".", color="0.15", ms=4
        )
    left.set_yticks(range(len(parts)), [row["part"] for row in parts])
    left.invert_yaxis()
    left.margins(x=0.12)
    left.set_xlabel("time of one sample in one process (µs)")
    loaders = report["loaders"]
    for place, row in enumerate(loaders):
        right.bar(place, row["samples_per_s"], color=COLORS[1], width=0.6)
        right.plot([place] * len(row["rates"]), row["rates"], ".", color="0.15", ms=4)
    alone = 1 / sum(row["seconds"] for row in parts)
    right.axhline(alone, color="0.4", linestyle="--", linewidth=1, label="one process doing the parts")
    right.set_xticks(range(len(loaders)), [str(row["workers"]) for row in loaders])
    right.set_xlabel("data-loader workers")
    right.set_ylabel("samples per second")
    right.legend(fontsize=8, loc="lower right")
    panels.suptitle(
        f"{report['environment']['device']}; {report['source']}; {report['model']}",
        fontsize=9,
        x=0.02,
        ha="left",
    )
    return panels
