"""A gallery: the maps of several models on several images, and of one image in every layer and head."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from openclip_linattn.analysis.maps import TokenMaps
from openclip_linattn.analysis.tiles import Section, Tile, image_tile, map_tile, tile_figure, tile_page
from openclip_linattn.errors import UserError
from openclip_linattn.files import atomic_path, write_text
from openclip_scaling.pictures.plot import save_figure

_NOTES = (
    "Every map is coloured from its own least value (dark) to its largest (bright). The line below it says how far "
    "these lie from the mean weight of a patch: a map from 0.99 to 1.01 × mean is flat, however it looks.",
)


@dataclass(frozen=True)
class ModelMaps:
    """The maps of one model: its name, the images as colours (B, 3, height, width) of 0 to 1, one entry per method."""

    name: str
    colors: Tensor
    maps: Sequence[TokenMaps]


def write_gallery(
    models: Sequence[ModelMaps], pictures: Sequence[str], folder: Path, *, layer: int | None, head: int | None
) -> list[Path]:
    """Write maps.png, a layers-*.png per model, index.html and maps.npz into the folder, and return their paths.

    maps.png has a row per picture and a column per model and method, of one layer (None: the last) and head (None:
    their mean); layers-*.png has the first picture's maps of the first method in every layer and head; index.html
    shows all of these; maps.npz holds all values, (B, L, H, grid height, grid width) as "model:method". Raises
    UserError for a layer or head that is not there.
    """
    sections = {"maps": _overview(models, pictures, layer, head)}
    for model in models:
        sections[_file_name(f"layers-{model.name}", sections)] = _layers(model, pictures[0])
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"the folder {folder} cannot be made ({error.strerror}); name another place"
        ) from error
    paths = [folder / f"{name}.png" for name in sections]
    for path, section in zip(paths, sections.values(), strict=True):
        save_figure(tile_figure(section.tiles, section.columns, section.rows, section.title), path)
    page = folder / "index.html"
    write_text(page, tile_page("Token weights over images", _NOTES, list(sections.values())))
    values = folder / "maps.npz"
    _write_values(
        values, {f"{model.name}:{each.method}": each.values for model in models for each in model.maps}
    )
    return [*paths, page, values]


def _overview(
    models: Sequence[ModelMaps], pictures: Sequence[str], layer: int | None, head: int | None
) -> Section:
    columns = ["image"]
    tiles = [[image_tile(models[0].colors[number], "")] for number in range(len(pictures))]
    for model in models:
        for maps in model.maps:
            columns.append(f"{model.name}\n{maps.attention}\n{maps.method}")
            chosen = maps.choose(layer, head)
            for number, line in enumerate(tiles):
                line.append(map_tile(model.colors[number], chosen[number]))
    which = "the last layer" if layer is None else f"layer {layer}"
    heads = "mean over heads" if head is None else f"head {head}"
    return Section(f"Maps of {which}, {heads}", columns, pictures, tiles)


def _layers(model: ModelMaps, picture: str) -> Section:
    maps = model.maps[0]
    tiles: list[list[Tile]] = [
        [map_tile(model.colors[0], maps.values[0, layer, head]) for head in range(maps.heads)]
        for layer in range(maps.layers)
    ]
    columns = [f"head {head}" for head in range(maps.heads)]
    rows = [f"layer {layer}" for layer in range(maps.layers)]
    return Section(f"{model.name} ({maps.attention}), {maps.method}, on {picture}", columns, rows, tiles)


def _file_name(name: str, taken: Collection[str]) -> str:
    """The name without what file systems dislike, and with a number where another one became the same."""
    plain = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name)
    numbered = (f"{plain}-{number}" for number in count(2))
    return next(each for each in chain([plain], numbered) if each not in taken)


def _write_values(path: Path, arrays: Mapping[str, Tensor]) -> None:
    save: Any = np.savez_compressed  # its types take every array for the flag allow_pickle
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        save(file, **{name: values.float().cpu().numpy() for name, values in arrays.items()})
