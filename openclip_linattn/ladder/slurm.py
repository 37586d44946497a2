"""Trains the runs of a ladder on a SLURM cluster: submits a job for each, through submitit, and watches them."""

import getpass
import hashlib
import logging
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Console

from openclip_linattn.errors import UserError
from openclip_linattn.ladder.board import Board, progress_bars
from openclip_linattn.ladder.children import locked
from openclip_linattn.ladder.failures import Failure
from openclip_linattn.ladder.places import Slurm
from openclip_linattn.ladder.plan import Ladder
from openclip_linattn.ladder.runs import Outcome, Run
from openclip_linattn.ladder.slurm_task import (
    SIGNAL_SECONDS,
    Evaluating,
    TrainingTask,
    ending_file,
    read_ending,
)
from openclip_linattn.manifest import read_manifest
from openclip_linattn.resume import epochs_done
from openclip_linattn.termination import terminable

if TYPE_CHECKING:
    from submitit import AutoExecutor

JOBS = "slurm"  # folder of submitit's files below that of a ladder
LOOK_SECONDS = 15.0
_MANY = 1000  # a job goes back into the queue for as long as it gets on, see TrainingTask.checkpoint


def train_on_cluster(
    ladder: Ladder, place: Slurm, console: Console, look_seconds: float = LOOK_SECONDS
) -> list[Outcome]:
    """Submits a job for every run that has none and is not done, and waits for all; returns how each ended.

    Jobs that still wait or run from an earlier call are watched, not submitted again. A job that fails is submitted
    again `retries` times, and without end for as long as each finishes an epoch. An interrupt ends the watch, not the
    jobs. Raises UserError where the cluster takes no job.
    """
    with locked({run.logs for run in ladder.runs}), terminable(), progress_bars(console) as progress:
        watch = _Watch(ladder, _executor(ladder, place), Board(progress, ladder.runs), place)
        try:
            watch.begin()
            while watch.waiting:
                time.sleep(look_seconds)
                watch.look()
        except KeyboardInterrupt:
            progress.console.print(
                f"the jobs of {len(watch.waiting)} runs go on; the same command watches them again, and `scancel` ends "
                "them",
                soft_wrap=True,
            )
            raise
        return [watch.outcomes[run] for run in ladder.runs]


@dataclass
class _Job:
    """The present job of a run: its number, the epochs that were saved before it, and tries that are left."""

    number: str
    epochs: int
    left: int


