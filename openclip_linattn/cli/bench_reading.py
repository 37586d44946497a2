"""`openclip-linattn bench reading`: where the time of reading shards goes, and how many workers it takes."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from openclip_linattn.cli.bench_options import OUT, JsonOption, OutOption, TinyOption, numbers, spinner
from openclip_linattn.files import write_json

STEM = "reading"


def reading_command(  # noqa: PLR0913  (the parameters are the command's options)
    source: Annotated[
        str | None,
        typer.Argument(help="Shards; left out, images that cost what photographs cost are drawn."),
    ] = None,
    model: Annotated[
        str, typer.Option("--model", "-m", help="Model whose transform and tokenizer are used.")
    ] = "ViT-B-16-normlinear",
    batch_size: Annotated[int, typer.Option(help="Samples of a batch.")] = 256,
    workers: Annotated[str, typer.Option(help="Numbers of data-loader workers, as in 0,1,2,4.")] = "0,1,2",
    samples: Annotated[int, typer.Option(help="Samples that are measured part by part.")] = 256,
    rounds: Annotated[int, typer.Option(help="Rounds, in each of which every loader runs.")] = 5,
    out: OutOption = OUT,
    as_json: JsonOption = False,
    tiny: TinyOption = False,
) -> None:
    """OpenCLIP's reading path: samples per second by workers, and the time of each part of one sample.

    The look that `train` takes at the shards comes on top once, before the first epoch; its seconds are given too.
    """
    from openclip_linattn.bench.reading import ReadingSettings, bench_reading  # late: --help stays quick
    from openclip_linattn.bench.reading_picture import reading_figure
    from openclip_scaling.pictures.plot import save_figure

    if tiny:
        settings = ReadingSettings(
            source, "ViT-T32-8-normlinear", 8, (0, 1), 8, 1, shards=2, per_shard=8, side=64
        )
    else:
        settings = ReadingSettings(source, model, batch_size, numbers(workers, "--workers"), samples, rounds)
    with spinner() as progress:
        report = bench_reading(settings, progress)
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / f"{STEM}{suffix}" for suffix in (".json", ".png", ".svg")]
    write_json(paths[0], report)
    for path in paths[1:]:
        save_figure(reading_figure(report), path)
    if as_json:
        typer.echo(json.dumps(report, indent=1, allow_nan=False))
        return
    _print(report)
    typer.echo("\n".join(map(str, paths)))


def _print(report: dict[str, Any]) -> None:
    console = Console()
    parts = Table(title="one sample, one process", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("part", "time", "share", "samples/s alone"):
        parts.add_column(heading, justify="left" if heading == "part" else "right")
    for row in report["parts"]:
        time, rate = f"{1e6 * row['seconds']:,.0f} us", f"{row['samples_per_s']:,.0f}"
        parts.add_row(row["part"], time, f"{row['share']:.0%}", rate)
    loaders = Table(
        title=f"whole loader, batches of {report['batch_size']}",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    for heading in ("workers", "samples/s", "of one process doing the parts"):
        loaders.add_column(heading, justify="right")
    for row in report["loaders"]:
        loaders.add_row(str(row["workers"]), f"{row['samples_per_s']:,.0f}", f"{row['of_parts']:.2f}x")
    console.print(parts)
    console.print(loaders)
    environment = report["environment"]
    look = report["preflight"]["seconds"]
    console.print(f"{environment['device']}; {report['source']}; {report['model']}", highlight=False)
    console.print(f"the look before training takes {look:.2f} s, once", highlight=False)
