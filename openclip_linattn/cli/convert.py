"""`openclip-linattn convert`: a checkpoint with another attention."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from openclip_linattn.conversion.checkpoint import Conversion


def convert_command(
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT", help="Checkpoint file, run folder, or a pretrained tag of OpenCLIP."
        ),
    ],
    to: Annotated[str, typer.Option("--to", metavar="KIND", help="Attention kind, softmax too.")],
    model: Annotated[
        str | None, typer.Option(help="Model name; default: what the run recorded in run.json or params.txt.")
    ] = None,
    text: Annotated[
        bool, typer.Option("--text", help="Convert the text tower too, to the causal form.")
    ] = False,
    last: Annotated[
        int | None,
        typer.Option(
            min=1, help="Convert only the last so many blocks of each tower, and leave softmax before."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The new file; default: MODEL.pt here.")
    ] = None,
    no_rescale: Annotated[
        bool,
        typer.Option(
            "--no-rescale", help="Leave the output projections as they are, whatever the weights sum to."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Give a trained OpenCLIP ViT another attention, to train it on or to distil its softmax form into it."""
    from openclip_linattn.conversion.checkpoint import convert_checkpoint

    notices = Console(stderr=True)
    with notices.status("converting"):
        conversion = convert_checkpoint(
            checkpoint, to, model=model, text=text, last=last, rescale=not no_rescale, output=output
        )
    if as_json:
        typer.echo(json.dumps(asdict(conversion), indent=2, default=str))
        return
    kinds = ", ".join(f"{part} {kind}" for part, kind in conversion.source_kinds.items())
    rescaled = "rescaled" if conversion.rescaled else "not rescaled"
    typer.echo(f"{conversion.source_model} ({kinds}) to {conversion.model}, {rescaled}")
    typer.echo("\nAttention outputs, root mean square, for images of noise and a few captions:")
    Console().print(_table(conversion))
    for note in conversion.notes:
        typer.echo(f"note: {note}")
    if conversion.config is not None:
        typer.echo(
            f"{conversion.model} is no registered model: its config is {conversion.config}; it is known where "
            f"OPENCLIP_LINATTN_MODEL_CONFIGS={conversion.config.absolute()} is set"
        )
    typer.echo(f'open_clip.create_model("{conversion.model}", pretrained="{conversion.output}") loads it')


def _table(conversion: "Conversion") -> Table:
    table = Table()
    for heading in ("tower", "block", "before", "after", "after / before"):
        table.add_column(heading, justify="left" if heading == "tower" else "right")
    for row in conversion.branches:
        ratio = f"{row.after / row.before:.2f}" if row.before else "-"
        table.add_row(row.tower, str(row.block), f"{row.before:.3g}", f"{row.after:.3g}", ratio)
    return table
