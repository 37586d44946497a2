"""From a plan to its runs: the grid, with each run's training settings, checked before anything is trained."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path

from openclip_linattn.configs import config_folders, read_config
from openclip_linattn.errors import UserError
from openclip_linattn.ladder.drawn import DrawnSets
from openclip_linattn.ladder.places import Slurm
from openclip_linattn.ladder.plan_file import read_spec, validated
from openclip_linattn.ladder.runs import Recipe, Run
from openclip_linattn.ladder.schema import Data, Override, Spec, Training
from openclip_linattn.manifest import Plan
from openclip_scaling.flops import ClipCost, clip_cost

DATA, LOGS, REPORT = "data", "logs", "report"  # folders below that of a ladder
# What a plan decides on by its keys, even where a run's command does not have it.
OWN_FLAGS = ("--resume", "--accum-freq", "--val-data", "--val-num-samples")


@dataclass(frozen=True)
class Rung:
    """A run with what it costs: true samples and steps, and the arithmetic of its model."""

    run: Run
    plan: Plan
    cost: ClipCost

    @property
    def samples(self) -> int:
        """Samples that the run sees, rounded as OpenCLIP does."""
        return self.plan.totals(self.plan.epochs)["samples"]

    @property
    def flop(self) -> float:
        """Training FLOP of the model."""
        return self.cost.train_flops(self.samples)


@dataclass(frozen=True)
class Ladder:
    """A plan made ready: its file and content, the folder for everything, and the runs, the largest first."""

    file: Path
    spec: Spec
    out: Path
    rungs: list[Rung]

    @property
    def runs(self) -> list[Run]:
        """The runs, the largest first, so that the last ones to finish side by side are short."""
        return [rung.run for rung in self.rungs]

    @property
    def drawn(self) -> DrawnSets | None:
        """The sets that the plan has drawn."""
        return None if self.spec.data.drawn is None else DrawnSets(self.out / DATA)

    @property
    def evaluation_sets(self) -> list[str]:
        """What the runs are evaluated on: the drawn sets, and those of the plan."""
        own = [] if self.drawn is None else [str(self.drawn.shapes), str(self.drawn.digits)]
        return [*own, *(absolute_set(source, self.file.parent) for source in self.spec.evaluation.sets)]

    @property
    def gpus(self) -> bool:
        """Whether the runs are trained on cards."""
        place = self.spec.executor.place
        return bool(place.gpus_per_node if isinstance(place, Slurm) else place.gpus)


def read_ladder(file: Path, out: Path, only: str | None = None) -> Ladder:
    """Reads a plan and makes its runs, which will lie in `out`; `only` is a shell pattern of run names.

    Raises UserError, with the file and the key, for a plan that cannot be trained as it stands.
    """
    file, out = file.resolve(), out.resolve()
    spec = read_spec(file)
    rungs = list(_Grid(file, spec, out).rungs())
    _check_names(file, rungs)
    chosen = [rung for rung in rungs if only is None or fnmatchcase(rung.run.name, only)]
    if not chosen:
        raise UserError(f"no run of {file} has a name like {only}; one is called {rungs[0].run.name}")
    return Ladder(file, spec, out, sorted(chosen, key=lambda rung: -rung.flop))


@dataclass(frozen=True)
class _Grid:
    file: Path
    spec: Spec
    out: Path

    def rungs(self) -> Iterator[Rung]:
        """Every run of the grid."""
        self._check_overrides()
        for size, attention in product(self.spec.sizes, self.spec.attentions):
            model = f"{size}-{attention}"
            cost = self._cost(model)
            for samples in self.spec.samples:
                training = self._training(size, attention, samples)
                for rate, seed in product(training.learning_rate, self.spec.seeds):
                    name = f"{model}-{samples}-lr{short(rate)}-seed{seed}"
                    yield self._rung(name, model, cost, self._recipe(name, training, samples, rate, seed))

    def _check_overrides(self) -> None:
        for number, override in enumerate(self.spec.overrides):
            known = {
                "size": (override.size, self.spec.sizes),
                "attention": (override.attention, self.spec.attentions),
                "samples": (override.samples, list(self.spec.samples)),
            }
            for key, (named, there) in known.items():
                for name in map(str, named or ()):
                    if name not in there:
                        raise UserError(
                            f"{self.file}: overrides.{number}.{key}: {name} is not in the plan, which has "
                            f"{', '.join(there)}"
                        )
            self._overridden(self.spec.training, number, override)

    def _training(self, size: str, attention: str, samples: str) -> Training:
        training = self.spec.training
        place = (size, attention, samples)
        for number, override in enumerate(self.spec.overrides):
            wanted = (override.size, override.attention, override.samples)
            if all(
                names is None or name in map(str, names) for name, names in zip(place, wanted, strict=True)
            ):
                training = self._overridden(training, number, override)
        return training

    def _overridden(self, training: Training, number: int, override: Override) -> Training:
        content = {**training.model_dump(), **override.training}
        return validated(Training, content, str(self.file), f"overrides.{number}.")

    def _cost(self, model: str) -> ClipCost:
        for folder in config_folders():
            if (folder / f"{model}.json").is_file():
                return clip_cost(read_config(folder / f"{model}.json").content)
        raise UserError(
            f"{self.file}: sizes, attentions: there is no model {model}; `openclip-linattn models` lists them"
        )

    def _recipe(self, name: str, training: Training, samples: str, rate: float, seed: int) -> Recipe:
        total = self.spec.samples[samples]
        if total % training.epochs:
            raise UserError(
                f"{self.file}: training.epochs: {total:,} samples cannot be cut into {training.epochs} equal epochs "
                f"({name})"
            )
        train, val, val_samples = _sources(self.spec.data, self.file.parent, self.out)
        return Recipe(
            train_data=train,
            val_data=val,
            val_samples=val_samples,
            epoch_samples=total // training.epochs,
            epochs=training.epochs,
            batch_size=training.batch,
            learning_rate=rate,
            warmup_steps=training.warmup,
            workers=training.workers,
            seed=seed,
            precision=training.precision,
            schedule=training.schedule,
            accumulation=training.accumulation,
            extra=tuple(training.flags),
        )

    def _rung(self, name: str, model: str, cost: ClipCost, recipe: Recipe) -> Rung:
        place = self.spec.executor.place
        if isinstance(place, Slurm):
            each = max(1, place.gpus_per_node)
            processes, threads = place.nodes * each, max(1, place.cpus_per_task // each)
        else:
            processes, threads = place.processes, place.threads
        parts = processes * recipe.accumulation
        if recipe.batch_size % parts:
            raise UserError(
                f"{self.file}: training.batch: {recipe.batch_size:,} cannot be cut into equal parts for {processes} "
                f"processes and {recipe.accumulation} accumulated steps ({name})"
            )
        run = Run(name, model, recipe, self.out / LOGS, processes, threads)
        plan = Plan(
            recipe.epoch_samples,
            recipe.batch_size // parts,
            processes,
            recipe.workers,
            recipe.accumulation,
            recipe.epochs,
        )
        self._check_rung(Rung(run, plan, cost))
        return Rung(run, plan, cost)

    def _check_rung(self, rung: Rung) -> None:
        recipe, steps = rung.run.recipe, rung.plan.totals(rung.plan.epochs)["steps"]
        if recipe.warmup_steps >= steps:
            raise UserError(
                f"{self.file}: training.warmup: {recipe.warmup_steps:,} steps are not less than the {steps:,} of the "
                f"training ({rung.run.name})"
            )
        bare = replace(rung.run, recipe=replace(recipe, extra=()))
        own = {*OWN_FLAGS, *(part for part in bare.arguments if part.startswith("--"))}
        for flag in recipe.extra:
            name = flag.partition("=")[0]  # which OpenCLIP takes for any flag that begins so, too
            if name.startswith("--") and any(each.startswith(name) for each in own):
                raise UserError(
                    f"{self.file}: training.flags: {flag} is set by the ladder itself; the keys of the plan decide "
                    "on it"
                )


def short(rate: float) -> str:
    """A learning rate as people write it in names, such as 1e-3 or 5.12e-4."""
    mantissa, exponent = f"{rate:e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def absolute(source: str, folder: Path) -> str:
    """A source of shards for a process that runs elsewhere: relative paths begin at `folder`, the rest stays."""
    return "::".join(
        part if "://" in part or part.startswith(("pipe:", "$")) else str(folder / part)
        for part in source.split("::")
    )


def absolute_set(source: str, folder: Path) -> str:
    """An evaluation set, [KIND:]PATH, for a process that runs elsewhere."""
    kind, colon, place = source.rpartition(":")
    return source if "://" in source else f"{kind}{colon}{folder / place}"


def _sources(data: Data, folder: Path, out: Path) -> tuple[str, str | None, int | None]:
    """Where runs find their training and validation samples, and how many of the latter there are."""
    if data.drawn is not None:
        sets = DrawnSets(out / DATA)
        return sets.train, sets.validation, data.drawn.test_shapes
    assert data.train is not None  # the schema sees to it
    return absolute(data.train, folder), data.val and absolute(data.val, folder), data.val_samples


def _check_names(file: Path, rungs: list[Rung]) -> None:
    seen = set()
    for rung in rungs:
        if rung.run.name in seen:
            raise UserError(
                f"{file}: two runs have the name {rung.run.name}; a size, attention, learning rate or seed is there "
                "twice"
            )
        seen.add(rung.run.name)
