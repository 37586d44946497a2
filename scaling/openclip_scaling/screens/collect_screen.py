"""The command `openclip-scaling collect`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from openclip_scaling.errors import UserError
from openclip_scaling.reading.runs import Collection, collect, grouped, joined, save
from openclip_scaling.reading.study import read_study
from openclip_scaling.reporting.as_json import records
from openclip_scaling.screens.shared import AsJson, print_json, print_notices, stderr, stdout

_HEADS = {
    "run": "run", "model": "model", "attention": "attention", "gmac_per_pair": "GMAC/pair",
    "batch": "batch", "epoch": "epochs", "samples_seen": "samples", "train_flop": "training FLOP",
    "gpu_hours": "GPU-hours", "train_loss": "train loss", "val_loss": "val loss", "diverged": "diverged",
}  # fmt: skip
_SHOWN = 100  # runs in the table on the terminal


def collect_command(
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Run folders, wandb's folders, or folders that hold them.")
    ] = None,
    csv: Annotated[Path | None, typer.Option("--csv", help="A table of published results.")] = None,
    columns: Annotated[
        Path | None,
        typer.Option("--columns", help="YAML: what the columns of --csv are, as in `samples_seen: samples`."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="CSV file for the checkpoints.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Read run folders, or a published table, into one table of checkpoints; runs, curves and notices beside it."""
    if output is not None and output.resolve() in {path.resolve() for path in (csv, columns) if path}:
        raise UserError(f"{output} is an input; give --output another name.")
    collection = _collected(runs or [], csv, columns)
    files = save(collection, output) if output else []
    if as_json:
        print_json(
            {
                "checkpoints": records(collection.checkpoints),
                "runs": records(collection.runs),
                "notices": [{"run": notice.run, "text": notice.text} for notice in collection.notices],
                "files": [str(path) for path in files],
            }
        )
    else:
        stdout().print(_runs_table(collection))
    print_notices(grouped(collection.notices))


def _collected(runs: list[Path], csv: Path | None, columns: Path | None) -> Collection:
    if (csv is None) != (columns is None):
        raise UserError(
            "--csv and --columns go together: a table, and the YAML file that says what its columns are."
        )
    if csv is None or columns is None:
        if not runs:
            raise UserError("Give run folders, or a table with --csv and --columns.")
        return _read(runs)
    study = read_study(csv, columns)
    return joined(_read(runs), study) if runs else study


def _read(runs: list[Path]) -> Collection:
    columns = (TextColumn("reading runs"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = stderr()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("runs", total=None)
        return collect(runs, lambda done, total: bar.update(task, completed=done, total=total))


def _runs_table(collection: Collection) -> Table:
    count = len(collection.runs)
    caption = (
        f"the first {_SHOWN} of {count} runs; --output writes all, --json prints all"
        if count > _SHOWN
        else None
    )
    table = Table(title=f"{len(collection.checkpoints)} checkpoints of {count} runs", caption=caption)
    for name in _HEADS.values():
        table.add_column(name)
    for row in records(collection.runs.head(_SHOWN)):
        table.add_row(*(_short(row.get(column)) for column in _HEADS))
    return table


def _short(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if value.is_integer() and abs(value) < 1e9 else f"{value:.4g}"
    return str(value)
