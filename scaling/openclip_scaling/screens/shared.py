"""What the commands share: reading their sources, and writing tables, notices and JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from openclip_scaling.errors import UserError
from openclip_scaling.fitting.analysis import Analysis, analyse
from openclip_scaling.fitting.settings import Settings
from openclip_scaling.reading.runs import Collection, collect, load
from openclip_scaling.reporting.as_json import json_ready

Sources = Annotated[
    list[Path], typer.Argument(help="A CSV table, or run folders, or folders that hold runs.")
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on stdout, and nothing else there.")]
_WIDE = 160  # columns where stdout is not a terminal


def read(sources: Sequence[Path]) -> Collection:
    """The runs of one CSV table or of any number of folders."""
    for source in sources:
        if not source.exists():
            raise UserError(
                f"{source} does not exist; give a CSV table, run folders or a folder that holds them."
            )
    files = [source for source in sources if source.is_file()]
    if not files:
        return collect(sources)
    if len(sources) > 1:
        raise UserError("Give one CSV table, or any number of run folders, but not both.")
    return load(files[0])


def analysed(collection: Collection, settings: Settings) -> Analysis:
    """The fits of a collection, with a word on stderr about where they are."""
    with stderr().status("fitting") as status:
        return analyse(collection.checkpoints, settings, lambda text: status.update(f"fitting {text}"))


def table_of(
    title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], caption: str | None = None
) -> Table:
    """A table for the terminal; the caption says what its heads mean."""
    table = Table(title=title, caption=caption, caption_justify="left")
    for head in heads:
        table.add_column(head, overflow="fold")  # a formula that is cut off says nothing
    for row in rows:
        table.add_row(*row)
    return table


def stdout() -> Console:
    """A console for results."""
    # Names of runs and metrics may hold brackets, which are not markup.
    console = Console(markup=False, highlight=False, emoji=False)
    return (
        console if console.is_terminal else Console(markup=False, highlight=False, emoji=False, width=_WIDE)
    )


def stderr() -> Console:
    """A console for everything else."""
    return Console(stderr=True, markup=False, highlight=False, emoji=False)


def print_notices(notices: Sequence[str]) -> None:
    """Every notice once, on stderr."""
    for notice in dict.fromkeys(notices):
        stderr().print(f"Note: {notice}", soft_wrap=True)


def print_json(value: Any) -> None:
    """Strict JSON on stdout."""
    sys.stdout.write(json.dumps(json_ready(value), indent=1, allow_nan=False) + "\n")
