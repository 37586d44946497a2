"""The screen of `openclip-linattn analyze spectrum`."""

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
    check_out,
    names_of,
    number,
    show_json,
    show_table,
    word,
)
from openclip_linattn.cli.data.progress import progress
from openclip_linattn.files import write_json

if TYPE_CHECKING:
    from openclip_linattn.analysis.images import PictureSource
    from openclip_linattn.analysis.models import Subject


def spectrum_command(  # noqa: PLR0913  (the parameters are the command's options)
    checkpoints: CheckpointsArgument,
    data: DataOption,
    model: ModelOption = None,
    images: Annotated[int, typer.Option(help="Images, spread evenly over the set.")] = 8,
    gamma: GammaOption = 0.95,
    out: Annotated[
        Path | None, typer.Option(help="Write everything, per layer and head, to this JSON.")
    ] = None,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
    tiny: TinyOption = False,
) -> None:
    """Spectral radius, row sums, absorption and Perron vectors of every layer, and the sum across layers.

    Perron vectors are those of ReLU(QK^T), from the layer's queries and keys, compared with the weights that
    Linear-InfSA makes of the same, beside a constant vector and after taking off the means.
    """
    from openclip_linattn.analysis.images import open_pictures  # late: --help stays quick
    from openclip_linattn.analysis.models import trained_subjects
    from openclip_linattn.analysis.spectrum import by_layer

    check_count("--images", images)
    check_out(out)
    subjects = trained_subjects(checkpoints, model)
    source = open_pictures(data)
    names = names_of(subjects)
    found: list[dict[str, Any]] = []
    with progress("spectra", len(subjects)) as advance:
        for subject in subjects:
            found.append(
                {
                    "checkpoint": names[subject.source],
                    **_measure(subject, source, 2 if tiny else images, gamma, device),
                }
            )
            advance(1)
    if out is not None:
        write_json(out, found)
    if as_json:
        show_json(found)
        return
    for each in found:
        _show_layers(each["checkpoint"], by_layer(each["heads"]))
    _show_undefined(found)
    _show_sums(found)


def _measure(
    subject: Subject, source: PictureSource, images: int, gamma: float, device: str
) -> dict[str, Any]:
    import torch

    from openclip_linattn.analysis.spectrum import spectra
    from openclip_linattn.zeroshot.encoders.models import choose_device

    loaded = subject.load(choose_device(device))
    batch = torch.stack([loaded.transform(picture.image) for picture in source.pictures(images)])
    heads, across = spectra(loaded.clip.visual, batch.to(loaded.device), gamma=gamma)
    return {
        "path": subject.source,
        "data": source.name,
        "images": len(batch),
        "attention": "+".join(dict.fromkeys(row["attention"] for row in heads)),
        "heads": heads,
        "sum_over_layers": across.as_dict(),
    }


def _show_layers(name: str, rows: list[dict[str, Any]]) -> None:
    show_table(
        f"{name} ({rows[0]['attention']}, {rows[0]['tokens']} tokens): means over heads and images",
        {
            "layer": word("layer"),
            "gamma": number("gamma"),
            "radius": number("radius"),
            "row sums": number("row_sum_mean"),
            "largest": number("row_sum_max"),
            "rows with\nno chain": number("rows_above_one"),
            "absorption": number("absorption_mean"),
            "Katz": number("katz_mean"),
            "token-specific\nshare": number("token_share"),
            "cosine to\nleft Perron": number("cosine_left", 4),
            "constant\nvector": number("constant_left", 4),
            "centred\ncorrelation": number("correlation_left"),
            "cosine to\nright": number("cosine_right", 4),
            "constant": number("constant_right", 4),
            "centred": number("correlation_right"),
        },
        rows,
    )


def _show_undefined(found: list[dict[str, Any]]) -> None:
    heads = [row for each in found for row in each["heads"]]
    rough = sum(row["converged"] < 1 for row in heads)
    if rough:
        typer.echo(
            f"In {rough} of {len(heads)} heads the power iteration found no Perron vector on some image; their radius "
            "is what it had reached.\n"
        )
    without = sum(min(row["compared_left"], row["compared_right"]) < 1 for row in heads)
    if without:
        typer.echo(
            f"In {without} of {len(heads)} heads ReLU(QK^T) has no Perron vector on some images, or Linear-InfSA no "
            "weights; such images are left out of the comparison.\n"
        )


def _show_sums(found: list[dict[str, Any]]) -> None:
    show_table(
        "Sum over a model's own layers against one operator for all",
        {
            "checkpoint": word("checkpoint"),
            "attention": word("attention"),
            "layers": word("layers"),
            "gamma": number("gamma"),
            "norm over\nclosed form": number("norm_ratio"),
            "difference": number("difference"),
            "cosine": number("cosine", 4),
            "difference to the\nsame many terms": number("difference_truncated"),
            "cosine to\nthem": number("cosine_truncated", 4),
            "tail left out": number("tail"),
            "token-specific\nshare": number("share"),
            "of the\nclosed form": number("share_closed"),
        },
        [{**each, **each["sum_over_layers"]} for each in found],
    )
