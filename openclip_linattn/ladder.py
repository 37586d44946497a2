"""A ladder of training runs, attention x size, side by side and resumable, through the training entrypoint."""

import fcntl
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from openclip_linattn.errors import UserError
from openclip_linattn.manifest import read_manifest
from openclip_linattn.termination import terminable

POLL_SECONDS = 0.5
TAIL_BYTES = 4096
_PROGRESS = re.compile(r"Train Epoch: (\d+) \[\s*(\d+)/(\d+)")
_TORCH_LOG = re.compile(r"[IWEV]\d{4} \d\d:\d\d:")  # statistics that PyTorch prints at its exit
_REASON = re.compile(r"error: |[\w.]*(Error|Exception|Interrupt|Exit)\b")


@dataclass(frozen=True)
class Recipe:
    """What all runs of a ladder share, so that attention and size are all that differs.

    Samples are image-text pairs; `epochs` are checkpoints of `epoch_samples` each at a constant learning rate, so one
    run gives several values of samples seen.
    """

    train_data: str
    val_data: str
    val_samples: int
    epoch_samples: int
    epochs: int
    batch_size: int
    learning_rate: float
    warmup_steps: int
    workers: int = 1
    seed: int = 0
    precision: str = "fp32"

    def flags(self) -> list[str]:
        """The recipe in OpenCLIP's flags."""
        pairs = {
            "train-data": self.train_data,
            "train-num-samples": self.epoch_samples,
            "dataset-type": "webdataset",
            "val-data": self.val_data,
            "val-num-samples": self.val_samples,
            "epochs": self.epochs,
            "batch-size": self.batch_size,
            "workers": self.workers,
            "lr": self.learning_rate,
            "warmup": self.warmup_steps,
            "lr-scheduler": "const",
            "precision": self.precision,
            "seed": self.seed,
            "log-every-n-steps": 10,
        }
        return [part for key, value in pairs.items() for part in (f"--{key}", str(value))]


@dataclass(frozen=True)
class Run:
    """One rung: a registered model trained by a recipe into <logs>/<model>."""

    model: str
    recipe: Recipe
    logs: Path

    @property
    def folder(self) -> Path:
        """OpenCLIP's folder of the run."""
        return self.logs / self.model

    @property
    def arguments(self) -> list[str]:
        """The command line after `python -m openclip_linattn.train`."""
        return ["--model", self.model, "--name", self.model, "--logs", str(self.logs), *self.recipe.flags()]

    @property
    def samples(self) -> int:
        """Samples that the run sees, before OpenCLIP's rounding to whole batches."""
        return self.recipe.epoch_samples * self.recipe.epochs

    def samples_seen(self) -> int:
        """Samples seen so far, from the last line that OpenCLIP logged."""
        try:
            with (self.folder / "out.log").open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL_BYTES))
                lines = _PROGRESS.findall(log.read().decode(errors="replace"))
        except OSError:
            return 0
        if not lines:
            return 0
        epoch, seen, _ = map(int, lines[-1])
        return min(self.samples, epoch * self.recipe.epoch_samples + seen)


@dataclass(frozen=True)
class Outcome:
    """How a run ended: "trained", "resumed", "already done" or "failed" (then with the last lines of its output)."""

    run: Run
    status: str
    message: str = ""


def train_ladder(
    runs: Sequence[Run],
    *,
    jobs: int,
    after: Callable[[Run], None] | None = None,
    console: Console | None = None,
) -> list[Outcome]:
    """Trains all runs, `jobs` side by side with one thread each, and calls `after(run)` when one is done.

    Finished runs are left alone, interrupted ones go on from their last checkpoint. Shows one bar per run on a
    terminal. Ended by an interrupt or SIGTERM, it ends its runs too. Raises UserError where a run's folder holds other
    settings or is in use, and, once the others are done, where a run failed.
    """
    console = console or Console(stderr=True)
    for run in runs:
        _check_settings(run)
    with _locks(runs) as locks, terminable():
        outcomes = _train_all(runs, jobs, after, _Children(locks), console)
    failed = [outcome for outcome in outcomes if outcome.status == "failed"]
    if failed:
        raise UserError(
            "\n".join(f"the run {outcome.run.model} failed: {outcome.message}" for outcome in failed)
        )
    return outcomes


def _train_all(
    runs: Sequence[Run],
    jobs: int,
    after: Callable[[Run], None] | None,
    children: "_Children",
    console: Console,
) -> list[Outcome]:
    with _progress(console) as progress, ThreadPoolExecutor(max_workers=jobs) as pool:
        board = _Board(progress, runs)
        futures = [pool.submit(_train_one, run, after, board, children) for run in runs]
        try:
            return [future.result() for future in futures]
        except BaseException:
            for future in futures:
                future.cancel()
            children.terminate()
            raise


