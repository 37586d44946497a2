"""The screens of `openclip-linattn data`: write captioned sets, and check shards before they are trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from openclip_linattn.data.build import BuildResult
from openclip_linattn.data.digits import sample_count as digits_count
from openclip_linattn.data.digits import write_digits
from openclip_linattn.data.shapes import write_shapes
from openclip_linattn.errors import UserError

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Write captioned sets of shards, and check shards before training.",
)

GRID = "samples.png"

OutArgument = Annotated[
    Path, typer.Argument(metavar="OUT", help="Folder to write; it may hold the same set.")
]
SeedOption = Annotated[int, typer.Option(help="The same seed gives the same set, byte for byte.")]
SizeOption = Annotated[int, typer.Option(help="Side of the square images, in pixels.")]
ShardOption = Annotated[int, typer.Option(help="Samples in each tar.")]
OverwriteOption = Annotated[
    bool, typer.Option("--overwrite", help="Replace another set of this kind in OUT.")
]


@contextmanager
def _user_errors() -> Iterator[None]:
    """Print a user's error as a sentence and exit with status 2."""
    try:
        yield
    except UserError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from error


@contextmanager
def _progress(title: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A bar on standard error, gone when done, and only where a terminal is."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=total)
        yield lambda done: bar.advance(task, done)


def _finish(result: BuildResult, source: Path, grid: bool) -> None:
    picture = result.folder / GRID
    if grid and not (result.already_complete and picture.exists()):
        from openclip_linattn.data.grid import sample_grid  # matplotlib is slow to import

        sample_grid(str(source), picture)
    if result.already_complete:
        typer.echo(f"{result.folder} already holds this set, complete: {result.samples:,} samples.")
        return
    found = f", {result.found} found" if result.found else ""
    typer.echo(f"{result.folder}: {result.samples:,} samples; {result.written} shards written{found}.")


@app.command()
def shapes(
    out: OutArgument,
    samples: Annotated[int, typer.Option(help="Training samples.")],
    test_samples: Annotated[int, typer.Option(help="Held-out samples, in OUT/test.")] = 0,
    seed: SeedOption = 0,
    image_size: SizeOption = 64,
    samples_per_shard: ShardOption = 1000,
    overwrite: OverwriteOption = False,
) -> None:
    """Draw a captioned set of colored shapes: training shards in OUT, an evaluation set in OUT/test.

    A set that is complete is left alone, a partial one is completed, and one with fewer samples is extended.
    """
    with _user_errors(), _progress("Drawing", samples + test_samples) as progress:
        result = write_shapes(
            out,
            samples,
            test_samples=test_samples,
            seed=seed,
            image_size=image_size,
            samples_per_shard=samples_per_shard,
            overwrite=overwrite,
            progress=progress,
        )
        _finish(result, out, grid=True)


@app.command()
def digits(
    out: OutArgument,
    repeat: Annotated[int, typer.Option(help="Times that each training image is written.")] = 1,
    seed: SeedOption = 0,
    image_size: SizeOption = 64,
    samples_per_shard: ShardOption = 200,
    overwrite: OverwriteOption = False,
) -> None:
    """Write scikit-learn's handwritten digits with captions: OUT/train, and an evaluation set in OUT/test."""
    with _user_errors(), _progress("Writing", digits_count(repeat)) as progress:
        result = write_digits(
            out,
            seed=seed,
            image_size=image_size,
            repeat=repeat,
            samples_per_shard=samples_per_shard,
            overwrite=overwrite,
            progress=progress,
        )
        _finish(result, out / "train", grid=True)
