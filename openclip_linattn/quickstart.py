"""The whole job at laptop size: shards, a ladder of runs, zero-shot evaluation, fitted laws, pictures, a report."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from joblib import cpu_count
from rich.console import Console

from openclip_linattn.data.drawn.digits import write_digits
from openclip_linattn.data.drawn.grid import sample_grid
from openclip_linattn.data.drawn.shapes import write_shapes
from openclip_linattn.data.sources import as_pattern
from openclip_linattn.errors import UserError
from openclip_linattn.files import write_text
from openclip_linattn.ladder import Outcome, Recipe, Run, train_ladder
from openclip_scaling.analysis import Settings
from openclip_scaling.report import write_report
from openclip_scaling.runs import collect

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


@dataclass(frozen=True)
class Sets:
    """The folders of the two captioned sets and their sources for OpenCLIP."""

    shapes: Path
    digits: Path

    @property
    def train(self) -> str:
        """Shapes and digits, mixed shard by shard."""
        return f"{as_pattern(str(self.shapes))}::{as_pattern(str(self.digits / 'train'))}"

    @property
    def validation(self) -> str:
        """The held-out shapes."""
        return as_pattern(str(self.shapes / "test"))


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
    sets = write_data(out / "data", scale, console)
    recipe = Recipe(
        train_data=sets.train,
        val_data=sets.validation,
        val_samples=scale.test_shapes,
        epoch_samples=scale.epoch_samples,
        epochs=scale.epochs,
        batch_size=scale.batch_size,
        learning_rate=scale.learning_rate,
        warmup_steps=scale.warmup_steps,
    )
    runs = [Run(name, recipe, out / "logs") for name in names]
    console.print(f"{len(runs)} runs of {scale.epoch_samples * scale.epochs:,} samples, {jobs} side by side")
    outcomes = train_ladder(
        runs, jobs=jobs, after=lambda run: _evaluate(run, sets, keep_checkpoints), console=console
    )
    return report(out, runs, outcomes, scale, console)


def write_data(folder: Path, scale: Scale, console: Console) -> Sets:
    """Writes both captioned sets, unless they are there, and a picture of what the models train on."""
    with console.status("drawing shapes and digits"):
        write_shapes(
            folder / "shapes", scale.shapes, test_samples=scale.test_shapes, samples_per_shard=scale.shard
        )
        write_digits(folder / "digits", repeat=scale.digit_repeat)
    return Sets(folder / "shapes", folder / "digits")


def report(
    out: Path, runs: Sequence[Run], outcomes: Sequence[Outcome], scale: Scale, console: Console
) -> Path:
    """Collects the runs, fits and compares the laws, draws the pictures, and writes report/report.md."""
    folder = out / "report"
    folder.mkdir(parents=True, exist_ok=True)
    with console.status("fitting and drawing"):
        settings = Settings(
            points=scale.points,
            min_samples=scale.epoch_samples * (scale.skip_first_epoch + 0.5),
            draws=scale.bootstrap_draws,
        )
        collection = collect([run.folder for run in runs])
        collection.checkpoints.to_csv(folder / "checkpoints.csv", index=False)
        path = write_report(folder, collection, list(METRICS), settings)
        sample_grid(as_pattern(str(out / "data" / "shapes")), folder / "samples-shapes.png", 24)
        sample_grid(as_pattern(str(out / "data" / "digits" / "train")), folder / "samples-digits.png", 24)
    table = zeroshot_table(collection.checkpoints.to_dict("records"))
    text = path.read_text(encoding="utf-8").replace("# Scaling report", _introduction(table, runs, scale), 1)
    write_text(path, text)
    console.print(
        f"{sum(outcome.status != 'already done' for outcome in outcomes)} runs trained; report: {path}"
    )
    return path


def zeroshot_table(rows: Sequence[dict[Any, Any]]) -> str:
    """The last checkpoint of every run with its zero-shot accuracies, as a markdown table."""
    last: dict[str, dict[Any, Any]] = {}
    for row in sorted(rows, key=lambda row: row["samples_seen"]):
        last[str(row["run"])] = row
    columns = [key for key in (rows[0] if rows else {}) if str(key).endswith("/top1")]
    lines = ["| model | samples seen | " + " | ".join(columns) + " |", "|---" * (len(columns) + 2) + "|"]
    for run in sorted(last):
        row = last[run]
        cells = [f"{row[column]:.3f}" for column in columns]
        lines.append(f"| {row['model']} | {row['samples_seen']:,.0f} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


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

{table}

# Scaling"""


def _check_names(names: Sequence[str]) -> None:
    from openclip_linattn.configs import builtin_folder

    for name in names:
        if not (builtin_folder() / f"{name}.json").exists():
            raise UserError(
                f"there is no model {name}; `openclip-linattn models ViT-T` lists the laptop sizes"
            )


def _evaluate(run: Run, sets: Sets, keep_checkpoints: bool) -> None:
    """Zero-shot accuracies of every epoch; with them written down, the earlier checkpoints have done their work."""
    import torch

    from openclip_linattn.zeroshot.checkpoints import find_checkpoints
    from openclip_linattn.zeroshot.evaluate import EvaluationOptions, evaluate

    torch.set_num_threads(1)  # the other cores train
    evaluate(
        [run.folder],
        [sets.shapes, sets.digits],
        EvaluationOptions(batch_size=128, workers=0, device="cpu"),
    )
    if not keep_checkpoints:
        for checkpoint in find_checkpoints([run.folder])[:-1]:
            checkpoint.path.unlink()
