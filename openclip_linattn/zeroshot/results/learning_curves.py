"""The learning curves of runs: top-1 of their checkpoints against the samples seen."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import open_clip
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from openclip_linattn.errors import UserError
from openclip_linattn.manifest import Manifest
from openclip_linattn.zeroshot.results.rows import Row
from openclip_scaling.errors import UserError as NotCounted
from openclip_scaling.flops import clip_cost
from openclip_scaling.plot import LINES, styles, tidy
from openclip_scaling.table import UNKNOWN

_PANEL = (4.6, 3.4)  # inches
_COLUMNS = 3


@dataclass(frozen=True)
class _Look:
    """How a run is drawn: colour and marker by attention, line by its place among the runs of one attention."""

    name: str
    color: str
    marker: str
    line: str


def learning_curves(rows: Sequence[Row], names: Mapping[str, str]) -> Figure:
    """Draw a panel for every set and label set, a line per run with its 95 % band.

    `names` says what a run's folder is called. Along it stand the samples that run.json counts, or epochs where a
    run has none. Rows at another image size than that of training, of unknown epochs, and without a top-1 are left
    out; raises UserError where none is left.
    """
    drawn = [row for row in rows if "top1" in row and row["epoch"] and "trained_image_size" not in row]
    if not drawn:
        raise UserError(
            "no row has a top-1 at the image size of training and a known epoch, so there is no curve to draw"
        )
    samples = {str(row["checkpoint"]): samples_seen(row) for row in drawn}
    counted = all(samples.values())
    looks = _looks(drawn, names)
    panels: dict[tuple[str, str], list[Row]] = {}
    for row in sorted(drawn, key=lambda row: int(row["epoch"])):
        panels.setdefault((str(row["data"]), str(row["label_set"])), []).append(row)
    columns = min(_COLUMNS, len(panels))
    lines = -(-len(panels) // columns)
    # The legend stands below, a line for each run.
    size = (_PANEL[0] * columns, _PANEL[1] * lines + 0.2 * len(looks))
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False).ravel()
    for axes, part in zip(grid, panels.values(), strict=False):
        _panel(axes, part, samples if counted else {}, looks)
    for axes in grid[len(panels) :]:
        axes.remove()
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", frameon=False, fontsize=8)
    return figure


def run_folder(row: Row) -> Path:
    """Return the folder of a row's run; that of the checkpoint where it lies in none."""
    path = Path(str(row["checkpoint"]))
    return path.parent.parent if row["run"] is not None and path.parent.name == "checkpoints" else path.parent


def samples_seen(row: Row) -> int:
    """Return the samples that a row's run had seen at its epoch, by run.json; 0 where that is not known."""
    return Manifest(run_folder(row) / "run.json").seen_before(int(row["epoch"]))["samples"]


def _looks(rows: Sequence[Row], names: Mapping[str, str]) -> dict[Path, _Look]:
    models = {run_folder(row): str(row["model"]) for row in rows}
    attentions = {folder: _attention(model) for folder, model in models.items()}
    style = styles(sorted(set(attentions.values())))
    lines = {attention: cycle(LINES) for attention in style}
    return {
        folder: _Look(f"{names[str(folder)]} ({attention})", *style[attention], next(lines[attention]))
        for folder, attention in attentions.items()
    }


def _attention(model: str) -> str:
    try:
        return clip_cost(open_clip.get_model_config(model) or {}).image_attention
    except (NotCounted, KeyError):  # a ResNet, or another tower that is no ViT of OpenCLIP's
        return UNKNOWN


def _panel(axes: Axes, rows: Sequence[Row], samples: Mapping[str, int], looks: Mapping[Path, _Look]) -> None:
    for folder, look in looks.items():
        own = [row for row in rows if run_folder(row) == folder]
        x = [samples[str(row["checkpoint"])] if samples else int(row["epoch"]) for row in own]
        axes.plot(
            x,
            [100 * row["top1"] for row in own],
            look.line,
            color=look.color,
            marker=look.marker,
            markersize=3.5,
            linewidth=1.2,
            label=look.name,
        )
        # A kept row of an earlier version may have no interval.
        bands = [
            (at, *row["top1_interval"]) for at, row in zip(x, own, strict=True) if "top1_interval" in row
        ]
        if bands:
            at, low, high = zip(*bands, strict=True)
            axes.fill_between(
                at, [100 * each for each in low], [100 * each for each in high],
                color=look.color, alpha=0.15, linewidth=0,
            )  # fmt: skip
    _label(axes, rows[0], counted=bool(samples))


def _label(axes: Axes, row: Row, *, counted: bool) -> None:
    # A dollar sign would start matplotlib's mathematics.
    axes.set_title(f"{row['dataset']}, {row['label_set']}".replace("$", r"\$"), fontsize=9)
    axes.set_ylabel("top-1 (%), 95 % interval")
    axes.set_xlabel("image-text pairs seen" if counted else "epochs")
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    if counted:
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_xlim(left=0)
    tidy(axes)
