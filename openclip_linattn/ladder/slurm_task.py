"""What one job of a ladder does on a SLURM cluster: it trains a run, evaluates it, and writes down how it ended."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openclip_linattn.errors import UserError
from openclip_linattn.files import read_json, write_json
from openclip_linattn.ladder.attempt import Begin, followed
from openclip_linattn.ladder.failures import Failure, said
from openclip_linattn.ladder.finish import evaluate_run
from openclip_linattn.ladder.runs import Run
from openclip_linattn.manifest import read_manifest
from openclip_linattn.resume import epochs_done

if TYPE_CHECKING:
    from submitit.core.utils import DelayedSubmission

SIGNAL_SECONDS = 300  # before its time limit that SLURM tells a job
# Submitit is told by SIGUSR2, and SLURM sends it to all processes of a job; it would end those that train.
_DEAF_TO_USR2 = ("sh", "-c", "trap '' USR2; exec \"$@\"", "sh")


@dataclass(frozen=True)
class Evaluating:
    """The sets that a run is evaluated on, and how."""

    sets: tuple[str, ...]
    batch_size: int
    precision: str
    keep_checkpoints: bool


@dataclass(frozen=True)
class Ending:
    """How a job ended, "trained" or "failed", which a file beside the run's folder tells the ladder."""

    status: str
    message: str
    again: bool
    sets: tuple[str, ...]


def ending_file(run: Run) -> Path:
    """Where the last job of a run writes how it ended."""
    return run.logs / f"{run.name}.job.json"


def read_ending(run: Run) -> Ending | None:
    """How the last job of a run ended; None where none has."""
    path = ending_file(run)
    if not path.exists():
        return None
    content: Mapping[str, Any] = read_json(path)
    return Ending(**{**content, "sets": tuple(content["sets"])})


@dataclass
class TrainingTask:
    """The function that submitit calls on every node of a job; before the job's end, `checkpoint` on the first."""

    run: Run
    nodes: int
    hours: float
    evaluating: Evaluating
    _child: "subprocess.Popen[bytes] | None" = field(default=None, init=False, repr=False)
    _begun: float = field(default=0.0, init=False)
    _saved: int = field(default=0, init=False)
    _told_to_end: bool = field(default=False, init=False)

    def __call__(self) -> str:
        """Trains from the newest checkpoint and evaluates; returns a word for it, once it is written down."""
        self._begun, self._saved = time.monotonic(), epochs_done(self.run.folder)
        with self._heeding_sigterm():
            failure = self._train()
        if os.environ["SLURM_PROCID"] != "0":
            return "followed"
        if failure is None:
            failure = self._evaluate()
        elif self._told_to_end:
            if put_back_if_preempted(os.environ["SLURM_JOB_ID"]):
                return "preempted"
            failure = Failure("it was cancelled", again=False)
        self._write(failure)
        return "trained" if failure is None else "failed"

    def checkpoint(self) -> "DelayedSubmission | None":
        """Ends the training before the job is; returns what goes back into the queue.

        None where the whole time of the job was not enough for an epoch, for it would go round for ever.
        """
        from submitit.helpers import DelayedSubmission

        if self._child is not None and self._child.returncode is None:
            with suppress(ProcessLookupError, ChildProcessError):  # it has ended by itself
                os.kill(self._child.pid, signal.SIGTERM)
                # Not Popen.wait, whose lock the interrupted code may hold.
                os.waitid(os.P_PID, self._child.pid, os.WEXITED | os.WNOWAIT)
        over = time.monotonic() - self._begun > self.hours * 3600 - 2 * SIGNAL_SECONDS
        if over and epochs_done(self.run.folder) <= self._saved and not self._finished:
            reason = (
                f"not one epoch was finished within {self.hours:g} hours; give executor.slurm more hours, or the "
                "training more epochs"
            )
            self._write(Failure(reason, again=False))
            return None
        return DelayedSubmission(TrainingTask(self.run, self.nodes, self.hours, self.evaluating))

    def _write(self, failure: Failure | None) -> None:
        reason, again = ("", False) if failure is None else (failure.reason, failure.again)
        ending = Ending("failed" if failure else "trained", reason, again, self.evaluating.sets)
        write_json(ending_file(self.run), asdict(ending))

    @property
    def _finished(self) -> bool:
        return read_manifest(self.run.folder).get("status") == "finished"

    def _train(self) -> Failure | None:
        if self._finished:
            return None
        command = self.run.command(resume=True, launcher=launcher(self.nodes, self.run.processes))
        begin = Begin.of(self.run)
        self.run.logs.mkdir(parents=True, exist_ok=True)
        with self.run.console_log.open("ab") as output:
            self._child = subprocess.Popen(
                [*_DEAF_TO_USR2, *command],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.run.environment},
            )
        return followed(self.run, self._child, begin, lambda _: None)

    def _evaluate(self) -> Failure | None:
        try:
            evaluate_run(
                self.run.folder,
                self.evaluating.sets,
                device="auto",
                batch_size=self.evaluating.batch_size,
                precision=self.evaluating.precision,
                keep_checkpoints=self.evaluating.keep_checkpoints,
            )
        except Exception as error:  # none may end the job without a word
            return Failure(f"not evaluated: {said(error)}", again=not isinstance(error, UserError))
        return None

    @contextmanager
    def _heeding_sigterm(self) -> Iterator[None]:
        """Notes a SIGTERM, which SLURM sends to the training as well, before submitit passes over it."""
        before = signal.getsignal(signal.SIGTERM)

        def note(number: int, frame: Any) -> None:
            self._told_to_end = True
            if callable(before):
                before(number, frame)

        signal.signal(signal.SIGTERM, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)


def put_back_if_preempted(job: str) -> bool:
    """Puts a job back into the queue that is preempted; returns whether it is.

    In the grace time that a preempted job may have, SLURM ends its processes and takes that for the job's own end.
    """
    shown = subprocess.run(
        ["scontrol", "show", "job", job], capture_output=True, text=True, check=False
    ).stdout
    if "JobState=RUNNING" not in shown or not re.search(r"PreemptTime=\d", shown):
        return False
    subprocess.run(["scontrol", "requeue", job], check=True)
    return True


def launcher(nodes: int, processes: int) -> tuple[str, ...]:
    """torchrun's options on a node of the present job; none where one process is all."""
    if processes == 1:
        return ()
    each = ("--nnodes", str(nodes), "--nproc-per-node", str(processes // nodes))
    if nodes == 1:
        return ("--standalone", *each)
    from submitit import JobEnvironment

    job = os.environ["SLURM_JOB_ID"]
    return (
        *each,
        *(
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            f"{JobEnvironment().hostnames[0]}:{10_000 + int(job) % 20_000}",
        ),
        *("--rdzv-id", f"{job}.{os.environ.get('SLURM_RESTART_COUNT', '0')}"),
    )
