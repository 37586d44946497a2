"""Climbs a ladder: estimate, data, training, evaluation, report."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from joblib import cpu_count
from rich.console import Console

from openclip_linattn.errors import UserError
from openclip_linattn.files import atomic_path
from openclip_linattn.ladder.budget import Estimate, Throughput, estimate
from openclip_linattn.ladder.drawn import draw, sample_pictures
from openclip_linattn.ladder.finish import evaluate_run, fit_and_report, introduce, zeroshot_table
from openclip_linattn.ladder.folders import check_settings
from openclip_linattn.ladder.local import train_ladder
from openclip_linattn.ladder.machine import Machine
from openclip_linattn.ladder.measure import measured
from openclip_linattn.ladder.places import Local, Slurm
from openclip_linattn.ladder.plan import DATA, REPORT, Ladder
from openclip_linattn.ladder.plan_file import validated
from openclip_linattn.ladder.runs import Outcome, Run
from openclip_linattn.manifest import read_manifest
from openclip_scaling.fitting.settings import Settings

PLAN = "plan.yaml"  # the copy of a ladder's plan in its folder


@dataclass(frozen=True)
class Result:
    """How the runs ended, and the path of the report on those that are trained; None where none is."""

    outcomes: list[Outcome]
    report: Path | None

    @property
    def failed(self) -> list[Outcome]:
        """The runs that are not there to be compared."""
        return [outcome for outcome in self.outcomes if outcome.failed]


def estimated(ladder: Ladder, console: Console, jobs: int | None = None) -> Estimate:
    """What a ladder costs. A plan that wants its throughput measured has its data drawn and a few steps trained.

    Raises UserError where that is more than the plan allows.
    """
    budget = ladder.spec.budget
    throughput = None
    if budget.tflops is not None:
        throughput = Throughput(budget.tflops, "assumed in the plan")
    elif budget.measure:
        machine(ladder, jobs).check_cards()
        make_folder(ladder.out)
        draw_data(ladder, console)
        throughput = measured(ladder, console)
    found = estimate(ladder, throughput, machine(ladder, jobs).jobs)
    found.check()
    return found


def climb(ladder: Ladder, console: Console, jobs: int | None = None) -> Result:
    """Trains and evaluates all runs of a ladder, and reports on them.

    What is there already (data, finished runs, evaluations) is used, so that the same call goes on where it stopped. A
    run that fails is named and does not keep the others from being trained and reported. Raises UserError where a run's
    folder holds other settings or is in use, for data that cannot be drawn, and for cards that are not there.
    """
    machine(ladder, jobs).check_cards()
    for run in ladder.runs:
        check_settings(run)
    make_folder(ladder.out)
    with atomic_path(ladder.out / PLAN) as temporary:
        shutil.copyfile(ladder.file, temporary)
    draw_data(ladder, console)
    return report(ladder, _trained(ladder, console, jobs), console)


def machine(ladder: Ladder, jobs: int | None = None) -> Machine:
    """This machine as the plan has it; `jobs` replaces the number of runs side by side.

    Raises UserError for more jobs than there are cards for, and for jobs where the plan trains on a cluster.
    """
    place = ladder.spec.executor.place
    if isinstance(place, Slurm):
        if jobs is not None:
            raise UserError(
                f"--jobs is for runs on this machine, and {ladder.file} has executor.slurm; leave it out"
            )
        return Machine(jobs=1)
    if jobs is not None:
        place = validated(Local, {**place.model_dump(), "jobs": jobs}, "--jobs", "executor.local.")
    return Machine(place.side_by_side(cpu_count()), place.gpus)


def make_folder(out: Path) -> None:
    """Makes a ladder's folder. Raises UserError where that is not possible."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out} cannot be made a folder: {error.strerror or error}") from error


def draw_data(ladder: Ladder, console: Console) -> None:
    """Draws the sets of a plan that has no data of its own, unless they are there."""
    drawn = ladder.spec.data.drawn
    if drawn is not None:
        draw(ladder.out / DATA, **drawn.model_dump(), console=console)


def report(ladder: Ladder, outcomes: Sequence[Outcome], console: Console) -> Result:
    """Fits and reports the runs that are trained; those that have diverged count as failed from here on."""
    folders = [run.folder for run in ladder.runs if read_manifest(run.folder).get("status") == "finished"]
    if not folders:
        return Result(list(outcomes), None)
    wanted = ladder.spec.report
    settings = Settings(x=wanted.scale, points=wanted.points, min_samples=wanted.min_samples)
    folder = ladder.out / REPORT
    with console.status("fitting and drawing"):
        path, collection = fit_and_report(folder, folders, wanted.metrics, settings)
        pictures = {} if ladder.drawn is None else sample_pictures(ladder.drawn, folder)
    diverged = set(collection.runs.loc[collection.runs["diverged"].astype(bool), "run"])
    settled = [_settled(outcome, diverged) for outcome in outcomes]
    introduce(path, _introduction(ladder, settled, pictures, zeroshot_table(collection.checkpoints)))
    return Result(settled, path)


def _trained(ladder: Ladder, console: Console, jobs: int | None) -> list[Outcome]:
    spec = ladder.spec
    if isinstance(spec.executor.place, Slurm):
        from openclip_linattn.ladder.slurm import train_on_cluster  # the extra `cluster`

        return train_on_cluster(ladder, spec.executor.place, console)

    def evaluate(run: Run, device: str) -> None:
        evaluate_run(
            run.folder,
            ladder.evaluation_sets,
            device=device,
            batch_size=spec.evaluation.batch,
            precision=spec.evaluation.precision,
            keep_checkpoints=spec.evaluation.keep_checkpoints,
        )

    return train_ladder(
        ladder.runs, machine(ladder, jobs), after=evaluate, retries=spec.retries, console=console
    )


def _settled(outcome: Outcome, diverged: set[str]) -> Outcome:
    if outcome.failed or outcome.run.name not in diverged:
        return outcome
    return Outcome(
        outcome.run, "failed", "it diverged, and is left out of every fit; lower its learning rate"
    )


def _introduction(
    ladder: Ladder, outcomes: Sequence[Outcome], pictures: Mapping[str, str], table: str
) -> str:
    spec, failed = ladder.spec, [outcome for outcome in outcomes if outcome.failed]
    rates = dict.fromkeys(run.recipe.learning_rate for run in ladder.runs)
    grid = {
        "Sizes": spec.sizes,
        "attentions": spec.attentions,
        "samples seen": list(spec.samples),
        "learning rates": rates,
        "seeds": spec.seeds,
    }
    parts = [
        "# Ladder report",
        f"{len(outcomes)} runs of a [plan](../{PLAN}), trained by OpenCLIP's own entrypoint. "
        + "; ".join(f"{name}: {', '.join(map(str, values))}" for name, values in grid.items())
        + ".",
    ]
    if failed:
        listed = "\n".join(f"- {outcome.run.name}: {outcome.message}" for outcome in failed)
        parts.append(f"## Runs that failed\n\n{listed}")
    parts += [f"![{title}]({name})" for name, title in pictures.items()]
    if table:
        parts.append(f"## Zero-shot top-1 of the last checkpoints\n\n{table}")
    return "\n\n".join(parts)
