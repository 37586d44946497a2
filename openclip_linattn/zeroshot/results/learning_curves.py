"""Panels of learning curves: top-1 of the checkpoints of runs against the samples seen."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, MaxNLocator

from openclip_linattn.manifest import Manifest
from openclip_linattn.zeroshot.results.looks import Look, run_path, set_title
from openclip_linattn.zeroshot.results.picture import Panel
from openclip_linattn.zeroshot.results.rows import Row, by_question
from openclip_scaling.pictures.plot import tidy


def learning_rows(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that stand in a curve, in order: with a top-1 at the size of training, of a known epoch."""
    found = [row for row in rows if "top1" in row and row["epoch"] and "trained_image_size" not in row]
    return sorted(found, key=lambda row: int(row["epoch"]))


def learning_panels(rows: Sequence[Row], looks: Mapping[Path, Look]) -> list[Panel]:
    """Return a panel for every set and label set of `learning_rows`, with a line per run and its 95 % band.

    Along it stand the samples that run.json counts, or epochs where a run has none.
    """
    samples = {str(row["checkpoint"]): samples_seen(row) for row in rows}
    counted = samples if all(samples.values()) else {}
    return [partial(_draw, part, counted, looks) for part in by_question(rows)]


def samples_seen(row: Row) -> int:
    """Return the samples that a row's run had seen at its epoch, by run.json; 0 where that is not known."""
    return Manifest(run_path(row) / "run.json").seen_before(int(row["epoch"]))["samples"]


def _draw(rows: Sequence[Row], samples: Mapping[str, int], looks: Mapping[Path, Look], axes: Axes) -> None:
    for folder, look in looks.items():
        own = [row for row in rows if run_path(row) == folder]
        x = [samples[str(row["checkpoint"])] if samples else int(row["epoch"]) for row in own]
        look.draw(axes, x, own)
    set_title(axes, rows[0])
    axes.set_xlabel("image-text pairs seen" if samples else "epochs")
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    if samples:
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_xlim(left=0)
    tidy(axes)
