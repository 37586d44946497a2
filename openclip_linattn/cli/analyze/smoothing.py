"""The screen of `openclip-linattn analyze smoothing`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from openclip_linattn.cli.analyze.options import (
    DeviceOption,
    JsonOption,
    ModelOption,
    TinyOption,
    check_out,
    names_of,
    number,
    show_json,
    show_table,
    word,
)
from openclip_linattn.cli.bench_options import numbers
from openclip_linattn.cli.data.progress import progress
from openclip_linattn.files import write_json

RANDOM_MODELS = "ViT-T64-8-"
TOKENS = "64,256,1024,4096,16384"


def smoothing_command(  # noqa: PLR0913  (the parameters are the command's options)
    checkpoints: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[CHECKPOINT]...", help="Checkpoint file, or a run folder for its newest epoch."
        ),
    ] = None,
    random: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Model with random weights; NAME* is all that begin so. May be repeated. Default without any "
            "checkpoint: every kind of ViT-T64-8.",
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="Evaluation set, image or folder of images. Default: shapes drawn at each size."),
    ] = None,
    model: ModelOption = None,
    tokens: Annotated[str, typer.Option(help="Numbers of patches; the class token comes on top.")] = TOKENS,
    images: Annotated[int, typer.Option(help="Images.")] = 1,
    rows: Annotated[int, typer.Option(help="Queries drawn in every layer and head.")] = 8,
    out: Annotated[Path | None, typer.Option(help="Write everything, per layer, to this JSON.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw the measures to this PNG, SVG or PDF.")] = None,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
    tiny: TinyOption = False,
) -> None:
    """Entropy, contrast and gradient of attention weights against the number of tokens.

    Rows of weights are sampled and differentiated one by one, so that no N x N matrix is held at any size. Softmax and
    infsa towers take O(N^2) time all the same.
    """
    from openclip_linattn.analysis.images import open_pictures  # late: --help stays quick
    from openclip_linattn.analysis.models import random_subjects, trained_subjects
    from openclip_linattn.analysis.token_counts import SmoothingOptions, smoothing_of
    from openclip_linattn.cli.evaluate.picture import check_picture
    from openclip_linattn.zeroshot.encoders.models import choose_device

    options = SmoothingOptions(
        [16, 64] if tiny else numbers(tokens, "--tokens"), images=images, rows=2 if tiny else rows
    )
    check_picture(picture)
    check_out(out)
    subjects = trained_subjects(checkpoints, model) if checkpoints else []
    subjects += random_subjects(random or ([] if checkpoints else _every_kind()))
    source = None if data is None else open_pictures(data)
    names = names_of(subjects)
    found: list[dict[str, Any]] = []
    with progress("smoothing", len(subjects) * len(set(options.patches))) as advance:
        for subject in subjects:
            measured = smoothing_of(subject, source, options, choose_device(device), advance)
            found += [{"model": names[subject.source], **row} for row in measured]
    if out is not None:
        write_json(out, found)
    if picture is not None:
        _draw(found, picture)
    if as_json:
        show_json(found)
    else:
        _show(found)


def _every_kind() -> list[str]:
    from openclip_linattn.ops import OPERATORS

    return [f"{RANDOM_MODELS}{kind}" for kind in OPERATORS]


def _draw(found: list[dict[str, Any]], path: Path) -> None:
    from openclip_linattn.analysis.smoothing_picture import smoothing_figure
    from openclip_scaling.pictures.plot import save_figure

    save_figure(smoothing_figure(found), path)


def _show(found: list[dict[str, Any]]) -> None:
    show_table(
        "Attention weights, means over layers, heads, images and sampled queries",
        {
            "model": word("model"),
            "attention": word("attention"),
            "weights": lambda row: "trained" if row["trained"] else "random",
            "tokens": word("tokens"),
            "entropy (nats)": number("entropy", 4),
            "entropy / log N": number("evenness", 4),
            "largest / mean": number("contrast", 4),
            "|dw/dq|": number("gradient"),
            "|dw/dq| |q|/|w|": number("relative_gradient"),
            "rows without weight": number("empty", 2),
        },
        found,
    )
