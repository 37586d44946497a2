"""Processes that read shards: results come as they are done, and a process that dies is named by its shard."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from openclip_linattn.errors import UserError

Task = TypeVar("Task")
Result = TypeVar("Result")

# So many deaths without a result between them mean that no process can work here at all.
MAX_DEATHS = 16
PATIENCE = 300.0  # seconds without any result, after which it is said what is waited for
_GRACE = 5.0  # seconds in which a process can end what it has begun
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_LOG = logging.getLogger(__name__)


class DeadProcess(Exception):  # noqa: N818 - says what it is
    """The process that had a task ended before it answered; the message says how."""


def available_cores() -> int:
    """Cores that this process may use, which a batch system may have limited."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # SLURM does not bind tasks to their cores on every cluster.
    granted = os.environ.get("SLURM_CPUS_PER_TASK", "")
    return min(cores, int(granted)) if granted.isdecimal() and int(granted) else cores


def map_unordered(
    work: Callable[[Task], Result],
    tasks: Sequence[Task],
    processes: int,
    *,
    name: Callable[[Task], str] = str,
) -> Generator[tuple[Task, Result | DeadProcess]]:
    """Yield (task, work(task)) in the order in which `processes` processes finish.

    `work` must not raise. A process that dies (killed, out of memory) yields DeadProcess with its task, and
    another takes its place; after 16 such in succession the iteration ends. Tasks that hold everything up are
    named in a warning. When the iteration is closed early, or the process that iterates is killed, the processes
    end too. Raises UserError where the machine does not run so many processes.
    """
    waiting = iter(tasks)
    workers: list[_Worker] = []
    deaths = 0
    try:
        _start(workers, work, min(processes, len(tasks)))
        busy = {worker.pipe: worker for worker in workers if worker.give(waiting)}
        while busy and deaths < MAX_DEATHS:
            ready = wait(list(busy), PATIENCE)
            if not ready:
                _LOG.warning("still reading: %s", ", ".join(name(worker.task) for worker in busy.values()))
            for pipe in ready:
                worker = busy.pop(pipe)  # type: ignore[call-overload]
                task, result = worker.task, worker.answer()
                deaths = deaths + 1 if isinstance(result, DeadProcess) else 0
                if deaths:
                    workers.remove(worker)
                    worker = _Worker(work)
                    workers.append(worker)
                if worker.give(waiting):
                    busy[worker.pipe] = worker
                yield task, result
    finally:
        _end(workers)


def _start(workers: list[_Worker], work: Callable[[Any], Any], count: int) -> None:
    """Add `count` processes to `workers`; those before one that does not start are in it when this raises."""
    try:
        workers.extend(_Worker(work) for _ in range(count))
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"{count:,} processes cannot be started ({reason}): give fewer --workers.") from error


def _end(workers: Sequence[_Worker]) -> None:
    """End the processes; one that hangs in the file system is not waited for."""
    for worker in workers:
        worker.pipe.close()
        worker.process.terminate()
    deadline = time.monotonic() + _GRACE
    for worker in workers:
        worker.process.join(max(0, deadline - time.monotonic()))
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join(_GRACE)


class _Worker:
    """One process and the pipe to it; it ends by itself when the pipe is closed."""

    def __init__(self, work: Callable[[Any], Any]) -> None:
        # A forked child would inherit the threads of whatever the caller has loaded.
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, work), daemon=True)
        with _signals_wait():
            self.process.start()
        theirs.close()
        self.task: Any = None

    def give(self, tasks: Iterator[Any]) -> bool:
        """Hand over the next task; False where there is none."""
        for self.task in tasks:
            with suppress(OSError):  # a process that is dead already says so when it is asked for its answer
                self.pipe.send(self.task)
            return True
        return False

    def answer(self) -> Any:
        """The result, or DeadProcess."""
        try:
            return self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(_GRACE)
            _end([self])
            return DeadProcess(_ending(self.process.exitcode))


@contextmanager
def _signals_wait() -> Iterator[None]:
    """SIGINT and SIGTERM come after the block; to a process that is started in it, once it lets them through."""
    # Started with the first process otherwise, the tracker would let the signals through.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(pipe: Connection, work: Callable[[Any], Any]) -> None:
    # A Ctrl-C goes to every process of the terminal, and the parent deals with it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        with suppress(EOFError, OSError):
            while True:
                pipe.send(work(pipe.recv()))
    except SystemExit:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTERM)


def _leave(*_: object) -> None:
    """Unwind what is under way, so that commands end and unfinished files go."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)


def _ending(status: int | None) -> str:
    if status is None or status >= 0:
        return f"with exit status {status}"
    name = signal.Signals(-status).name
    return f"by {name}" + (", perhaps for want of memory" if name == "SIGKILL" else "")
