"""`openclip-linattn data flags`: sources of shards as OpenCLIP's flags."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from openclip_linattn.data.training.flags import DataFlags, Loaders, data_flags
from openclip_linattn.data.training.weights import factors_for, look_at
from openclip_linattn.errors import UserError


def flags_command(  # noqa: PLR0913 - one argument for each option
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE...", help="Folders, patterns, URLs, lists of sources, pipe: commands."
        ),
    ],
    factors: Annotated[
        str | None,
        typer.Option(help="Weights of single samples by source: 2,1 draws the first's twice as often."),
    ] = None,
    shares: Annotated[
        str | None, typer.Option(help="Per cent of the drawn samples that each source makes: 70,30.")
    ] = None,
    num_samples: Annotated[
        int | None, typer.Option(min=1, help="Samples of an epoch (default: all that there are).")
    ] = None,
    processes: Annotated[
        int, typer.Option(min=1, help="Processes of the training, one for each device.")
    ] = 1,
    max_workers: Annotated[int, typer.Option(min=1, help="Most data-loader workers of a process.")] = 8,
    resampled: Annotated[bool, typer.Option("--resampled", help="Draw shards with replacement.")] = False,
    stock: Annotated[
        bool, typer.Option("--stock", help="For OpenCLIP's own entrypoint: commands for what it cannot open.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the flags.")] = False,
) -> None:
    """Print OpenCLIP's flags for sources of shards, as one line to paste into a shell.

    A table and notes go to standard error. Sample counts come from the sizes.json that `data check` writes.
    """
    if factors is not None and shares is not None:
        raise UserError("--factors and --shares say the same in two ways: give one of them.")
    found = [look_at(source) for source in sources]
    if shares is not None:
        weights: list[float] | None = factors_for(found, _numbers("--shares", shares))
    else:
        weights = None if factors is None else _numbers("--factors", factors)
    flags = data_flags(
        found,
        Loaders(processes, max_workers),
        factors=weights,
        resampled=resampled,
        num_samples=num_samples,
        stock=stock,
    )
    if as_json:
        typer.echo(json.dumps(flags.to_json(), indent=2, allow_nan=False))
        return
    _explain(flags)
    typer.echo(flags.line)


def _numbers(option: str, text: str) -> list[float]:
    try:
        return [float(number) for number in text.split(",")]
    except ValueError as error:
        raise UserError(f"{option} takes numbers with commas between, such as 2,1, not {text!r}.") from error


def _explain(flags: DataFlags) -> None:
    console = Console(stderr=True)
    if not console.is_terminal:
        console = Console(stderr=True, width=120)
    console.print(_table(flags))
    for note in flags.notes:
        console.print(escape(note), soft_wrap=True, highlight=False)


def _table(flags: DataFlags) -> Table:
    table = Table(title=f"{flags.num_samples:,} samples an epoch", title_justify="left")
    table.add_column("source", overflow="fold")
    headings = ("shards", "samples", "per shard", "factor", "share of draws", "times seen")
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in flags.sources:
        samples, seen = row.source.samples, row.times_seen(flags.num_samples)
        table.add_row(
            escape(row.source.name),
            f"{row.source.shards:,}",
            "unknown" if samples is None else f"{samples:,}",
            "" if samples is None else f"{samples / row.source.shards:,.1f}",
            f"{row.factor:g}" if flags.resampled else "",
            "" if row.share is None else f"{100 * row.share:.4g} %",
            "" if seen is None else f"{seen:.4g}",
        )
    return table
