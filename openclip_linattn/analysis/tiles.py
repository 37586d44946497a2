"""Maps drawn over images, in figures and on a page of their own."""

import base64
import html
import io
from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib as mpl
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

COLORMAP = "cividis"  # even in lightness, also for colour-blind readers
_OPACITY = 0.7
_SIDE = 160  # pixels of a tile on the page


@dataclass(frozen=True)
class Tile:
    """A small picture (height, width, 3) of bytes, and a line under it."""

    pixels: NDArray[np.uint8]
    caption: str


def image_tile(colors: Tensor, caption: str) -> Tile:
    """The image itself, from colours (3, height, width) of 0 to 1."""
    return Tile(_bytes(colors.permute(1, 2, 0).cpu().numpy()), caption)


def map_tile(colors: Tensor, values: Tensor) -> Tile:
    """A map (grid height, grid width) over the grey image, from its least value (dark) to its largest (bright).

    The line under it says how far these lie apart, in units of the mean: a flat map looks as lively as a sharp one.
    """
    rows, columns = colors.shape[1] // values.shape[0], colors.shape[2] // values.shape[1]
    patches = values.repeat_interleave(rows, 0).repeat_interleave(columns, 1).cpu().numpy()
    low, high = float(values.min()), float(values.max())
    scaled = (patches - low) / (high - low) if high > low else np.zeros_like(patches)
    # Half the contrast: a bright image must not make a map look brighter than a dark one does.
    grey = 0.25 + 0.5 * colors.mean(0).unsqueeze(-1).cpu().numpy()
    colored = mpl.colormaps[COLORMAP](scaled)[..., :3]
    return Tile(_bytes(_OPACITY * colored + (1 - _OPACITY) * grey), _spread(values))


def _spread(values: Tensor) -> str:
    mean = float(values.mean())
    if mean <= 0:
        return "no weight"
    return f"{float(values.min()) / mean:.3g} to {float(values.max()) / mean:.3g} × mean"


def _bytes(colors: NDArray[np.floating]) -> NDArray[np.uint8]:
    pixels: NDArray[np.uint8] = np.round(255 * np.clip(colors, 0, 1)).astype(np.uint8)
    return pixels


def tile_figure(
    tiles: Sequence[Sequence[Tile]], columns: Sequence[str], rows: Sequence[str], title: str
) -> Figure:
    """The tiles in a grid with a title over every column and a word before every row, each with its line below."""
    figure = Figure(figsize=(1.5 * len(columns) + 0.8, 1.75 * len(rows) + 0.9), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(_plain(title), fontsize=9)
    axes = figure.subplots(len(rows), len(columns), squeeze=False)
    for row, line in enumerate(tiles):
        for column, tile in enumerate(line):
            axis = axes[row, column]
            axis.imshow(tile.pixels, interpolation="nearest")
            axis.set(xticks=[], yticks=[])
            axis.set_xlabel(_plain(tile.caption), fontsize=6)
            if row == 0:
                axis.set_title(_plain(columns[column]), fontsize=7)
            if column == 0:
                axis.set_ylabel(_plain(rows[row]), fontsize=7)
    return figure


def _plain(text: str) -> str:
    return text.replace("$", r"\$")  # a dollar sign would start matplotlib's mathematics


@dataclass(frozen=True)
class Section:
    """One table of tiles on the page."""

    title: str
    columns: Sequence[str]
    rows: Sequence[str]
    tiles: Sequence[Sequence[Tile]]


def tile_page(title: str, notes: Sequence[str], sections: Sequence[Section]) -> str:
    """An HTML page with all tiles inside it, which needs no other file and no network."""
    body = "\n".join(_table(section) for section in sections)
    said = "\n".join(f"<p>{html.escape(note)}</p>" for note in notes)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{html.escape(title)}</h1>\n{said}\n{body}\n</body>\n</html>\n"
    )


_STYLE = (
    "body{font:14px/1.4 sans-serif;margin:2em;color:#222}table{border-collapse:collapse;margin-bottom:2em}"
    "th{font-weight:600;padding:4px 8px;vertical-align:bottom;white-space:pre}"
    "tr>th:first-child{vertical-align:middle;text-align:right}"
    "td{padding:4px;text-align:center;font-size:11px}"
    f"img{{display:block;width:{_SIDE}px;image-rendering:pixelated}}"
)


def _table(section: Section) -> str:
    head = "".join(f"<th>{html.escape(column)}</th>" for column in section.columns)
    lines = [
        f"<tr><th>{html.escape(name)}</th>{''.join(_cell(tile, name) for tile in tiles)}</tr>"
        for name, tiles in zip(section.rows, section.tiles, strict=True)
    ]
    body = "\n".join(lines)
    return f"<h2>{html.escape(section.title)}</h2>\n<table>\n<tr><th></th>{head}</tr>\n{body}\n</table>"


def _cell(tile: Tile, name: str) -> str:
    buffer = io.BytesIO()
    Image.fromarray(tile.pixels).save(buffer, "PNG")
    data = base64.b64encode(buffer.getvalue()).decode()
    caption = html.escape(tile.caption)
    return f'<td><img src="data:image/png;base64,{data}" alt="{html.escape(name)}: {caption}">{caption}</td>'