@contextmanager
def _locks(runs: Sequence[Run]) -> Iterator[list[int]]:
    """Locks the runs' log folders for this ladder and its children; yields the locks' file descriptors.

    A child inherits them, so that a folder is in use as long as one that outlived its ladder trains on in it.
    """
    files = []
    try:
        for logs in sorted({run.logs for run in runs}):
            logs.mkdir(parents=True, exist_ok=True)
            files.append((logs / ".lock").open("a"))
            try:
                fcntl.flock(files[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UserError(
                    f"another ladder trains in {logs}, or a run that it left behind; wait for it, or end it"
                ) from error
            except OSError:
                pass  # a file system without locks
        yield [file.fileno() for file in files]
    finally:
        for file in files:
            file.close()


class _Children:
    """The training processes under way, ended together when the ladder is interrupted."""

    def __init__(self, inherited: Sequence[int] = ()) -> None:
        self._inherited = inherited
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._closed = False

    def start(self, command: list[str], log: Path) -> subprocess.Popen[bytes]:
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        with self._lock, log.open("ab") as output:
            if self._closed:
                raise RuntimeError("the ladder was interrupted")
            child = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **threads},
                pass_fds=self._inherited,
            )
            self._running.add(child)
        return child

    def ended(self, child: "subprocess.Popen[bytes]") -> None:
        with self._lock:
            self._running.discard(child)

    def terminate(self) -> None:
        with self._lock:
            self._closed = True
            for child in self._running:
                child.terminate()


class _Board:
    """The progress display: a bar for all runs together and one for each, and a line when a run is done."""

    def __init__(self, progress: Progress, runs: Sequence[Run]) -> None:
        self._progress = progress
        self._done = dict.fromkeys(runs, 0)
        self._all = progress.add_task("all runs", total=sum(run.samples for run in runs))
        self._bars = {run: progress.add_task(run.model, total=run.samples, start=False) for run in runs}

    def start(self, run: Run) -> None:
        self._progress.start_task(self._bars[run])

    def update(self, run: Run, samples: int) -> None:
        self._done[run] = samples
        self._progress.update(self._bars[run], completed=samples)
        self._progress.update(self._all, completed=sum(self._done.values()))

    def end(self, run: Run, status: str) -> None:
        if status != "failed":
            self.update(run, run.samples)
        self._progress.stop_task(self._bars[run])
        self._progress.console.print(f"{run.model}: {status}")


def _train_one(run: Run, after: Callable[[Run], None] | None, board: _Board, children: _Children) -> Outcome:
    board.start(run)
    status = _prepare(run)
    if status != "already done":
        console_log = run.logs / f"{run.model}.console.txt"
        run.logs.mkdir(parents=True, exist_ok=True)
        resume = ["--resume", "latest"] if status == "resumed" else []
        command = [sys.executable, "-m", "openclip_linattn.train", *run.arguments, *resume]
        child = children.start(command, console_log)
        try:
            while child.poll() is None:
                board.update(run, run.samples_seen())
                time.sleep(POLL_SECONDS)
        finally:
            children.ended(child)
        if child.returncode != 0:
            board.end(run, "failed")
            return Outcome(
                run, "failed", f"exit status {child.returncode}; {_last_line(console_log)} ({console_log})"
            )
    if after is not None:
        try:
            after(run)
        except UserError as error:
            board.end(run, "failed")
            return Outcome(run, "failed", str(error))
    board.end(run, status)
    return Outcome(run, status)


def _prepare(run: Run) -> str:
    """Decides how a run starts, and clears a folder of ours from which OpenCLIP can neither start nor resume."""
    if not run.folder.exists():
        return "trained"
    if read_manifest(run.folder).get("status") == "finished":
        return "already done"
    if any((run.folder / "checkpoints").glob("epoch_*.pt")):
        return "resumed"
    shutil.rmtree(run.folder)
    return "trained"


def _check_settings(run: Run) -> None:
    command = read_manifest(run.folder).get("command")
    if command is None:
        if run.folder.exists() and any(run.folder.iterdir()):
            raise UserError(f"{run.folder} exists and is no training run of ours; choose another folder")
        return
    recorded = shlex.split(command)[3:]
    if "--resume" in recorded:
        at = recorded.index("--resume")
        recorded = recorded[:at] + recorded[at + 2 :]
    if recorded != run.arguments:
        raise UserError(
            f"{run.folder} holds a run with other settings ({command}); choose another folder, or remove this one"
        )


def _last_line(path: Path) -> str:
    """The last line that names an error, else the last one that is not PyTorch's own statistics."""
    lines = [line.rstrip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
    lines = [line for line in lines if not _TORCH_LOG.match(line)]
    reasons = [line for line in lines if _REASON.match(line)]
    return (reasons or lines or ["no output"])[-1]


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f}/{task.total:,.0f} samples"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
