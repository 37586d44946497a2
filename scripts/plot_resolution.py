"""The picture of scripts/measure_resolution.py: time and peak memory of one image against its size.

python scripts/plot_resolution.py RESOLUTION.json PICTURE.png
"""

import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from openclip_scaling.pictures.plot import plain_ticks, styles

LINES = {"low memory": "-", "plain": "--", "training": ":"}
GIB = 2**30


def figure(report: dict[str, Any]) -> Figure:
    """Two panels; hollow markers are extrapolated."""
    rows = report["rows"]
    style = styles(dict.fromkeys(row["model"] for row in rows))
    whole = Figure(figsize=(10.5, 5.2), layout="constrained")
    time, memory = whole.subplots(1, 2)
    for model, (color, marker) in style.items():
        for name, line in LINES.items():
            mine = [row for row in rows if (row["model"], row["pass"]) == (model, name)]
            draw(time, mine, "seconds", 1, color, marker, line)
            draw(memory, mine, "peak_bytes", GIB, color, marker, line)
    finish(time, rows, "seconds per image")
    finish(memory, rows, "peak memory (GiB)")
    memory.set_yticks(ticks := plain_ticks(*memory.get_ylim()), [f"{tick:g}" for tick in ticks])
    memory.set_yticks([], minor=True)
    handles = [
        Line2D([], [], color=color, marker=marker, label=model) for model, (color, marker) in style.items()
    ]
    used = dict.fromkeys(row["pass"] for row in rows)
    handles += [Line2D([], [], color="0.3", linestyle=LINES[name], label=name) for name in used]
    if any(row["status"] == "extrapolated" for row in rows):
        handles.append(
            Line2D(
                [], [], color="0.3", marker="o", linestyle="", markerfacecolor="white", label="extrapolated"
            )
        )
    whole.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    machine = report["environment"]
    threads = f", {machine['threads']} thread(s)" if machine["device_type"] == "cpu" else ""
    whole.suptitle(
        f"{machine['device']}{threads}, torch {machine['torch']}, {machine['dtype']}, one image", fontsize=9
    )
    return whole


def draw(axes: Axes, rows: list[dict[str, Any]], column: str, unit: float, *look: str) -> None:
    """One model in one pass."""
    color, marker, line = look
    rows = [row for row in rows if row[column] is not None]
    axes.plot(
        [row["pixels"] for row in rows],
        [row[column] / unit for row in rows],
        line,
        color=color,
        linewidth=1.4,
    )
    for row in rows:
        face = "white" if row["status"] == "extrapolated" else color
        axes.plot(row["pixels"], row[column] / unit, marker, color=color, markerfacecolor=face, markersize=5)


def finish(axes: Axes, rows: list[dict[str, Any]], label: str) -> None:
    """Axes in logarithms, with the measured sizes as ticks."""
    sizes = sorted({row["pixels"] for row in rows})
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=45)
    axes.set_xticks([], minor=True)
    axes.set_xlabel("side of the image (px)")
    axes.set_ylabel(label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, which="major", color="0.92", linewidth=0.7)
    axes.set_axisbelow(True)


if __name__ == "__main__":
    source, target = sys.argv[1:]
    figure(json.loads(Path(source).read_text(encoding="utf-8"))).savefig(target, dpi=130)
