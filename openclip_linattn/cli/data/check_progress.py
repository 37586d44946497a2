"""The progress bar of `openclip-linattn data check`: shards, samples a second, losses so far."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from openclip_linattn.data.checks.shard_report import ShardReport


@contextmanager
def check_progress(shards: int) -> Iterator[Callable[[ShardReport, bool], None]]:
    """A bar on standard error that moves on with each report, gone when done, and only where a terminal is."""
    console = Console(stderr=True)
    columns = (
        BarColumn(bar_width=10),  # all of it fits into 80 columns
        MofNCompleteColumn(),
        TextColumn("shards, {task.fields[counts]}"),
        TimeRemainingColumn(),
    )
    counts = Counts()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=shards, counts=counts.text())

        def watch(report: ShardReport, kept: bool) -> None:
            counts.add(report, kept)
            bar.update(task, advance=1, counts=counts.text())

        yield watch


class Counts:
    """Samples so far, those of them that are lost, and how many were read in a second."""

    def __init__(self) -> None:
        self.start = time.monotonic()
        self.samples = 0
        self.lost = 0
        self.read = 0

    def add(self, report: ShardReport, kept: bool) -> None:
        """Take a shard's report; one that was `kept` took no reading, which begins after the last of them."""
        if kept:
            self.start = time.monotonic()
        else:
            self.read += report.samples
        self.samples += report.samples
        self.lost += report.samples - report.usable

    def text(self) -> str:
        """The counts in words."""
        rate = self.read / max(time.monotonic() - self.start, 1e-3)
        share = f" ({100 * self.lost / self.samples:.2g} %)" if self.lost else ""
        return f"{self.samples:,} samples, {rate:,.0f}/s, {self.lost:,} lost{share}"
