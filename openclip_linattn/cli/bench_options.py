"""Options and the progress line that the screens of `openclip-linattn bench` share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from openclip_linattn.errors import UserError

OUT = Path("bench")

OutOption = Annotated[Path, typer.Option(help="Folder for what is measured.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
TinyOption = Annotated[bool, typer.Option("--tiny", help="A smoke form of a few seconds.")]


def numbers(text: str, option: str) -> list[int]:
    """The whole numbers of a list such as 64,197; raises UserError for anything else."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise UserError(f"{option} must be whole numbers with commas between them, got {text!r}") from error


@contextmanager
def spinner() -> Iterator[Callable[[str], None]]:
    """What runs now, on standard error, gone when done, and only where a terminal is."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda text: bar.update(task, description=text)
