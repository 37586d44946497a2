"""How an evaluation is to be run."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from joblib import cpu_count

from openclip_linattn.errors import UserError
from openclip_linattn.zeroshot.sets.dataset import CLASS_CHOICES

MOST_IN_BATCH = 1_000_000
PRECISIONS = ("fp32", "amp", "amp_bf16", "amp_bfloat16", "bf16", "fp16", "pure_bf16", "pure_fp16")


@dataclass(frozen=True)
class EvaluationOptions:
    """How to evaluate; raises UserError for a bad number or precision.

    model: the model of every checkpoint (default: what its run recorded); label_sets: names to keep
    (default: all); classes: "all" or "present", over which classes to evaluate class folders (see
    `open_folder_set`); classnames: a file that replaces the names of the data; templates: openai80, simple7,
    one or a file, which replaces those of the data; workers: processes that decode (default: as many as
    there are cores, at most 4); precision: one of OpenCLIP's; device: auto, cpu, cuda, ...; save: keep rows
    and predictions beside the checkpoints of a run; again: evaluate also what has a valid row already, and encode
    all class names anew; images: the folder of a captions file's images; benchmarks, benchmark_root: sets of
    clip_benchmark and where they lie (see `Benchmarks`); probe: a set to train a linear probe on, which the one
    set of the data then tests, instead of zero-shot; shots: training images per class of the probe (default: all);
    image_sizes: pixels of square inputs, one row for each (default: the size of training).
    """

    model: str | None = None
    label_sets: Sequence[str] = ()
    classes: str | None = None
    classnames: Path | None = None
    templates: str | Path | None = None
    batch_size: int = 64
    workers: int | None = None
    precision: str = "fp32"
    device: str = "auto"
    save: bool = True
    again: bool = False
    images: Path | None = None
    benchmarks: Sequence[str] = ()
    benchmark_root: str | None = None
    probe: str | Path | None = None
    shots: int | None = None
    image_sizes: Sequence[int] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.batch_size <= MOST_IN_BATCH:
            raise UserError(f"the batch size is {self.batch_size}; it must be from 1 to {MOST_IN_BATCH}")
        if self.workers is not None and self.workers < 0:
            raise UserError(f"the number of workers is {self.workers}; it must be at least 0")
        if self.classes is not None and self.classes not in CLASS_CHOICES:
            raise UserError(f"the classes are {self.classes!r}; they can be {' or '.join(CLASS_CHOICES)}")
        if self.precision not in PRECISIONS:
            raise UserError(f"unknown precision {self.precision!r}; known: {', '.join(PRECISIONS)}")
        if min(self.image_sizes, default=1) < 1:
            raise UserError(f"the image size is {min(self.image_sizes)}; it must be at least 1 pixel")
        self._check_companions()

    def _check_companions(self) -> None:
        if self.benchmarks and self.benchmark_root is None:
            raise UserError("--benchmark needs --benchmark-root, the folder where clip_benchmark's data lies")
        if self.benchmark_root is not None and not self.benchmarks:
            raise UserError("--benchmark-root was given without --benchmark; name a set, or leave it out")
        if self.shots is not None and self.probe is None:
            raise UserError(
                "--shots is for a linear probe; give its training set with --probe, or leave it out"
            )

    @property
    def worker_count(self) -> int:
        """The number of worker processes to use."""
        if self.workers is not None:
            return self.workers
        return min(4, int(cpu_count()))  # the cores that this job may use, which may be few of the machine's
