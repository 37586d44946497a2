"""Reads shards in the tasks of a SLURM array, through submitit: each task a share, all of them into one store."""

from __future__ import annotations

import logging
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from openclip_linattn.data.checks.check import SILENCE, read_shards
from openclip_linattn.data.checks.shard_report import ShardReport
from openclip_linattn.data.checks.verdicts import VerdictStore
from openclip_linattn.data.shard_pool import available_cores
from openclip_linattn.errors import UserError

if TYPE_CHECKING:
    from submitit import AutoExecutor, Job

logger = logging.getLogger(__name__)

POLL = 2.0  # seconds between two looks at the store
LOOK = 30.0  # seconds between two looks at SLURM's queue
DEFAULTS = {"name": "data-check", "timeout_min": 720, "cpus_per_task": 8}
# What submitit translates for every kind of cluster; all other options are SLURM's own.
_GENERAL = (*DEFAULTS, "mem_gb")


class ClusterReader:
    """Reads the shards that it is called with in `tasks` tasks; `failures` has a sentence for each that failed.

    The store has to lie on a file system that all nodes see. `options` are sbatch's (partition, account, time,
    ...) and submitit's (timeout_min, mem_gb, cpus_per_task); cluster=local runs the tasks on this machine.
    """

    def __init__(self, store: VerdictStore, tasks: int, options: Mapping[str, str]) -> None:
        if tasks < 1:
            raise UserError(f"The number of tasks must be at least 1, not {tasks}.")
        self.store = store
        self.tasks = tasks
        self.failures: list[str] = []
        self.logs = store.folder.absolute() / f"tasks-{uuid4().hex[:8]}"
        self._executor = _executor(self.logs, options)
        self._next_look = time.monotonic() + LOOK
        self._told = ""

    def __call__(self, urls: Sequence[str]) -> Iterator[ShardReport]:
        """Yield reports as the tasks write them; those of shards that could not be read come last.

        Raises UserError where the cluster does not take the tasks. They are cancelled when this ends early.
        """
        if not urls:
            shutil.rmtree(self.logs, ignore_errors=True)
            return
        offsets: dict[Path, int] = {}
        for _ in self.store.news(urls, offsets):
            pass  # what was kept before is known, or out of date
        try:
            jobs = self._submit([urls[start :: self.tasks] for start in range(min(self.tasks, len(urls)))])
        except UserError:
            shutil.rmtree(self.logs, ignore_errors=True)
            raise
        try:
            while not self._ended(jobs):
                yield from self.store.news(urls, offsets)
                time.sleep(POLL)
        except BaseException:
            for job in jobs:
                with suppress(OSError):
                    job.cancel(check=False)
            raise
        yield from self.store.news(urls, offsets)
        for job in jobs:
            yield from self._unsettled(job)
        if not self.failures:
            shutil.rmtree(self.logs, ignore_errors=True)

    def _submit(self, shares: Sequence[Sequence[str]]) -> list[Job[Any]]:
        folder = str(self.store.folder.absolute())
        try:
            return self._executor.map_array(check_share, shares, [folder] * len(shares))
        except (OSError, RuntimeError) as error:
            raise UserError(f"The cluster did not take the tasks: {_last_line(str(error))}.") from error

    def _ended(self, jobs: Sequence[Job[Any]]) -> bool:
        """Whether all tasks have ended. Without SLURM's accounting submitit waits for ever for one that was killed."""
        if all(job.done() for job in jobs):
            return True
        if self._executor.cluster != "slurm" or time.monotonic() < self._next_look:
            return False
        self._next_look = time.monotonic() + LOOK
        queue = _queue({job.job_id.partition("_")[0] for job in jobs})
        self._say_why_waiting(queue or [])
        return queue == []

    def _say_why_waiting(self, queue: Sequence[str]) -> None:
        """Where no task has begun, log SLURM's reason, once: some never pass, such as more CPUs than a node has."""
        reasons = ", ".join(sorted({line.partition(" ")[2] for line in queue}))
        if queue and all(line.startswith("PENDING") for line in queue) and reasons != self._told:
            self._told = reasons
            logger.warning(
                "The tasks wait in SLURM's queue (%s); their options are those of --slurm.", reasons
            )

    def _unsettled(self, job: Job[Any]) -> list[ShardReport]:
        error = job.exception() if job.done() else None
        if job.done() and error is None:
            return [ShardReport.from_json(report) for report in job.result()]
        reason = _reason(error) if error is not None else "it ended without a result"
        self.failures.append(
            f"error: task {job.job_id} failed ({reason}): its log is {job.paths.stderr}. Run the same command again "
            "to read the rest of its shards."
        )
        return []


def check_share(urls: Sequence[str], folder: str) -> list[dict[str, Any]]:
    """Read the shards of one task into the store in `folder`; returns the reports that are not kept there."""
    store = VerdictStore(Path(folder))
    reports = read_shards(urls, workers=available_cores(), silence=SILENCE, store=store)
    unsettled = [report.to_json() for report in reports if not report.settled]
    store.close(finished=False)
    return unsettled


def parse_options(options: Sequence[str]) -> dict[str, str]:
    """`KEY=VALUE` strings as a table; raises UserError for another form."""
    table = {}
    for option in options:
        key, sign, value = option.partition("=")
        if not sign or not key.strip() or not value.strip():
            raise UserError(f"--slurm {option} must have the form KEY=VALUE, such as partition=cpu.")
        table[key.strip()] = value.strip()
    return table


def _executor(folder: Path, options: Mapping[str, str]) -> AutoExecutor:
    try:
        from submitit import AutoExecutor
    except ImportError as error:
        raise UserError(
            "--slurm-array needs submitit: run `pip install 'openclip-linattn[cluster]'`."
        ) from error
    # It warns at every look where SLURM keeps no accounts.
    logging.getLogger("submitit").setLevel(logging.ERROR)
    given = {key: _number(value) for key, value in options.items() if key != "cluster"}
    parameters = {**DEFAULTS, **given}
    if "time" in given:
        del parameters["timeout_min"]
    named = {key if key in _GENERAL else f"slurm_{key}": value for key, value in parameters.items()}
    try:
        executor = AutoExecutor(folder=folder, cluster=options.get("cluster", "slurm"))
        executor.update_parameters(**named)
    except (RuntimeError, ValueError, NameError, AssertionError) as error:
        raise UserError(
            f"The tasks cannot be set up with {dict(options)}: {str(error).splitlines()[0]}"
        ) from error
    return executor


def _number(value: str) -> str | int:
    return int(value) if value.isdecimal() else value


def _queue(arrays: set[str]) -> list[str] | None:
    """State and reason of the tasks of these arrays that SLURM still has; None where it does not answer now."""
    command = ["squeue", "--noheader", "--format=%T %r", "--jobs", ",".join(sorted(arrays))]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if answer.returncode:
        return [] if "Invalid job id" in answer.stderr else None
    return answer.stdout.strip().splitlines()


def _reason(error: BaseException) -> str:
    """What ended a task: SLURM's word for it where it has one, and the last line that the task wrote."""
    text = str(error).partition("\nYou can check full logs")[0]
    state = re.search(r"\(state: (\w+)\)", text)
    return f"{state.group(1)}, {_last_line(text)}" if state else _last_line(text)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip(" -")]
    return lines[-1].rstrip(".") if lines else "it says nothing"
