"""The screens of `openclip-linattn data`: write captioned sets, and check shards before training."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from openclip_linattn.data.build import BuildResult
from openclip_linattn.data.check import DatasetReport
from openclip_linattn.data.check import check as check_source
from openclip_linattn.data.digits import sample_count as digits_count
from openclip_linattn.data.digits import write_digits
from openclip_linattn.data.shapes import write_shapes
from openclip_linattn.data.shard_report import ShardReport
from openclip_linattn.data.sizes import write_sizes
from openclip_linattn.data.sources import expand

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Write captioned sets of shards, and check shards before training.",
)

GRID = "samples.png"
MAX_ROWS = 40

OutArgument = Annotated[Path, typer.Argument(metavar="OUT", help="Folder; it may hold the same set.")]
SeedOption = Annotated[int, typer.Option(help="The same seed gives the same set, byte for byte.")]
SizeOption = Annotated[int, typer.Option(help="Side of the square images, in pixels.")]
ShardOption = Annotated[int, typer.Option(help="Samples in each tar.")]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace another set in OUT.")]


@contextmanager
def _progress(title: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A bar on standard error, gone when done, and only where a terminal is."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=total)
        yield lambda done: bar.advance(task, done)


def _finish(result: BuildResult, source: Path, grid: bool) -> None:
    picture = result.folder / GRID
    if grid and not (result.already_complete and picture.exists()):
        from openclip_linattn.data.grid import sample_grid  # matplotlib is slow to import

        sample_grid(str(source), picture)
    if result.already_complete:
        typer.echo(f"{result.folder} already holds this set, complete: {result.samples:,} samples.")
        return
    found = f", {result.found} found" if result.found else ""
    written = f"{result.written} shard{'' if result.written == 1 else 's'} written"
    typer.echo(f"{result.folder}: {result.samples:,} samples; {written}{found}.")


@app.command()
def shapes(
    out: OutArgument,
    samples: Annotated[int, typer.Option(help="Training samples.")],
    test_samples: Annotated[int, typer.Option(help="Held-out samples, in OUT/test.")] = 0,
    seed: SeedOption = 0,
    image_size: SizeOption = 64,
    samples_per_shard: ShardOption = 1000,
    overwrite: OverwriteOption = False,
) -> None:
    """Draw a captioned set of colored shapes: training shards in OUT, an evaluation set in OUT/test.

    A set that is complete is left alone, a partial one is completed, and one with fewer samples is extended.
    """
    with _progress("Drawing", samples + test_samples) as progress:
        result = write_shapes(
            out,
            samples,
            test_samples=test_samples,
            seed=seed,
            image_size=image_size,
            samples_per_shard=samples_per_shard,
            overwrite=overwrite,
            progress=progress,
        )
        _finish(result, out, grid=True)


@app.command()
def digits(
    out: OutArgument,
    repeat: Annotated[int, typer.Option(help="Times that each training image is written.")] = 1,
    seed: SeedOption = 0,
    image_size: SizeOption = 64,
    samples_per_shard: ShardOption = 200,
    overwrite: OverwriteOption = False,
) -> None:
    """Write scikit-learn's handwritten digits with captions: OUT/train, and an evaluation set in OUT/test."""
    with _progress("Writing", digits_count(repeat)) as progress:
        result = write_digits(
            out,
            seed=seed,
            image_size=image_size,
            repeat=repeat,
            samples_per_shard=samples_per_shard,
            overwrite=overwrite,
            progress=progress,
        )
        _finish(result, out / "train", grid=True)


@app.command()
def check(
    sources: Annotated[
        list[str], typer.Argument(metavar="SOURCE...", help="Folders, shards, patterns or pipe: commands.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    workers: Annotated[
        int | None, typer.Option(help="Processes that share the work (default: by the number of shards).")
    ] = None,
    sample_shards: Annotated[
        int | None, typer.Option(help="Check only so many shards: first, last and evenly between.")
    ] = None,
    no_write: Annotated[bool, typer.Option("--no-write", help="Do not write sizes.json.")] = False,
    allow_missing: Annotated[
        bool, typer.Option("--allow-missing", help="Leave out shards that do not exist, and list them.")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with status 1 for warnings too.")] = False,
) -> None:
    """Read shards as OpenCLIP does: what can be trained on, what is lost and why.

    Writes the usable samples of each shard into the folder's sizes.json, which OpenCLIP reads.

    Exit status 0: training can run (warnings tell what is lost).
    Exit status 1: it would hang or fail (errors).
    Exit status 2: the source cannot be read as it is written.
    """
    reports = []
    for source in sources:
        total = len(expand(source, allow_missing=allow_missing))
        with _progress("Checking", min(total, sample_shards or total)) as progress:
            report = check_source(
                source,
                sample_shards=sample_shards,
                workers=_workers(total) if workers is None else workers,
                allow_missing=allow_missing,
                progress=progress,
            )
        reports.append((report, [] if no_write else write_sizes(report)))
    if as_json:
        content = [{**report.to_json(), "unwritten": lines} for report, lines in reports]
        typer.echo(json.dumps(content, indent=2, allow_nan=False))
    else:
        for report, lines in reports:
            _print_report(report, lines)
    bad = any(report.errors or (strict and report.warnings) for report, _ in reports)
    raise typer.Exit(1 if bad else 0)


def _workers(shards: int) -> int:
    # A process takes seconds to start, which a few shards do not repay.
    return min(4, os.cpu_count() or 1) if shards > MAX_ROWS else 1


def _print_report(report: DatasetReport, unwritten: list[str]) -> None:
    console = Console(width=None if Console().is_terminal else 120)
    console.print(_table(report))
    styles = {"error": "bold red", "warning": "yellow"}
    for problem in report.problems:
        mark = f"[{styles[problem.severity]}]{problem.severity}[/]"
        console.print(f"{mark}: {escape(problem.text)}", soft_wrap=True, highlight=False)
    for line in unwritten:
        console.print(f"[yellow]warning[/]: {escape(line)}", soft_wrap=True, highlight=False)
    if not report.problems:
        console.print("No problems found.")


def _table(report: DatasetReport) -> Table:
    """A row for each shard, or in a large set for each shard with a loss; the total last."""
    reasons = sorted(report.lost, key=lambda reason: -report.lost[reason])
    shown = report.shards
    if len(shown) > MAX_ROWS:
        shown = [shard for shard in shown if shard.fault or shard.usable < shard.samples][:MAX_ROWS]
    table = Table(title=escape(report.source), title_justify="left", show_footer=True)
    checked = f"{len(report.shards):,} of {report.total_shards:,} shards"
    table.add_column("shard", footer=checked, overflow="fold")
    for heading, total in (("samples", report.samples), ("usable", report.usable)):
        table.add_column(heading, justify="right", footer=f"{total:,}")
    for reason in reasons:
        table.add_column(reason, justify="right", footer=f"{report.lost[reason]:,}")
    table.add_column("empty caption", justify="right", footer=f"{report.empty_captions:,}")
    for shard in shown:
        table.add_row(*_row(shard, reasons))
    return table


def _row(shard: ShardReport, reasons: list[str]) -> list[str]:
    counts = [shard.samples, shard.usable, *(shard.lost.get(reason, 0) for reason in reasons)]
    return [escape(shard.name), *(f"{count:,}" for count in (*counts, shard.empty_captions))]
