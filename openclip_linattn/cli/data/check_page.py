"""What `openclip-linattn data check` prints: a table of shards and losses, and sentences on what they mean."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from openclip_linattn.data.checks.dataset_report import DatasetReport
from openclip_linattn.data.checks.shard_report import ShardReport

MAX_ROWS = 40
_STYLES = {"error": "bold red", "warning": "yellow"}


def print_report(report: DatasetReport) -> None:
    """Print the table and the sentences to standard output; of a large set the shards with a loss only."""
    console = Console(width=None if Console().is_terminal else 120)
    shown = report.shards
    if len(shown) > MAX_ROWS:
        shown = [shard for shard in shown if shard.fault or shard.usable < shard.samples]
    console.print(_table(report, shown[:MAX_ROWS]))
    if len(report.shards) > MAX_ROWS:
        more = f"; the first {MAX_ROWS} of {len(shown):,}" if len(shown) > MAX_ROWS else ""
        note = f"Only shards with a loss or a fault are listed{more}. A report (--report FILE.json) has all."
        console.print(note, soft_wrap=True, highlight=False)
    for problem in report.problems:
        mark = f"[{_STYLES[problem.severity]}]{problem.severity}[/]"
        console.print(f"{mark}: {escape(problem.text)}", soft_wrap=True, highlight=False)
    if not report.problems:
        console.print("No problems found.")


def _table(report: DatasetReport, shown: Sequence[ShardReport]) -> Table:
    """A row for each shard of `shown`, the total last."""
    reasons = sorted(report.lost, key=lambda reason: -report.lost[reason])
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


def _row(shard: ShardReport, reasons: Sequence[str]) -> list[str]:
    counts = [shard.samples, shard.usable, *(shard.lost.get(reason, 0) for reason in reasons)]
    return [escape(shard.name), *(f"{count:,}" for count in (*counts, shard.empty_captions))]
