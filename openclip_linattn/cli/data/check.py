"""`openclip-linattn data check`: what of a source can be trained on, what is lost and why."""

from __future__ import annotations

import json
import os
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from openclip_linattn.cli.data.progress import progress
from openclip_linattn.data.check import DatasetReport
from openclip_linattn.data.check import check as check_source
from openclip_linattn.data.shard_report import ShardReport
from openclip_linattn.data.sizes import write_sizes
from openclip_linattn.data.sources import expand

MAX_ROWS = 40


def check_command(
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
        with progress("Checking", min(total, sample_shards or total)) as advance:
            report = check_source(
                source,
                sample_shards=sample_shards,
                workers=_workers(total) if workers is None else workers,
                allow_missing=allow_missing,
                progress=advance,
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
