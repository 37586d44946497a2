"""The screen of `openclip-linattn analyze faithfulness`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from openclip_linattn.cli.analyze.options import (
    CheckpointsArgument,
    DeviceOption,
    GammaOption,
    JsonOption,
    ModelOption,
    TinyOption,
    check_out,
    names_of,
    number,
    show_json,
    show_table,
    with_interval,
    word,
)
from openclip_linattn.cli.data.progress import progress
from openclip_linattn.files import write_json

if TYPE_CHECKING:
    from openclip_linattn.analysis.faithfulness import Faithfulness, FaithfulnessOptions


def faithfulness_command(  # noqa: PLR0913  (the parameters are the command's options)
    checkpoints: CheckpointsArgument,
    data: Annotated[str, typer.Option("--data", metavar="[KIND:]PATH", help="Evaluation set as for eval.")],
    boxes: Annotated[
        Path | None,
        typer.Option(
            help="Folder of XML files in VOC's form (ImageNet's boxes), found by the images' names. Default: the "
            "bbox of a sample's json, as the drawn shapes have it."
        ),
    ] = None,
    model: ModelOption = None,
    label_set: Annotated[
        str | None, typer.Option(help="Label set with the classes. Default: the first.")
    ] = None,
    classes: Annotated[
        str | None,
        typer.Option(metavar="all|present", help="Over all classes of a layout, or those with images."),
    ] = None,
    templates: Annotated[str | None, typer.Option(help="openai80, simple7, one, or a file.")] = None,
    maps: Annotated[
        list[str] | None,
        typer.Option(
            "--map",
            help="class, received, arrivals, katz or rollout. May be repeated. Default: class, arrivals, rollout.",
        ),
    ] = None,
    layer: Annotated[int | None, typer.Option(help="Layer of the maps, from 0. Default: the last.")] = None,
    head: Annotated[int | None, typer.Option(help="Head of the maps, from 0. Default: their mean.")] = None,
    unit: Annotated[str, typer.Option(help="What is deleted: patch or pixel.")] = "patch",
    fill: Annotated[
        str, typer.Option(help="What stands there instead: mean (of training), image (its own mean) or blur.")
    ] = "mean",
    steps: Annotated[int, typer.Option(help="Deletions from the whole image to the empty one.")] = 20,
    aggregation: Annotated[
        str, typer.Option(help="Area over p / p(0) (ratio), of p(0) - p (drop), or over p (plain).")
    ] = "ratio",
    target: Annotated[
        str, typer.Option(help="Class that is followed: predicted for the whole image, or its label.")
    ] = "predicted",
    images: Annotated[int, typer.Option(help="Images, spread evenly over the set.")] = 100,
    batch_size: Annotated[int, typer.Option(help="Images per step.")] = 32,
    gamma: GammaOption = 0.95,
    seed: Annotated[int, typer.Option(help="Seed of the random control and of ties.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write rows and curves to this JSON.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw the curves to this PNG, SVG or PDF.")] = None,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
    tiny: TinyOption = False,
) -> None:
    """Whether maps show what a model looks at: deletion curves and boxes, with random and centre maps beside.

    MoRF deletes the most relevant first: a faithful map has a large area over its curve, and a small one with the least
    relevant first (LeRF). Maps are also compared with boxes. Intervals are 95 % bootstraps over images.
    """
    from openclip_linattn.analysis.faithfulness import FaithfulnessOptions  # late: --help stays quick
    from openclip_linattn.cli.evaluate.picture import check_picture

    options = FaithfulnessOptions(
        methods=tuple(dict.fromkeys(maps or ("class", "arrivals", "rollout"))),
        layer=layer,
        head=head,
        unit=unit,
        fill=fill,
        steps=4 if tiny else steps,
        aggregation=aggregation,
        target=target,
        gamma=gamma,
        images=8 if tiny else images,
        batch_size=batch_size,
        seed=seed,
    )
    check_picture(picture)
    check_out(out)
    found = _measure(
        checkpoints,
        model,
        {"source": data, "boxes": boxes, "classes": classes, "templates": templates}
        | {"label_sets": () if label_set is None else (label_set,)},
        options,
        device,
    )
    rows = [{"checkpoint": name, **row} for name, each in found.items() for row in each.rows]
    whole = {
        "rows": rows,
        "morf": {n: e.morf for n, e in found.items()},
        "lerf": {n: e.lerf for n, e in found.items()},
    }
    if out is not None:
        write_json(out, whole)
    if picture is not None:
        _draw(found, picture)
    if as_json:
        show_json(whole)
    else:
        _show(rows, options)


def _measure(
    checkpoints: list[Path],
    model: str | None,
    data: dict[str, Any],
    options: FaithfulnessOptions,
    device: str,
) -> dict[str, Faithfulness]:
    from openclip_linattn.analysis.faithfulness import faithfulness
    from openclip_linattn.analysis.images import open_pictures
    from openclip_linattn.analysis.models import trained_subjects
    from openclip_linattn.zeroshot.encoders.models import choose_device

    subjects = trained_subjects(checkpoints, model)
    source = open_pictures(**data)
    names = names_of(subjects)
    with progress("deletion", len(subjects) * min(options.images, source.count)) as advance:
        return {
            names[subject.source]: faithfulness(subject.load(choose_device(device)), source, options, advance)
            for subject in subjects
        }


def _draw(found: dict[str, Faithfulness], path: Path) -> None:
    from openclip_linattn.analysis.deletion_picture import deletion_figure
    from openclip_scaling.pictures.plot import save_figure

    save_figure(deletion_figure(found), path)


def _show(rows: list[dict[str, Any]], options: FaithfulnessOptions) -> None:
    show_table(
        f"Area over deletion curves ({options.unit}, fill {options.fill}, {options.steps} steps, "
        f"{options.aggregation}, {options.target} class)",
        {
            "checkpoint": word("checkpoint"),
            "map": word("map"),
            "images": word("images"),
            "MoRF": with_interval("morf"),
            "LeRF": with_interval("lerf"),
            "MoRF - LeRF": with_interval("gap"),
            "MoRF above random": with_interval("above_random"),
            "above centre": with_interval("above_centre"),
        },
        rows,
    )
    if not any(row["images_with_boxes"] for row in rows):
        return
    show_table(
        "Maps against boxes",
        {
            "checkpoint": word("checkpoint"),
            "map": word("map"),
            "images": word("images_with_boxes"),
            "ROC-AUC": with_interval("roc_auc"),
            "PR-AUC": with_interval("pr_auc"),
            "area of boxes (PR-AUC by chance)": number("box_area"),
        },
        rows,
    )
