"""Options that the screens of `openclip-linattn analyze` share, and how they show numbers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from openclip_linattn.errors import UserError

if TYPE_CHECKING:
    from openclip_linattn.analysis.models import Subject

Cell = Callable[[Mapping[str, Any]], str]

CheckpointsArgument = Annotated[
    list[Path],
    typer.Argument(metavar="CHECKPOINT", help="Checkpoint file, or a run folder for its newest epoch."),
]
ModelOption = Annotated[
    str | None, typer.Option(help="Model name; default: what the run recorded in run.json or params.txt.")
]
DataOption = Annotated[
    str,
    typer.Option(
        "--data", metavar="[KIND:]PATH", help="Evaluation set as for eval, an image or a folder of images."
    ),
]
GammaOption = Annotated[
    float, typer.Option(help="Discount of a further hop, for kinds that have no rho or gamma of their own.")
]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
TinyOption = Annotated[bool, typer.Option("--tiny", help="A smoke form of a few seconds.")]


def names_of(subjects: Sequence[Subject]) -> dict[str, str]:
    """The fewest last parts of each subject's path that tell it from the others; a run alone has its folder's name."""
    from openclip_linattn.cli.evaluate.titles import short_names

    names = {}
    for each in subjects:
        run = None if each.checkpoint is None else each.checkpoint.run
        names[each.source] = each.source if run is None else str(run)
    if len(set(names.values())) < len(names):
        return short_names(names)
    short = short_names(names.values())
    return {source: short[path] for source, path in names.items()}


def check_out(path: Path | None) -> None:
    """Raise UserError where no file could be written to `path`, before anything is measured."""
    from openclip_linattn.zeroshot.results.rows import check_writable

    if path is not None:
        check_writable(path)


def check_folder(path: Path) -> None:
    """Raise UserError where no folder could be made at `path`, before anything is measured."""
    above = next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise UserError(f"--out {path}: {above} is no folder that you may write into; name another place")


def check_count(name: str, value: int) -> None:
    """Raise UserError where a number of images or rows is not at least 1."""
    if value < 1:
        raise UserError(f"{name} is {value}; it must be at least 1")


def number(key: str, digits: int = 3) -> Cell:
    """A cell with the number under `key`, to so many significant digits."""
    return lambda row: "-" if row.get(key) is None else f"{row[key]:.{digits}g}"


def with_interval(key: str) -> Cell:
    """A cell with the number under `key` and its interval: three decimals, or two digits where these would be zeros."""

    def cell(row: Mapping[str, Any]) -> str:
        if row.get(key) is None:
            return "-"
        bounds = row.get(f"{key}_interval") or []
        form = ".3f" if max(map(abs, (row[key], *bounds))) >= 0.01 else ".2g"
        return f"{row[key]:{form}}" + (f" [{bounds[0]:{form}}, {bounds[1]:{form}}]" if bounds else "")

    return cell


def word(key: str) -> Cell:
    """A cell with what stands under `key`."""
    return lambda row: str(row.get(key, "-"))


def show_table(title: str, columns: Mapping[str, Cell], rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the rows as a table on the standard output."""
    table = Table(title=escape(title), box=SIMPLE_HEAD, pad_edge=False)
    for index, heading in enumerate(columns):
        table.add_column(heading, justify="left" if index == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*(escape(cell(row)) for cell in columns.values()))
    console = Console()
    if not console.is_terminal:  # a file or a pipe has no width to keep to
        console = Console(width=max(console.width, 180))
    console.print(table)


def show_json(value: Any) -> None:
    """Print a value as JSON, alone on the standard output."""
    typer.echo(json.dumps(value, indent=1, allow_nan=False))
