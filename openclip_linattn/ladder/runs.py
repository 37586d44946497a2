"""A training run of a ladder: its recipe, its command and its folder."""

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TAIL_BYTES = 4096
_PROGRESS = re.compile(r"Train Epoch: (\d+) \[\s*(\d+)/(\d+)")


@dataclass(frozen=True)
class Recipe:
    """How a run is trained.

    Samples are image-text pairs. A checkpoint is saved after each of `epochs` epochs of `epoch_samples`. `batch_size`
    is that of one optimiser step over all processes. `extra` are more of OpenCLIP's flags.
    """

    train_data: str
    val_data: str | None
    val_samples: int | None
    epoch_samples: int
    epochs: int
    batch_size: int
    learning_rate: float
    warmup_steps: int
    workers: int = 1
    seed: int = 0
    precision: str = "fp32"
    schedule: str = "const"
    accumulation: int = 1
    extra: tuple[str, ...] = ()

    def flags(self, processes: int = 1) -> list[str]:
        """The recipe in OpenCLIP's flags, for a run of so many processes."""
        pairs = {
            "train-data": self.train_data,
            "train-num-samples": self.epoch_samples,
            "dataset-type": "webdataset",
            "val-data": self.val_data,
            "val-num-samples": self.val_samples,
            "epochs": self.epochs,
            "batch-size": self.batch_size // (processes * self.accumulation),
            "accum-freq": self.accumulation if self.accumulation > 1 else None,
            "workers": self.workers,
            "lr": self.learning_rate,
            "warmup": self.warmup_steps,
            "lr-scheduler": self.schedule,
            "precision": self.precision,
            "seed": self.seed,
            "log-every-n-steps": 10,
        }
        listed = [
            part for key, value in pairs.items() if value is not None for part in (f"--{key}", str(value))
        ]
        return [*listed, *self.extra]


@dataclass(frozen=True)
class Run:
    """A registered model trained by a recipe into <logs>/<name>, by `processes` of `threads` threads each."""

    name: str
    model: str
    recipe: Recipe
    logs: Path
    processes: int = 1
    threads: int = 1

    @property
    def folder(self) -> Path:
        """OpenCLIP's folder of the run."""
        return self.logs / self.name

    @property
    def console_log(self) -> Path:
        """What its processes print."""
        return self.logs / f"{self.name}.console.txt"

    @property
    def arguments(self) -> list[str]:
        """The command line after `python -m openclip_linattn.train`."""
        flags = self.recipe.flags(self.processes)
        return ["--model", self.model, "--name", self.name, "--logs", str(self.logs), *flags]

    @property
    def environment(self) -> dict[str, str]:
        """How many threads each of its processes may use."""
        return {name: str(self.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}

    @property
    def samples(self) -> int:
        """Samples that the run sees, before OpenCLIP's rounding to whole batches."""
        return self.recipe.epoch_samples * self.recipe.epochs

    def command(self, *, resume: bool = False, launcher: Sequence[str] = ()) -> list[str]:
        """The whole training command; several processes are started by torchrun.

        `launcher` replaces torchrun's options for one machine.
        """
        arguments = [*self.arguments, *(["--resume", "latest"] if resume else [])]
        if self.processes == 1 and not launcher:
            return [sys.executable, "-m", "openclip_linattn.train", *arguments]
        options = launcher or ("--standalone", "--nproc-per-node", str(self.processes))
        torchrun = [sys.executable, "-m", "torch.distributed.run", *options]
        return [*torchrun, "-m", "--", "openclip_linattn.train", *arguments]

    def samples_seen(self) -> int:
        """Samples seen so far, from the last line that OpenCLIP logged."""
        lines = _PROGRESS.findall(log_tail(self.folder))
        if not lines:
            return 0
        epoch, seen, _ = map(int, lines[-1])
        return min(self.samples, epoch * self.recipe.epoch_samples + seen)


@dataclass(frozen=True)
class Outcome:
    """How a run ended: "trained", "resumed", "already done" or "failed" (then with the reason)."""

    run: Run
    status: str
    message: str = ""

    @property
    def failed(self) -> bool:
        """Whether it is not there to be compared."""
        return self.status == "failed"

    @property
    def sentence(self) -> str:
        """What a failed run is told by."""
        return f"the run {self.run.name} failed: {self.message}"


def log_tail(folder: Path, begin: int = 0) -> str:
    """The last 4 KiB of a run's out.log that lie after byte `begin`; empty where there is none."""
    try:
        with (folder / "out.log").open("rb") as log:
            log.seek(max(begin, log.seek(0, os.SEEK_END) - TAIL_BYTES))
            return log.read().decode(errors="replace")
    except OSError:
        return ""
