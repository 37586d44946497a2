"""The screen of `openclip-linattn analyze maps`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from openclip_linattn.cli.analyze.options import (
    CheckpointsArgument,
    DataOption,
    DeviceOption,
    GammaOption,
    JsonOption,
    ModelOption,
    TinyOption,
    check_count,
    check_folder,
    names_of,
    number,
    show_json,
    show_table,
    word,
)
from openclip_linattn.cli.data.progress import progress

if TYPE_CHECKING:
    from openclip_linattn.analysis.gallery import ModelMaps
    from openclip_linattn.analysis.images import Picture
    from openclip_linattn.analysis.models import Subject


def maps_command(  # noqa: PLR0913  (the parameters are the command's options)
    checkpoints: CheckpointsArgument,
    data: DataOption,
    model: ModelOption = None,
    maps: Annotated[
        list[str] | None,
        typer.Option(
            "--map",
            help="class, received, arrivals, katz or rollout. May be repeated. Default: class, arrivals, rollout.",
        ),
    ] = None,
    images: Annotated[int, typer.Option(help="Images, spread evenly over the set.")] = 6,
    layer: Annotated[
        int | None, typer.Option(help="Layer of the overview, from 0. Default: the last.")
    ] = None,
    head: Annotated[
        int | None, typer.Option(help="Head of the overview, from 0. Default: their mean.")
    ] = None,
    gamma: GammaOption = 0.95,
    out: Annotated[Path, typer.Option(help="Folder for the gallery.")] = Path("maps"),
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
    tiny: TinyOption = False,
) -> None:
    """Token weights drawn over images: a gallery (index.html, PNGs) and the values of every layer and head (npz)."""
    from openclip_linattn.analysis.gallery import write_gallery  # late: --help stays quick
    from openclip_linattn.analysis.images import open_pictures
    from openclip_linattn.analysis.models import trained_subjects

    check_count("--images", images)
    check_folder(out)
    subjects = trained_subjects(checkpoints, model)
    pictures = list(open_pictures(data).pictures(2 if tiny else images))
    names = names_of(subjects)
    methods = list(dict.fromkeys(maps or ("class", "arrivals", "rollout")))
    found: list[ModelMaps] = []
    with progress("maps", len(subjects)) as advance:
        for subject in subjects:
            found.append(_read(subject, names[subject.source], pictures, methods, gamma, device))
            advance(1)
    paths = write_gallery(found, [picture.key for picture in pictures], out, layer=layer, head=head)
    rows = [row for each in found for row in _rows(each)]
    if as_json:
        show_json({"files": [str(path) for path in paths], "maps": rows})
        return
    _show(rows)
    typer.echo("\n".join(map(str, paths)))


def _read(
    subject: Subject, name: str, pictures: list[Picture], methods: list[str], gamma: float, device: str
) -> ModelMaps:
    import torch

    from openclip_linattn.analysis.gallery import ModelMaps
    from openclip_linattn.analysis.images import Canvas
    from openclip_linattn.analysis.maps import token_maps
    from openclip_linattn.zeroshot.encoders.models import choose_device

    loaded = subject.load(choose_device(device))
    images = torch.stack([loaded.transform(picture.image) for picture in pictures])
    found = token_maps(loaded.clip.visual, images.to(loaded.device), methods, gamma=gamma)
    return ModelMaps(name, Canvas(loaded.transform).colors(images), found)


def _rows(model: ModelMaps) -> list[dict[str, Any]]:
    """One row per map and layer, means over images and heads."""
    from openclip_linattn.ops.inputs import TINY

    rows = []
    for maps in model.maps:
        for layer in range(maps.layers):
            values = maps.values[:, layer].flatten(2)
            shares = values / values.sum(-1, keepdim=True).clamp_min(TINY)
            rows.append(
                {
                    "checkpoint": model.name,
                    "attention": maps.attention,
                    "map": maps.method,
                    "layer": layer,
                    "contrast": float((shares.amax(-1) * values.shape[-1]).mean()),
                    "least": float((shares.amin(-1) * values.shape[-1]).mean()),
                }
            )
    return rows


def _show(rows: list[dict[str, Any]]) -> None:
    show_table(
        "Weights over the patches, means over heads and images",
        {
            "checkpoint": word("checkpoint"),
            "attention": word("attention"),
            "map": word("map"),
            "layer": word("layer"),
            "largest / mean": number("contrast", 4),
            "least / mean": number("least", 4),
        },
        rows,
    )
