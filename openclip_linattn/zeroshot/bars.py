"""Progress bars of an evaluation, gone when it is done, and only where a terminal is."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from openclip_linattn.zeroshot.watching import Advance


def progress_bars(console: Console | None) -> Progress:
    """Return bars on `console`; None is silent."""
    console = console or Console(stderr=True, quiet=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


@contextmanager
def watch_on(progress: Progress, title: str, total: int) -> Iterator[Advance]:
    """Show a part of the work as a bar of its own; with the first argument given, this is a `Watch`."""
    task = progress.add_task(title, total=total)
    try:
        yield lambda done: progress.advance(task, done)
    finally:
        progress.remove_task(task)
