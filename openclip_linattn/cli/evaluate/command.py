"""The command `openclip-linattn eval`: its options, what it does with them, and how it ends."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from openclip_linattn.cli.evaluate.picture import check_picture, draw_curves
from openclip_linattn.cli.evaluate.screen import check_pairs, show_pairs, show_rows
from openclip_linattn.errors import UserError


def evaluate_command(  # noqa: PLR0913  (the parameters are the command's options)
    checkpoints: Annotated[
        list[Path],
        typer.Argument(metavar="CHECKPOINT", help="Checkpoint file, run folder or its checkpoints folder."),
    ],
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            metavar="[KIND:]PATH",
            help="Evaluation set: a folder of class folders, a folder of tars, a brace pattern of tars, or a captions "
            "file (COCO, Karpathy, Flickr) for retrieval. KIND (imagenet1k, imagenetv2, imagenet21k, folder, "
            "retrieval) says what it is where that is not to be seen. May be repeated.",
        ),
    ] = None,
    images: Annotated[Path | None, typer.Option(help="Folder of the images of a captions file.")] = None,
    benchmark: Annotated[
        list[str] | None,
        typer.Option(
            "--benchmark", metavar="NAME", help="Set or collection of clip_benchmark. May be repeated."
        ),
    ] = None,
    benchmark_root: Annotated[
        str | None,
        typer.Option(
            "--benchmark-root",
            help="Where clip_benchmark's data lies; {dataset} in it stands for a set's name.",
        ),
    ] = None,
    probe: Annotated[
        str | None,
        typer.Option(
            "--probe", metavar="[KIND:]TRAIN", help="Train a linear probe on this set and test it on --data."
        ),
    ] = None,
    shots: Annotated[int | None, typer.Option(help="Training images per class of the probe.")] = None,
    image_size: Annotated[
        str | None,
        typer.Option(
            "--image-size", metavar="PX,...", help="Evaluate at these sizes, not at that of training."
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model name; default: what the run recorded in run.json or params.txt.")
    ] = None,
    label_set: Annotated[
        list[str] | None, typer.Option("--label-set", help="Evaluate only this label set. May be repeated.")
    ] = None,
    classes: Annotated[
        str | None,
        typer.Option(metavar="all|present", help="Over all classes of a layout, or over those with images."),
    ] = None,
    classnames: Annotated[
        Path | None, typer.Option(help="Class names, one per line by class index, or FOLDER<TAB>NAME.")
    ] = None,
    templates: Annotated[
        str | None, typer.Option(help="openai80, simple7, one, or a file: one per line, with {c} or {}.")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Images per step.")] = 64,
    workers: Annotated[int | None, typer.Option(help="Processes that decode images.")] = None,
    precision: Annotated[
        str, typer.Option(help="fp32, amp, amp_bf16, bf16, fp16, pure_bf16, pure_fp16.")
    ] = "fp32",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write all rows to this JSON file.")
    ] = None,
    per_class: Annotated[bool, typer.Option("--per-class", help="Print top-1 of every class too.")] = False,
    paired: Annotated[
        bool,
        typer.Option("--paired", help="Compare every two checkpoints on --data, by image (McNemar's test)."),
    ] = False,
    against: Annotated[
        Path | None, typer.Option(help="Compare the checkpoints image by image with this one only.")
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(help="Draw top-1 against samples seen and image sizes to this PNG, SVG or PDF."),
    ] = None,
    no_save: Annotated[
        bool, typer.Option("--no-save", help="Write no rows and predictions beside the checkpoints.")
    ] = False,
    again: Annotated[
        bool, typer.Option("--again", help="Evaluate also what has a valid row already.")
    ] = False,
) -> None:
    """Accuracy of checkpoints: zero-shot, retrieval, linear probe, and sets of clip_benchmark.

    Under torchrun (`torchrun --nproc_per_node 2 -m -- openclip_linattn.cli eval ...`) the images are dealt out.
    """
    # Late: --help stays quick.
    from openclip_linattn.zeroshot.evaluate import EvaluationError, EvaluationOptions, evaluate
    from openclip_linattn.zeroshot.processes import first_process
    from openclip_linattn.zeroshot.results.answers import AnswerBook

    notices = Console(stderr=True, quiet=not first_process())
    failures: list[UserError] = []
    with _noted(failures):
        options = EvaluationOptions(
            model=model,
            label_sets=tuple(label_set or ()),
            classes=classes,
            classnames=classnames,
            templates=templates,
            batch_size=batch_size,
            workers=workers,
            precision=precision,
            device=device,
            save=not no_save,
            again=again,
            images=images,
            benchmarks=tuple(benchmark or ()),
            benchmark_root=benchmark_root,
            probe=probe,
            shots=shots,
            image_sizes=_sizes(image_size),
        )
        wanted = paired or against is not None
        if wanted:
            check_pairs(checkpoints, model, against=against)
        check_picture(picture)
        answers = AnswerBook()
        try:
            rows = evaluate(checkpoints, data or (), options, output=output, console=notices, answers=answers)
        except EvaluationError as error:
            rows = error.rows
            failures.append(error)
        if first_process() and rows:
            show_rows(rows, as_json=as_json, per_class=per_class)
            with _noted(failures):
                # JSON stands alone on the standard output.
                show_pairs(rows, answers, notices if as_json else Console(), wanted=wanted, against=against)
            with _noted(failures):
                draw_curves(rows, picture)
    for failure in failures:
        notices.print(f"error: {failure}", style="red", markup=False, highlight=False, soft_wrap=True)
    if failures:
        raise typer.Exit(2) from failures[0]


@contextmanager
def _noted(failures: list[UserError]) -> Iterator[None]:
    """Add to `failures` the UserError that ends the block."""
    try:
        yield
    except UserError as error:
        failures.append(error)


def _sizes(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise UserError(f"--image-size is {text!r}; give whole numbers of pixels, such as 224,336") from error
