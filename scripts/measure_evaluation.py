"""Measures the evaluation, and writes what it finds to scripts/results/evaluation.

python scripts/measure_evaluation.py agreement logs/a logs/b --data shapes
python scripts/measure_evaluation.py imagenet21k
python scripts/measure_evaluation.py speed
python scripts/measure_evaluation.py resolutions logs/a logs/b --data shapes
python scripts/measure_evaluation.py tables

Each of the first four writes a JSON file with its command and the machine; `tables` prints them as Markdown.
"""

import os
from pathlib import Path
from typing import Annotated

os.environ.setdefault("TQDM_DISABLE", "1")  # the bars of OpenCLIP and clip_benchmark

import typer
from evaluation import agreement, imagenet21k, resolutions, speed
from evaluation.tables import tables

from openclip_linattn.errors import UserError
from openclip_linattn.ops import OPERATORS

RESULTS = Path(__file__).parent / "results" / "evaluation"

app = typer.Typer(help=__doc__.split("\n")[0], no_args_is_help=True, add_completion=False)
Out = Annotated[Path, typer.Option(help="Folder to write into.")]
Runs = Annotated[
    list[Path], typer.Argument(metavar="RUN", help="Run folder or checkpoint; the last one of a run counts.")
]
Data = Annotated[list[str], typer.Option("--data", help="Evaluation set. May be repeated.")]
Models = Annotated[list[str] | None, typer.Option("--model", help="May be repeated.")]


@app.command("agreement")
def agreement_command(
    runs: Runs = [],  # noqa: B006  (typer reads it and changes nothing)
    data: Data = [],  # noqa: B006
    models: Models = None,
    templates: str = "simple7",
    per_class: Annotated[int, typer.Option(help="Drawn images in each of the 1,000 class folders.")] = 1,
    out: Out = RESULTS,
) -> None:
    """Predictions of random models against OpenCLIP's and clip_benchmark's; amp_bf16 against fp32 on trained runs."""
    chosen = models or [f"ViT-T32-8-{kind}" for kind in OPERATORS if kind != "linearelu"]
    typer.echo(
        agreement.measure(out, models=chosen, templates=templates, per_class=per_class, runs=runs, data=data)
    )


@app.command("imagenet21k")
def imagenet21k_command(
    model: str = "ViT-S-16-normlinear",
    templates: str = "openai80",
    classes: Annotated[int | None, typer.Option(help="Only the first of the classes.")] = None,
    out: Out = RESULTS,
) -> None:
    """Time and memory of the class embeddings of ImageNet-21K, with random weights."""
    typer.echo(imagenet21k.measure(out, model=model, templates=templates, classes=classes))


@app.command("speed")
def speed_command(
    models: Models = None,
    images: int = 256,
    side: Annotated[int, typer.Option(help="Pixels of the shorter side of the drawn photographs.")] = 256,
    batch_size: int = 64,
    workers: int = 2,
    rounds: int = 5,
    out: Out = RESULTS,
) -> None:
    """Images per second of an evaluation over those of the bare tower, with random weights."""
    chosen = models or ["ViT-S-16-normlinear", "ViT-B-16-normlinear"]
    typer.echo(
        speed.measure(
            out,
            models=chosen,
            images=images,
            side=side,
            batch_size=batch_size,
            workers=workers,
            rounds=rounds,
        )
    )


@app.command("resolutions")
def resolutions_command(
    runs: Runs,
    data: Data,
    label_set: Annotated[list[str] | None, typer.Option(help="Only this label set. May be repeated.")] = None,
    sizes: Annotated[str, typer.Option(help="Pixels, separated by commas.")] = "32,48,64,96",
    out: Out = RESULTS,
) -> None:
    """Accuracy of trained runs at several image sizes, as rows and as a picture."""
    pixels = [int(size) for size in sizes.split(",")]
    typer.echo(resolutions.measure(out, runs=runs, data=data, label_sets=label_set or (), sizes=pixels))


@app.command("tables")
def tables_command(out: Out = RESULTS) -> None:
    """The page's tables, from what was measured."""
    for about, table in tables(out).items():
        typer.echo(f"{about}\n\n{table}\n")


if __name__ == "__main__":
    try:
        app()
    except UserError as error:
        raise SystemExit(f"error: {error}") from error