@dataclass
class _Watch:
    ladder: Ladder
    executor: "AutoExecutor"
    board: Board
    place: Slurm
    waiting: dict[Run, _Job] = field(default_factory=dict)
    outcomes: dict[Run, Outcome] = field(default_factory=dict)

    def begin(self) -> None:
        """Finds the jobs that are there, and submits the others."""
        queue = _queue({_job_name(run): run for run in self.ladder.runs})
        if queue is None:
            raise UserError(
                "squeue does not answer, so it is not known which jobs are there; try again later"
            )
        for run in self.ladder.runs:
            number = queue.get(run)
            if number is None and self._is_done(run):
                self._settle(run, "already done")
                continue
            found, epochs = "goes on" if number else "submitted", epochs_done(run.folder)
            number = number or self._submit(run)
            self.waiting[run] = _Job(number, epochs, self.ladder.spec.retries)
            self.board.start(run)
            self.board.say(run, f"job {number} {found}")

    def look(self) -> None:
        """Looks once at all jobs that are waited for."""
        queue = _queue({_job_name(run): run for run in self.waiting})
        if queue is None:
            return
        for run, job in list(self.waiting.items()):
            self.board.update(run, run.samples_seen())
            if run not in queue:
                self._ended(run, job)

    def _ended(self, run: Run, job: _Job) -> None:
        ending = read_ending(run)
        if ending is not None and ending.status == "trained":
            self._settle(run, "trained")
            return
        failure = _silent(job) if ending is None else Failure(ending.message, ending.again)
        epochs = epochs_done(run.folder)
        left = job.left if epochs > job.epochs else job.left - 1
        if not failure.again or left < 0:
            self._settle(run, "failed", f"{failure.reason} (job {job.number}, {self.ladder.out / JOBS})")
            return
        number = self._submit(run)
        self.board.say(run, f"submitted again as job {number} after a failure: {failure.reason}")
        self.waiting[run] = _Job(number, epochs, left)

    def _is_done(self, run: Run) -> bool:
        """Whether a run is trained, and evaluated on the sets of the plan."""
        ending = read_ending(run)
        if ending is None or read_manifest(run.folder).get("status") != "finished":
            return False
        return ending.status == "trained" and ending.sets == self._evaluating().sets

    def _evaluating(self) -> Evaluating:
        wanted = self.ladder.spec.evaluation
        return Evaluating(
            tuple(self.ladder.evaluation_sets), wanted.batch, wanted.precision, wanted.keep_checkpoints
        )

    def _settle(self, run: Run, status: str, message: str = "") -> None:
        self.waiting.pop(run, None)
        self.outcomes[run] = Outcome(run, status, message)
        self.board.end(self.outcomes[run])

    def _submit(self, run: Run) -> str:
        ending_file(run).unlink(missing_ok=True)
        self.executor.update_parameters(name=_job_name(run))
        task = TrainingTask(run, self.place.nodes, self.place.hours, self._evaluating())
        try:
            return str(self.executor.submit(task).job_id)
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            reason = " ".join(str(error).split())
            others = f"; the jobs of {len(self.waiting)} other runs go on" if self.waiting else ""
            raise UserError(
                f"the cluster does not take the job of {run.name}: {reason}{others}; the same command goes on from here"
            ) from error


def _executor(ladder: Ladder, place: Slurm) -> "AutoExecutor":
    try:
        from submitit import AutoExecutor
    except ImportError as error:
        raise UserError(
            "executor.slurm needs submitit: run `pip install 'openclip-linattn[cluster]'`"
        ) from error
    logging.getLogger("submitit").setLevel(logging.ERROR)
    named = {"partition": place.partition, "account": place.account, "qos": place.qos}
    parameters: Mapping[str, Any] = {
        "timeout_min": max(1, round(place.hours * 60)),
        "nodes": place.nodes,
        "tasks_per_node": 1,
        "cpus_per_task": place.cpus_per_task,
        **({"gpus_per_node": place.gpus_per_node} if place.gpus_per_node else {}),
        **{f"slurm_{key}": value for key, value in named.items() if value is not None},
        "slurm_setup": place.setup,
        "slurm_signal_delay_s": SIGNAL_SECONDS,
        "slurm_additional_parameters": {"requeue": True, **place.options},
    }
    try:
        executor = AutoExecutor(folder=ladder.out / JOBS, cluster="slurm", slurm_max_num_timeout=_MANY)
        executor.update_parameters(**parameters)
    except (RuntimeError, ValueError, NameError, AssertionError) as error:
        raise UserError(f"{ladder.file}: executor.slurm: {str(error).splitlines()[0]}") from error
    return executor


def _job_name(run: Run) -> str:
    """The name by which SLURM's queue tells whether a run has a job: the run's, and a mark of the ladder's folder."""
    mark = hashlib.sha256(str(run.logs).encode()).hexdigest()[:8]
    return f"{run.name}-{mark}"


def _queue(names: Mapping[str, Run]) -> dict[Run, str] | None:
    """The numbers of the jobs that SLURM still has of some runs; None where it does not answer now."""
    command = [
        "squeue",
        "--noheader",
        "--format=%i %j",
        "--user",
        getpass.getuser(),
        "--name",
        ",".join(names),
    ]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    jobs: Sequence[tuple[str, str]] = [line.split()[:2] for line in answer.stdout.splitlines()]  # type: ignore[misc]
    return {names[name]: number for number, name in jobs if name in names}


def _silent(job: _Job) -> Failure:
    return Failure(
        f"job {job.number} ended without a word: out of memory, killed, or its node was lost", again=True
    )
