"""Where the runs of a plan are trained, as a plan says it."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveFloat, PositiveInt, model_validator


class Section(BaseModel):
    """A part of a plan: no key but its own, no type but the right one."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Local(Section):
    """This machine: `jobs` runs side by side (default: as many as fit), each of `processes` under torchrun.

    With `gpus`, the number of cards, every process has one of its own; without, a run has `threads` of the CPU.
    """

    jobs: PositiveInt | None = None
    processes: PositiveInt = 1
    threads: PositiveInt = 1
    gpus: NonNegativeInt = 0

    @model_validator(mode="after")
    def _cards_for_all(self) -> "Local":
        if self.processes > 1 and not self.gpus:
            raise ValueError(
                "OpenCLIP trains with several processes on cards only: give gpus, or one process"
            )
        if self.gpus and self.processes * (self.jobs or 1) > self.gpus:
            raise ValueError(
                f"{self.jobs or 1} jobs of {self.processes} processes need more than {self.gpus} gpus"
            )
        return self

    def side_by_side(self, cores: int) -> int:
        """How many runs train at a time on a machine of so many cores."""
        if self.jobs is not None:
            return self.jobs
        return self.gpus // self.processes if self.gpus else max(1, cores // self.threads)


class Slurm(Section):
    """A SLURM cluster: one job for each run, with a process for each card, or one for each node without cards.

    `hours` is the time limit of a job, which goes back into the queue and resumes where it is not enough. `options`
    are more of sbatch's, true for one without a value; `setup` are shell lines that come before the training.
    """

    nodes: PositiveInt = 1
    gpus_per_node: NonNegativeInt = 0
    cpus_per_task: PositiveInt = 1
    hours: PositiveFloat = 24.0
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    options: dict[str, str | int | Literal[True]] = {}
    setup: list[str] = []

    @model_validator(mode="after")
    def _cards_for_nodes(self) -> "Slurm":
        if self.nodes > 1 and not self.gpus_per_node:
            raise ValueError(
                "OpenCLIP trains on several nodes with cards only: give gpus_per_node, or one node"
            )
        return self


class Executor(Section):
    """Where the runs are trained: `local` (the default) or `slurm`."""

    local: Local | None = None
    slurm: Slurm | None = None

    @property
    def place(self) -> Local | Slurm:
        """The one that was chosen."""
        return self.slurm or self.local or Local()

    @model_validator(mode="after")
    def _one_place(self) -> "Executor":
        if self.local is not None and self.slurm is not None:
            raise ValueError("give either local or slurm")
        return self
