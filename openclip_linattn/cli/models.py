"""`openclip-linattn models`: the registered models with their parameters and cost."""

import json
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from openclip_linattn.configs import ModelConfig


def models_command(
    pattern: Annotated[str, typer.Argument(help="Show only names that contain this.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the registered models: attention kinds, parameters per tower (M), forward GMAC per image-text pair."""
    rows = [row for row in model_rows() if pattern.lower() in row["model"].lower()]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    if not rows:
        typer.echo(f"no model name contains {pattern!r}", err=True)
        raise typer.Exit(1)
    Console(width=None if Console().is_terminal else 132).print(_table(rows))


def model_rows() -> list[dict[str, Any]]:
    """One dict per registered model: name, attention kinds, parameters and GMAC per tower.

    Those of a model with a text tower of transformers are not known from its config, and None.
    """
    from openclip_linattn.registration import models

    return [
        {"model": name, "image_size": config.content["vision_cfg"]["image_size"], **_cost(config)}
        for name, config in models().items()
    ]


def _cost(config: "ModelConfig") -> dict[str, Any]:
    from openclip_linattn.configs import FOREIGN_TEXT
    from openclip_scaling.flops import ClipCost, clip_cost

    if FOREIGN_TEXT not in config.content["text_cfg"]:
        return clip_cost(config.content).as_dict()
    unknown = dict.fromkeys(field.name for field in fields(ClipCost))
    image = config.tower.kind + (f"_last{config.tower.last}" if config.tower.last else "")
    return {**unknown, "image_attention": image, "text_attention": "transformers"}


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="Models (GMAC: multiply-adds of one forward pass of one image-text pair, in 1e9)")
    for heading in ("model", "image\nattention", "text\nattention", "px"):
        table.add_column(heading, no_wrap=True)
    for heading in (
        "image\nM par.",
        "text\nM par.",
        "total\nM par.",
        "image\nGMAC",
        "text\nGMAC",
        "total\nGMAC",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        millions = [
            "-" if row[key] is None else f"{row[key] / 1e6:.2f}"
            for key in ("image_parameters", "text_parameters", "parameters")
        ]
        gmac = ["-" if row[key] is None else f"{row[key]:.3f}" for key in ("image_gmac", "text_gmac", "gmac")]
        table.add_row(
            row["model"],
            row["image_attention"],
            row["text_attention"],
            str(row["image_size"]),
            *millions,
            *gmac,
        )
    return table
