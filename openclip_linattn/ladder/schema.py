"""What a plan may say: its sections, their keys with types and defaults."""

import re
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from openclip_linattn.ladder.places import Executor, Section
from openclip_linattn.zeroshot.options import PRECISIONS
from openclip_scaling.fitting.selections import SELECTIONS
from openclip_scaling.reading.runs import CHECKPOINT_COLUMNS

_SAMPLES = re.compile(r"(\d+(?:\.\d+)?)([kMB])")
_NAME = re.compile(r"[\w.+-]+", re.ASCII)
_UNITS = {"k": 10**3, "M": 10**6, "B": 10**9}


def _listed(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


def _counted(value: Any) -> Any:
    """Numbers of samples by their names: a mapping stays, a number or a list of such as 49152 or 400M is named."""
    named = value if isinstance(value, dict) else {str(item): _number(item) for item in _listed(value)}
    if len(named) < len(value if isinstance(value, (dict, list)) else [value]):
        raise ValueError("a number is there twice")
    for name in named:
        if not _NAME.fullmatch(str(name)):
            raise ValueError(
                f"{name!r} is a part of names of folders and jobs; give it letters, digits, . _ + or -"
            )
    return {str(name): number for name, number in named.items()}


def _number(item: Any) -> Any:
    found = _SAMPLES.fullmatch(item) if isinstance(item, str) else None
    return round(float(found[1]) * _UNITS[found[2]]) if found else item


def _known_precision(value: str) -> str:
    if value not in PRECISIONS:
        raise ValueError(f"it can be {', '.join(PRECISIONS)}")
    return value


def _known_points(value: str) -> str:
    if value not in SELECTIONS:
        raise ValueError(f"it can be {', '.join(SELECTIONS)}")
    return value


def _known_scale(value: str) -> str:
    for column in value.split(","):
        if column.strip() not in CHECKPOINT_COLUMNS:
            raise ValueError(
                f"there is no scale {column.strip()}; train_flop, samples_seen and gpu_hours are some"
            )
    return value


Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[list[Text], BeforeValidator(_listed), Field(min_length=1)]
Rates = Annotated[list[PositiveFloat], BeforeValidator(_listed), Field(min_length=1)]
Seeds = Annotated[list[NonNegativeInt], BeforeValidator(_listed), Field(min_length=1)]
Samples = Annotated[dict[str, PositiveInt], BeforeValidator(_counted), Field(min_length=1)]
Precision = Annotated[str, AfterValidator(_known_precision)]


class Drawn(Section):
    """Shapes and digits that are drawn into the ladder's folder; `shard` is the number of shapes in a tar."""

    shapes: PositiveInt = 20_000
    test_shapes: PositiveInt = 1_024
    digit_repeat: PositiveInt = 3
    shard: PositiveInt = 1_000


class Data(Section):
    """Shards to train on and to validate with, in any form that --train-data takes; or sets that are drawn.

    Relative paths begin at the plan's folder. `val_samples` is the number that validation reads.
    """

    drawn: Drawn | None = None
    train: Text | None = None
    val: Text | None = None
    val_samples: PositiveInt | None = None

    @model_validator(mode="after")
    def _one_source(self) -> "Data":
        if (self.drawn is None) == (self.train is None):
            raise ValueError("give either train, the shards to train on, or drawn, the sets to draw")
        if self.drawn is not None and (self.val or self.val_samples):
            raise ValueError("val and val_samples belong to train; drawn has a validation set of its own")
        return self


class Training(Section):
    """How every run is trained. Each of several learning rates makes a run of its own.

    `batch` is that of one optimiser step over all processes, `warmup` in steps; an epoch ends with a checkpoint; and
    `flags` are more of OpenCLIP's.
    """

    batch: PositiveInt
    learning_rate: Rates
    warmup: NonNegativeInt
    epochs: PositiveInt = 1
    schedule: Literal["cosine", "const", "const-cooldown"] = "cosine"
    precision: Precision = "amp_bf16"
    accumulation: PositiveInt = 1
    workers: NonNegativeInt = 1
    flags: list[Text] = Field(default=[])

    @model_validator(mode="after")
    def _cooldown_has_a_length(self) -> "Training":
        told = any(flag.partition("=")[0] == "--epochs-cooldown" for flag in self.flags)
        if self.schedule == "const-cooldown" and not told:
            raise ValueError("schedule const-cooldown needs --epochs-cooldown=N among flags")
        return self


class Override(BaseModel):
    """Other values of `training` for some runs: those of these sizes, attentions and numbers of samples (by name)."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    size: Texts | None = None
    attention: Texts | None = None
    samples: Annotated[list[str | int], BeforeValidator(_listed)] | None = None

    @property
    def training(self) -> dict[str, Any]:
        """The values, by their keys in `training`."""
        return dict(self.model_extra or {})


class Budget(Section):
    """What the runs may cost, and how that is estimated.

    `tflops` is the throughput that is assumed of a card, or of a core, in 1e12 FLOP a second; with `measure` a few
    steps of the smallest run tell it. The ladder does not start above `max_gpu_hours` or `max_cpu_hours`.
    """

    tflops: PositiveFloat | None = None
    measure: bool = False
    max_gpu_hours: PositiveFloat | None = None
    max_cpu_hours: PositiveFloat | None = None

    @model_validator(mode="after")
    def _one_basis(self) -> "Budget":
        if self.measure and self.tflops is not None:
            raise ValueError("give either tflops or measure")
        if (self.max_gpu_hours or self.max_cpu_hours) and not (self.measure or self.tflops):
            raise ValueError("a limit needs an estimate: give tflops, or measure: true")
        return self


class Evaluation(Section):
    """The sets, as `openclip-linattn eval` takes them, that every checkpoint is evaluated on beside the drawn ones.

    Without `keep_checkpoints` the last checkpoint of every run alone is kept once all are evaluated.
    """

    sets: list[Text] = Field(default=[])
    batch: PositiveInt = 128
    precision: Precision = "fp32"
    keep_checkpoints: bool = True


class Report(Section):
    """What is fitted: metrics (default: losses and top-1 accuracies) over a scale, on a selection of checkpoints.

    `min_samples` leaves out those that saw fewer.
    """

    metrics: Annotated[list[Text], Field(min_length=1)] | None = None
    scale: Annotated[str, AfterValidator(_known_scale)] = "train_flop"
    points: Annotated[str, AfterValidator(_known_points)] = "ends"
    min_samples: NonNegativeInt = 0


class Spec(Section):
    """A whole plan: a grid of sizes x attentions x samples x learning rates x seeds, and what is done with it."""

    sizes: Texts
    attentions: Texts
    samples: Samples
    seeds: Seeds = Field(default=[0])
    data: Data
    training: Training
    overrides: list[Override] = Field(default=[])
    executor: Executor = Executor()
    retries: NonNegativeInt = 1
    budget: Budget = Budget()
    evaluation: Evaluation = Evaluation()
    report: Report = Report()

    @model_validator(mode="after")
    def _measured_here(self) -> "Spec":
        if self.budget.measure and self.executor.slurm is not None:
            raise ValueError("budget.measure trains on this machine: with executor.slurm, give budget.tflops")
        return self
