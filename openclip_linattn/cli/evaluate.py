"""The screen of `openclip-linattn eval`."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from openclip_linattn.errors import UserError

Row = dict[str, Any]


def evaluate_command(  # noqa: PLR0913  (the parameters are the command's options)
    checkpoints: Annotated[
        list[Path],
        typer.Argument(metavar="CHECKPOINT", help="Checkpoint file, run folder or its checkpoints folder."),
    ],
    data: Annotated[
        list[str],
        typer.Option(
            "--data",
            metavar="[KIND:]PATH",
            help="Evaluation set: a folder of class folders, a folder of tars or a brace pattern of tars. KIND "
            "(imagenet1k, imagenetv2, imagenet21k, folder) says what its classes are where that is not to be "
            "seen. May be repeated.",
        ),
    ],
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
    no_save: Annotated[
        bool, typer.Option("--no-save", help="Write no zeroshot.jsonl beside the checkpoints.")
    ] = False,
    again: Annotated[
        bool, typer.Option("--again", help="Evaluate also what has a valid row already.")
    ] = False,
) -> None:
    """Zero-shot top-1 and top-5 of checkpoints on class folders (ImageNet) and webdataset sets."""
    from openclip_linattn.zeroshot.evaluate import (  # late: --help stays quick
        EvaluationError,
        EvaluationOptions,
        evaluate,
    )

    notices = Console(stderr=True)
    try:
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
        )
        rows = evaluate(checkpoints, data, options, output=output, console=notices)
    except UserError as error:
        if isinstance(error, EvaluationError) and error.rows:
            _show(error.rows, as_json=as_json, per_class=per_class)
        notices.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from error
    _show(rows, as_json=as_json, per_class=per_class)


def _show(rows: list[Row], *, as_json: bool, per_class: bool) -> None:
    if as_json:
        typer.echo(json.dumps(rows, indent=1, allow_nan=False))
        return
    names = short_names([str(row["checkpoint"]) for row in rows])
    sets = short_names([str(row["data"]) for row in rows])
    clash = len(set(sets.values())) > len({row["dataset"] for row in rows})
    titles = [(names[row["checkpoint"]], sets[row["data"]] if clash else row["dataset"]) for row in rows]
    console = Console()
    if not console.is_terminal:  # a file or a pipe has no width to keep to
        console = Console(width=max(console.width, 160))
    console.print(_summary(rows, titles))
    if per_class:
        for row, title in zip(rows, titles, strict=True):
            console.print(_classes(row, title))


def _summary(rows: list[Row], titles: list[tuple[str, str]]) -> Table:
    sets = {data for _, data in titles}
    alone = f" on {sets.pop()}" if len(sets) == 1 else ""  # named once, it leaves room for the paths
    table = Table(title=escape(f"Zero-shot accuracy{alone}, %"), box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("checkpoint", "labels") if alone else ("checkpoint", "data", "labels"):
        table.add_column(heading, overflow="fold")
    for heading in ("images", "top-1", "top-5", "class mean"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row, title in zip(rows, titles, strict=True):
        rates = [_percent(row.get(key)) for key in ("top1", "top5", "mean_per_class")]
        labels = f"{row['label_set']} ({row['classes']})"
        cells = [*(title[:1] if alone else title), labels, str(row["n"]), *rates]
        table.add_row(*map(escape, cells))
    return table


def _classes(row: Row, title: tuple[str, str]) -> Table:
    table = Table(title=escape(", ".join((*title, row["label_set"]))), box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("class", overflow="fold")
    table.add_column("images", justify="right")
    table.add_column("top-1, %", justify="right")
    for name, images, top1 in row["per_class"]:
        table.add_row(escape(name), str(images), _percent(top1))
    return table


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f}"


def short_names(paths: list[str]) -> dict[str, str]:
    """Return for each path the fewest of its last parts that tell it from the others.

    A run's checkpoints folder, which tells nothing, is left out where the names differ without it.
    """
    parts = {path: tuple(part for part in Path(path).parts if part != "checkpoints") for path in paths}
    if len(set(parts.values())) < len(parts):
        parts = {path: Path(path).parts for path in paths}
    for length in range(1, max((len(each) for each in parts.values()), default=0) + 1):
        short = {path: "/".join(each[-length:]) for path, each in parts.items()}
        if len(set(short.values())) == len(short):
            return short
    return {path: path for path in paths}
