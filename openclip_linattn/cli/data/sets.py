"""`openclip-linattn data shapes` and `digits`: write captioned sets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from openclip_linattn.cli.data.progress import progress
from openclip_linattn.data.drawn.build import BuildResult
from openclip_linattn.data.drawn.digits import sample_count as digits_count
from openclip_linattn.data.drawn.digits import write_digits
from openclip_linattn.data.drawn.shapes import write_shapes

GRID = "samples.png"

OutArgument = Annotated[Path, typer.Argument(metavar="OUT", help="Folder; it may hold the same set.")]
SeedOption = Annotated[int, typer.Option(help="The same seed gives the same set, byte for byte.")]
SizeOption = Annotated[int, typer.Option(help="Side of the square images, in pixels.")]
ShardOption = Annotated[int, typer.Option(help="Samples in each tar.")]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace another set in OUT.")]


def _finish(result: BuildResult, source: Path, grid: bool) -> None:
    picture = result.folder / GRID
    if grid and not (result.already_complete and picture.exists()):
        from openclip_linattn.data.drawn.grid import sample_grid  # matplotlib is slow to import

        sample_grid(str(source), picture)
    if result.already_complete:
        typer.echo(f"{result.folder} already holds this set, complete: {result.samples:,} samples.")
        return
    found = f", {result.found} found" if result.found else ""
    written = f"{result.written} shard{'' if result.written == 1 else 's'} written"
    typer.echo(f"{result.folder}: {result.samples:,} samples; {written}{found}.")


def shapes_command(
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
    with progress("Drawing", samples + test_samples) as advance:
        result = write_shapes(
            out,
            samples,
            test_samples=test_samples,
            seed=seed,
            image_size=image_size,
            samples_per_shard=samples_per_shard,
            overwrite=overwrite,
            progress=advance,
        )
        _finish(result, out, grid=True)


def digits_command(
    out: OutArgument,
    repeat: Annotated[int, typer.Option(help="Times that each training image is written.")] = 1,
    seed: SeedOption = 0,
    image_size: SizeOption = 64,
    samples_per_shard: ShardOption = 200,
    overwrite: OverwriteOption = False,
) -> None:
    """Write scikit-learn's handwritten digits with captions: OUT/train, and an evaluation set in OUT/test."""
    with progress("Writing", digits_count(repeat)) as advance:
        result = write_digits(
            out,
            seed=seed,
            image_size=image_size,
            repeat=repeat,
            samples_per_shard=samples_per_shard,
            overwrite=overwrite,
            progress=advance,
        )
        _finish(result, out / "train", grid=True)
