"""What a ladder costs, estimated before it starts: FLOP by arithmetic, hours by a throughput."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from openclip_linattn.errors import UserError
from openclip_linattn.ladder.places import Slurm
from openclip_linattn.ladder.plan import Ladder, Rung

SECONDS = 3600


@dataclass(frozen=True)
class Throughput:
    """1e12 FLOP a second that one device, a card or a core, achieves in training, and how that is known."""

    tflops: float
    basis: str


@dataclass(frozen=True)
class Estimate:
    """The cost of a ladder; hours are None where no throughput is known."""

    ladder: Ladder
    throughput: Throughput | None
    jobs: int | None

    @property
    def unit(self) -> str:
        """What is counted in hours."""
        return "GPU-hours" if self.ladder.gpus else "CPU-hours"

    @property
    def flop(self) -> float:
        """Training FLOP of all runs."""
        return sum(rung.flop for rung in self.ladder.rungs)

    def device_hours(self, rungs: Sequence[Rung]) -> float | None:
        """Hours of all devices of some runs together."""
        if self.throughput is None:
            return None
        return sum(rung.flop for rung in rungs) / (self.throughput.tflops * 1e12) / SECONDS

    def hours(self, rung: Rung) -> float | None:
        """Hours from the start of a run to its end."""
        total = self.device_hours([rung])
        return None if total is None else total / self.devices(rung)

    def devices(self, rung: Rung) -> int:
        """The cards or cores of a run."""
        return rung.run.processes * (1 if self.ladder.gpus else rung.run.threads)

    @property
    def wall_hours(self) -> float | None:
        """Hours until the last run ends: `jobs` side by side, or all at once on a cluster that has room for them."""
        if self.throughput is None:
            return None
        ends = [0.0] * (self.jobs or len(self.ladder.rungs))
        for rung in self.ladder.rungs:
            heapq.heapreplace(ends, ends[0] + (self.hours(rung) or 0.0))
        return max(ends)

    @property
    def sentences(self) -> list[str]:
        """The total, and what it rests on."""
        total = self.device_hours(self.ladder.rungs)
        count = f"{len(self.ladder.rungs)} runs, {self.flop:.3g} FLOP"
        if total is None or self.throughput is None or self.wall_hours is None:
            return [f"{count}; hours are not known: give budget.tflops, or budget.measure: true"]
        where = f"{self.jobs} side by side" if self.jobs else "if all run at once"
        return [
            f"{count}, about {_hours(total)} {self.unit}: {_hours(self.wall_hours)} hours, {where}",
            f"FLOP = 3 x 2 x multiply-adds of a forward pass x samples; {self.throughput.tflops:g} TFLOP/s "
            f"of each {'card' if self.ladder.gpus else 'core'} ({self.throughput.basis})",
        ]

    def check(self) -> None:
        """Raises UserError where the plan's limit is exceeded, or is one of other devices than the runs have."""
        budget, file = self.ladder.spec.budget, self.ladder.file
        wanted, other = ("gpu", "cpu") if self.ladder.gpus else ("cpu", "gpu")
        if getattr(budget, f"max_{other}_hours") is not None:
            raise UserError(
                f"{file}: budget.max_{other}_hours: the runs are trained on {wanted.upper()}s; give "
                f"max_{wanted}_hours"
            )
        limit, total = getattr(budget, f"max_{wanted}_hours"), self.device_hours(self.ladder.rungs)
        if limit is not None and total is not None and total > limit:
            raise UserError(
                f"{file}: the runs take about {total:,.4g} {self.unit}, more than "
                f"budget.max_{wanted}_hours, {limit:,g}; nothing was started"
            )

    def rows(self) -> list[dict[str, Any]]:
        """A dict for each run: its settings, cost and command."""
        return [
            {
                "run": rung.run.name,
                "model": rung.run.model,
                "samples": rung.samples,
                "steps": rung.plan.totals(rung.plan.epochs)["steps"],
                "batch": rung.run.recipe.batch_size,
                "learning_rate": rung.run.recipe.learning_rate,
                "warmup": rung.run.recipe.warmup_steps,
                "seed": rung.run.recipe.seed,
                "train_flop": rung.flop,
                "devices": self.devices(rung),
                "device_hours": self.device_hours([rung]),
                "hours": self.hours(rung),
                "command": rung.run.command(),
            }
            for rung in self.ladder.rungs
        ]

    def table(self) -> Table:
        """The runs with their costs, for a terminal."""
        table = Table(title=f"{self.ladder.file.name}: runs, the largest first")
        table.add_column("run", no_wrap=True)
        for heading in ("samples", "steps", "batch", "warm-up", "FLOP", self.unit, "hours"):
            table.add_column(heading, justify="right", no_wrap=True)
        for row in self.rows():
            whole = [f"{row[key]:,}" for key in ("samples", "steps", "batch", "warmup")]
            hours = [_hours(row[key]) for key in ("device_hours", "hours")]
            table.add_row(row["run"], *whole, f"{row['train_flop']:.3g}", *hours)
        return table


def estimate(ladder: Ladder, throughput: Throughput | None, jobs: int) -> Estimate:
    """The cost of a ladder, of which `jobs` runs train side by side on this machine."""
    cluster = isinstance(ladder.spec.executor.place, Slurm)
    return Estimate(ladder, throughput, None if cluster else jobs)


def _hours(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
