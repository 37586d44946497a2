"""The whole job at laptop size: shards, a ladder of runs, zero-shot evaluation, fitted laws, pictures, a report."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from joblib import cpu_count
from rich.console import Console

from openclip_linattn.data.sources import as_pattern
from openclip_linattn.errors import UserError
from openclip_linattn.ladder.drawn import DrawnSets, draw, sample_pictures
from openclip_linattn.ladder.finish import evaluate_run, fit_and_report, introduce, zeroshot_table
from openclip_linattn.ladder.local import raise_failures, train_ladder
from openclip_linattn.ladder.machine import Machine
from openclip_linattn.ladder.runs import Outcome, Recipe, Run
from openclip_scaling.fitting.settings import Settings

ATTENTIONS = ("softmax", "linear", "normlinear")
SIZES = ("ViT-T32-8", "ViT-T64-8", "ViT-T96-8")
METRICS = ("val_loss", "shapes/color x shape/top1")


@dataclass(frozen=True)
class Scale:
    """How much data and training a quickstart takes; samples are image-text pairs."""

    shapes: int
    test_shapes: int
    digit_repeat: int
    shard: int
    epoch_samples: int
    epochs: int
    batch_size: int
    warmup_steps: int
    learning_rate: float = 1e-3
    points: str = "frontier"
    skip_first_epoch: bool = False
    bootstrap_draws: int = 500


# The first epoch is nearly all warm-up, so it is no point of a law.
FULL = Scale(
    shapes=20_000,
    test_shapes=1_024,
    digit_repeat=3,
    shard=1_000,
    epoch_samples=8_192,
    epochs=7,
    batch_size=128,
    warmup_steps=60,
    skip_first_epoch=True,
)
TINY = Scale(
    256,
    64,
    1,
    64,
    epoch_samples=128,
    epochs=3,
    batch_size=32,
    warmup_steps=2,
    points="all",
    bootstrap_draws=100,
)


def quickstart(
    out: Path,
    *,
    attentions: Sequence[str] = ATTENTIONS,
    sizes: Sequence[str] = SIZES,
    scale: Scale = FULL,
    jobs: int | None = None,
    keep_checkpoints: bool = False,
    console: Console | None = None,
) -> Path:
    """Does the whole job into `out` and returns the path of its report.

    What is there already (data, finished runs, evaluations) is used, so an interrupted quickstart goes on where it
    stopped. `jobs` runs train side by side with one thread each (default: one per core). Unless `keep_checkpoints`,
    only the last checkpoint of every run is kept. Raises UserError for an unknown attention or size, and where `out`
    holds something else.
    """
    console = console or Console(stderr=True)
    out = out.resolve()  # a run is taken up again from wherever the command is called
    jobs = jobs or cpu_count()
    # Large models first: the last rungs to finish are then the short ones.
    names = [f"{size}-{attention}" for size in reversed(sizes) for attention in attentions]
    _check_names(names)
    sets = draw(
        out / "data",
        shapes=scale.shapes,
        test_shapes=scale.test_shapes,
        digit_repeat=scale.digit_repeat,
        shard=scale.shard,
        console=console,
    )
    recipe = Recipe(
        train_data=as_pattern(sets.train),
        val_data=as_pattern(sets.validation),
        val_samples=scale.test_shapes,
        epoch_samples=scale.epoch_samples,
        epochs=scale.epochs,
        batch_size=scale.batch_size,
        learning_rate=scale.learning_rate,
        warmup_steps=scale.warmup_steps,
    )
    runs = [Run(name, name, recipe, out / "logs") for name in names]
    console.print(f"{len(runs)} runs of {scale.epoch_samples * scale.epochs:,} samples, {jobs} side by side")

    def evaluate(run: Run, device: str) -> None:
        evaluate_run(run.folder, [sets.shapes, sets.digits], device=device, keep_checkpoints=keep_checkpoints)

    outcomes = train_ladder(runs, Machine(jobs), after=evaluate, console=console)
    raise_failures(outcomes)
    return report(out, sets, outcomes, scale, console)


def report(out: Path, sets: DrawnSets, outcomes: Sequence[Outcome], scale: Scale, console: Console) -> Path:
    """Collects the runs, fits and compares the laws, draws the pictures, and writes report/report.md."""
    folder = out / "report"
    runs = [outcome.run for outcome in outcomes]
    with console.status("fitting and drawing"):
        settings = Settings(
            points=scale.points,
            min_samples=scale.epoch_samples * (scale.skip_first_epoch + 0.5),
            draws=scale.bootstrap_draws,
        )
        path, collection = fit_and_report(folder, [run.folder for run in runs], METRICS, settings)
        sample_pictures(sets, folder)
    introduce(path, _introduction(zeroshot_table(collection.checkpoints), runs, scale))
    console.print(
        f"{sum(outcome.status != 'already done' for outcome in outcomes)} runs trained; report: {path}"
    )
    return path


def _introduction(table: str, runs: Sequence[Run], scale: Scale) -> str:
    recipe = runs[0].recipe
    return f"""# Quickstart report

{len(runs)} CLIP models, trained by OpenCLIP's own entrypoint on
{scale.shapes:,} drawn shapes and scikit-learn's training digits, each captioned {scale.digit_repeat} times:
{recipe.epoch_samples * recipe.epochs:,} samples seen each, batch {recipe.batch_size}, learning rate
{recipe.learning_rate} after {recipe.warmup_steps} steps of warm-up and constant from then on, so that the checkpoint
of every epoch{" but the first" if scale.skip_first_epoch else ""} is a point of its own.

![Training samples: shapes](samples-shapes.png)

![Training samples: handwritten digits](samples-digits.png)

## Zero-shot top-1 of the last checkpoints

Chance is 1/64 for color x shape, 1/8 for color and for shape, 1/10 for digits. {scale.test_shapes:,} held-out shapes,
and the test split of the digits.

{table}"""


def _check_names(names: Sequence[str]) -> None:
    from openclip_linattn.configs import builtin_folder

    for name in names:
        if not (builtin_folder() / f"{name}.json").exists():
            raise UserError(
                f"there is no model {name}; `openclip-linattn models ViT-T` lists the laptop sizes"
            )
