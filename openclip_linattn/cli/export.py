"""`openclip-linattn export`: a checkpoint for programs without this package, and for the Hugging Face hub."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from openclip_linattn.termination import Terminated, terminable

if TYPE_CHECKING:
    from openclip_linattn.export.checkpoint import Export


def export_command(
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT", help="Checkpoint file, run folder, or a pretrained tag of OpenCLIP."
        ),
    ],
    form: Annotated[
        Literal["onnx", "torch", "hub"],
        typer.Option(
            "--format", help="ONNX or torch.export files of the towers; or a folder in OpenCLIP's hub format."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="The folder that is made.")],
    tower: Annotated[Literal["image", "text", "both"], typer.Option(help="The towers to write.")] = "both",
    model: Annotated[
        str | None, typer.Option(help="Model name; default: what the run recorded in run.json or params.txt.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Write a trained model for other programs, and compare what they will compute with the model."""
    from openclip_linattn.export.checkpoint import export_checkpoint
    from openclip_linattn.export.towers import TOWERS

    notices = Console(stderr=True)
    parts = TOWERS if tower == "both" else (tower,)
    try:
        with terminable(), notices.status("exporting") as status:
            export = export_checkpoint(
                checkpoint, form, out, towers=parts, model=model, progress=status.update
            )
    except KeyboardInterrupt as error:
        typer.echo("Interrupted: nothing was written.", err=True)
        raise typer.Exit(143 if isinstance(error, Terminated) else 130) from error
    if as_json:
        typer.echo(json.dumps(asdict(export), indent=2, default=str))
        return
    typer.echo(f"{export.model} ({export.format}) in {export.output}")
    Console().print(_table(export))
    differences = ", ".join(f"{part} {value:.1e}" for part, value in export.differences.items())
    typer.echo(f"largest difference from the model's features, batches of 1 and 3: {differences}")
    for note in export.notes:
        typer.echo(f"note: {note}")


def _table(export: "Export") -> Table:
    table = Table()
    table.add_column("file")
    table.add_column("MB", justify="right")
    for name, size in export.files.items():
        table.add_row(name, f"{size / 1e6:,.2f}")
    return table
