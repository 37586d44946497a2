"""`openclip-linattn quickstart`: the whole job at laptop size, from nothing to a report with pictures."""

from pathlib import Path
from typing import Annotated

import typer


def quickstart_command(
    out: Annotated[Path, typer.Option(help="Folder for data, runs and report.")] = Path("quickstart"),
    attention: Annotated[list[str] | None, typer.Option(help="Attention kinds; repeat the option.")] = None,
    size: Annotated[list[str] | None, typer.Option(help="Model sizes; repeat the option.")] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs side by side (default: one per core).")
    ] = None,
    keep_checkpoints: Annotated[bool, typer.Option(help="Keep the checkpoint of every epoch.")] = False,
    tiny: Annotated[
        bool, typer.Option("--tiny", help="A smoke form: a minute or two, nothing is learnt.")
    ] = False,
) -> None:
    """Draw data, train softmax, linear and normalised linear attention in three sizes through OpenCLIP, evaluate
    zero-shot, fit scaling laws, and write a report with pictures. Run again, it goes on where it stopped."""
    from openclip_linattn.quickstart import ATTENTIONS, FULL, SIZES, TINY, quickstart

    path = quickstart(
        out,
        attentions=attention or ATTENTIONS,
        sizes=size or SIZES,
        scale=TINY if tiny else FULL,
        jobs=jobs,
        keep_checkpoints=keep_checkpoints,
    )
    typer.echo(path)
