"""A picture of the first samples of any shards, with their captions."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from openclip_linattn.data.decoding import IMAGE_SUFFIXES, decode_image, judge
from openclip_linattn.data.reading import ShardLog, read_samples
from openclip_linattn.data.sources import expand
from openclip_linattn.errors import UserError
from openclip_linattn.files import atomic_path

COLUMNS = 8


def _pictures(source: str) -> Iterator[tuple[Image.Image, str]]:
    for url in expand(source):
        for sample in read_samples(url, ShardLog()):
            if judge(sample).usable:
                suffix = next(suffix for suffix in IMAGE_SUFFIXES if suffix in sample.members)
                yield decode_image(sample.members[suffix]), sample.members["txt"].decode("utf-8")


def sample_grid(source: str, path: Path, n: int = 48) -> int:
    """Draw the first `n` usable samples of `source` into the PNG `path`, eight in a row; return how many.

    `source` is a folder, a shard or a pattern. Raises UserError where it has no usable sample.
    """
    if n < 1:
        raise UserError(f"The number of samples to draw must be at least 1, not {n}.")
    pictures = list(islice(_pictures(source), n))
    if not pictures:
        raise UserError(f"{source} has no usable sample to draw.")
    rows = -(-len(pictures) // COLUMNS)
    figure = Figure(figsize=(1.7 * COLUMNS, 2.2 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, COLUMNS, squeeze=False).ravel()
    for axis in axes:
        axis.set_axis_off()
    for axis, (image, text) in zip(axes, pictures, strict=False):
        axis.imshow(image)
        # A dollar sign would start matplotlib's mathematics.
        lines = textwrap.wrap(text.replace("$", r"\$"), 24)[:4]
        axis.text(0.5, -0.04, "\n".join(lines), transform=axis.transAxes, ha="center", va="top", fontsize=7)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png", dpi=110)
    return len(pictures)
