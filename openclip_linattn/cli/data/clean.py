"""`openclip-linattn data clean`: usable samples into new shards, with an account of the others."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from openclip_linattn.cli.data.progress import progress
from openclip_linattn.data.checks.problems import percent
from openclip_linattn.data.clean.run import Cleaned, clean
from openclip_linattn.data.clean.settings import Settings
from openclip_linattn.data.clean.workers import Unfinished
from openclip_linattn.data.shard_pool import available_cores
from openclip_linattn.termination import Terminated

MAX_FAULTS = 10


def clean_command(  # noqa: PLR0913 - one argument for each flag
    source: Annotated[str, typer.Argument(metavar="SRC", help="Folder, pattern, pipe: or URL of shards.")],
    out: Annotated[
        Path, typer.Argument(metavar="DST", help="Folder for the new shards; new, or begun before.")
    ],
    workers: Annotated[
        int | None, typer.Option(help="Processes that share the work (default: one for each CPU core).")
    ] = None,
    samples_per_shard: Annotated[int, typer.Option(help="Most samples in a new shard.")] = 10_000,
    resize: Annotated[
        int | None, typer.Option(help="Shrink images whose shorter side is longer than this, in pixels.")
    ] = None,
    drop_nsfw: Annotated[
        str | None, typer.Option(metavar="LIST", help="Values of the json's NSFW to drop, as in NSFW,UNSURE.")
    ] = None,
    min_similarity: Annotated[float | None, typer.Option(help="Least similarity in the json.")] = None,
    min_side: Annotated[int | None, typer.Option(help="Least shorter side of the image, in pixels.")] = None,
    min_caption: Annotated[int | None, typer.Option(help="Fewest characters in a caption.")] = None,
    max_caption: Annotated[int | None, typer.Option(help="Most characters in a caption.")] = None,
    max_aspect: Annotated[float | None, typer.Option(help="Most of longer over shorter side.")] = None,
    deduplicate: Annotated[
        str | None,
        typer.Option(
            metavar="FIELD",
            help="Keep the first of samples equal in: image, caption, or a json field (url, md5).",
        ),
    ] = None,
    keep_empty_captions: Annotated[
        bool, typer.Option("--keep-empty-captions", help="Keep samples whose caption is empty.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the account as JSON.")] = False,
) -> None:
    """Write the usable samples of SRC into new shards in DST, with an account of the others.

    Broken and missing jsons are made anew; members beside image, caption and json are left out.

    Ended at any moment, the same command goes on where it was; the shards are the same to the byte.

    DST gets 00000.tar and on, their _stats.json, sizes.json and account.json.

    Exit status 0: DST is complete.
    Exit status 1: something failed that may pass; run the same command again.
    Exit status 2: SRC, DST or a flag is wrong.
    """
    settings = Settings(
        samples_per_shard=samples_per_shard,
        resize=resize,
        drop_nsfw=tuple(mark.strip().upper() for mark in drop_nsfw.split(","))
        if drop_nsfw is not None
        else (),
        min_similarity=min_similarity,
        min_side=min_side,
        min_caption=min_caption,
        max_caption=max_caption,
        max_aspect=max_aspect,
        deduplicate=deduplicate,
        keep_empty_captions=keep_empty_captions,
    )
    count = available_cores() if workers is None else workers
    try:
        result = clean(source, out, settings, workers=count, stage=progress)
    except Unfinished as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt as error:
        typer.echo("Interrupted: run the same command again to go on.", err=True)
        raise typer.Exit(143 if isinstance(error, Terminated) else 130) from error
    if as_json:
        typer.echo(json.dumps(result.account, indent=2, allow_nan=False))
    else:
        _print(out, result)


def _print(out: Path, result: Cleaned) -> None:
    account = result.account
    console = Console(width=None if Console().is_terminal else 120)
    console.print(_table(account))
    for line in _remarks(account):
        console.print(escape(line), soft_wrap=True, highlight=False)
    already = "was complete already: " if result.already_complete else ""
    samples, shards = (
        _counted(account[name], noun) for name, noun in (("out", "sample"), ("output_shards", "shard"))
    )
    console.print(
        escape(f"{out}: {already}{samples} in {shards}, {decimal(account['output_bytes'])}."),
        soft_wrap=True,
        highlight=False,
    )


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' if count > 1 else ''}"


def _table(account: Mapping[str, Any]) -> Table:
    """What came in, what was dropped for which reason, and what went out."""
    table = Table()
    table.add_column("")
    table.add_column("samples", justify="right")
    table.add_column("share", justify="right")
    rows = {"in": account["in"], **account["dropped"], "out": account["out"]}
    for number, (name, count) in enumerate(rows.items()):
        last_reason = number == len(rows) - 2
        table.add_row(
            escape(name), f"{count:,}", percent(count, account["in"]), end_section=number == 0 or last_reason
        )
    return table


def _remarks(account: Mapping[str, Any]) -> list[str]:
    """Sentences on what was changed, and on what a filter could not see."""
    remarks = []
    for name, text in (
        ("recovered", "samples kept that training would lose for a broken member beside image and caption"),
        ("json_made", "jsons made anew"),
        ("images_resized", "images shrunk"),
    ):
        if account[name]:
            remarks.append(f"{account[name]:,} {text}.")
    if account["members_left_out"]:
        counts = [f"{count:,} {suffix}" for suffix, count in account["members_left_out"].items()]
        remarks.append(f"Members left out: {', '.join(counts)}.")
    for name, count in account["without_field"].items():
        remarks.append(f"{count:,} samples have no {name} in the json, and passed that filter.")
    faults = [
        f"{fault['shard']} {fault['fault']}; samples read: {fault['samples']:,}."
        for fault in account["faults"]
    ]
    remarks += faults[:MAX_FAULTS]
    if len(faults) > MAX_FAULTS:
        remarks.append(f"{len(faults) - MAX_FAULTS:,} more shards have a fault: account.json names them.")
    return remarks
