"""How runs are drawn, alike in every panel of a picture."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import open_clip
from matplotlib.axes import Axes

from openclip_linattn.epochs import numbered_epoch
from openclip_linattn.zeroshot.checkpoints import CHECKPOINT_FOLDER
from openclip_linattn.zeroshot.results.rows import Row
from openclip_scaling.errors import UserError as NotCounted
from openclip_scaling.fitting.table import UNKNOWN
from openclip_scaling.flops import clip_cost
from openclip_scaling.pictures.plot import LINES, styles


@dataclass(frozen=True)
class Look:
    """How a run is drawn: colour and marker by attention, line by its place among the runs of one attention."""

    name: str
    color: str
    marker: str
    line: str

    def draw(self, axes: Axes, x: Sequence[float], rows: Sequence[Row]) -> None:
        """Draw the top-1 of `rows` in percent over `x`, with the band of their 95 % intervals."""
        axes.plot(
            x,
            [100 * row["top1"] for row in rows],
            self.line,
            color=self.color,
            marker=self.marker,
            markersize=3.5,
            linewidth=1.2,
            label=self.name,
        )
        # A kept row of an earlier version may have no interval.
        bands = [
            (at, *row["top1_interval"]) for at, row in zip(x, rows, strict=True) if "top1_interval" in row
        ]
        if bands:
            at, low, high = zip(*bands, strict=True)
            axes.fill_between(
                at, [100 * each for each in low], [100 * each for each in high],
                color=self.color, alpha=0.15, linewidth=0,
            )  # fmt: skip


def run_looks(rows: Sequence[Row], names: Mapping[str, str]) -> dict[Path, Look]:
    """Return the look of every run in `rows`; `names` says what a run's folder is called."""
    models = {run_path(row): str(row["model"]) for row in rows}
    attentions = {folder: _attention(model) for folder, model in models.items()}
    style = styles(sorted(set(attentions.values())))
    lines = {attention: cycle(LINES) for attention in style}
    return {
        folder: Look(f"{names[str(folder)]} ({attention})", *style[attention], next(lines[attention]))
        for folder, attention in attentions.items()
    }


def run_path(row: Row) -> Path:
    """Return the folder of a row's run; outside one the folder of an epoch_N.pt, or another checkpoint itself."""
    path = Path(str(row["checkpoint"]))
    if row["run"] is None:
        return path if numbered_epoch(path) is None else path.parent
    return path.parent.parent if path.parent.name == CHECKPOINT_FOLDER else path.parent


def set_title(axes: Axes, row: Row) -> None:
    """Write the set and the label set of `row` above a panel."""
    # A dollar sign would start matplotlib's mathematics.
    axes.set_title(f"{row['dataset']}, {row['label_set']}".replace("$", r"\$"), fontsize=9)
    axes.set_ylabel("top-1 (%), 95 % interval")


def _attention(model: str) -> str:
    try:
        return clip_cost(open_clip.get_model_config(model) or {}).image_attention
    except (NotCounted, KeyError):  # a ResNet, or another tower that is no ViT of OpenCLIP's
        return UNKNOWN
