"""Shares the tasks of a pass among processes."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from functools import partial
from operator import attrgetter
from typing import Protocol, TypeVar

from openclip_linattn.data.shard_pool import DeadProcess, map_unordered


class Unfinished(Exception):  # noqa: N818 - says what it is
    """The cleaning could not be completed, explained in sentences; what was done stays, and is gone on from."""


class Named(Protocol):
    """A task that can say what it is about."""

    @property
    def name(self) -> str:
        """The shard, as it stands in sentences."""


Task = TypeVar("Task", bound=Named)
Result = TypeVar("Result")


def share(
    work: Callable[[Task], Result], tasks: Sequence[Task], workers: int, take: Callable[[Result], None]
) -> list[str]:
    """Do all tasks in `workers` processes, and `take` each result as it comes, in any order.

    Returns the sentences of those that were Unfinished, or whose process was killed; the others go on. Raises
    Unfinished where one process after the other is killed, and any other exception of a task.
    """
    failures = []
    done = 0
    with closing(_results(partial(_attempt, work), tasks, min(workers, len(tasks)))) as results:
        for task, result in results:
            done += 1
            if isinstance(result, DeadProcess):
                failures.append(f"the process that had {task.name} ended {result}")
            elif isinstance(result, Unfinished):
                failures.append(str(result))
            elif isinstance(result, Exception):
                raise result
            else:
                take(result)
    if done < len(tasks):
        raise Unfinished(
            f"One process after the other was ended, and {len(tasks) - done:,} tasks were given up ({failures[-1]}): "
            "give fewer --workers, and run the same command again to go on."
        )
    return failures


def _results(
    attempt: Callable[[Task], Result | Exception], tasks: Sequence[Task], workers: int
) -> Generator[tuple[Task, Result | Exception]]:
    if workers > 1:
        yield from map_unordered(attempt, tasks, workers, name=attrgetter("name"))
    else:
        yield from ((task, attempt(task)) for task in tasks)


def _attempt(work: Callable[[Task], Result], task: Task) -> Result | Exception:
    """Do one task; an exception is its result, which a process can hand over."""
    try:
        return work(task)
    except Exception as error:
        return error
