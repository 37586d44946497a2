"""The processes that torchrun starts: they share out the images of an evaluation and bring the answers together."""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import zip_longest
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from openclip_linattn.errors import UserError

T = TypeVar("T")
_PATIENCE = timedelta(days=30)  # the others wait for the slowest, which may read millions of images


@dataclass(frozen=True)
class Processes:
    """This process among `count`; alone by default. `local_rank` counts within its machine."""

    rank: int = 0
    count: int = 1
    local_rank: int = 0

    @property
    def first(self) -> bool:
        """Whether this process writes and speaks for all."""
        return self.rank == 0

    def deal(self, n: int, batch_size: int) -> list[range]:
        """Return this process's batches of `n` numbered things.

        Whole batches are dealt, so that what a batch holds does not depend on the number of processes.
        """
        starts = range(self.rank * batch_size, n, self.count * batch_size)
        return [range(start, min(start + batch_size, n)) for start in starts]

    def collect(self, work: Callable[[], T]) -> list[T]:
        """Do `work` in every process and return what each got, by rank, in all of them.

        An error of one ends the work of all, and all raise the same, that of the first process that has one: they go
        on alike whatever is made of it. What is no UserError is one in the other processes.
        """
        if self.count == 1:
            return [work()]
        outcome: T | None = None
        error: Exception | None = None
        try:
            outcome = work()
        except Exception as caught:
            error = caught
        told = error if error is None or isinstance(error, UserError) else self._foreign(error)
        everyone: list[Any] = [None] * self.count
        dist.all_gather_object(everyone, (outcome, told))
        failures = {rank: failure for rank, (_, failure) in enumerate(everyone) if failure is not None}
        if not failures:
            return [each for each, _ in everyone]
        rank = min(failures)
        try:
            raise error if error is not None and rank == self.rank else failures[rank]
        finally:
            # Their tracebacks hold this frame, and with it what the work had open.
            del error, told, failures, everyone

    def _foreign(self, error: Exception) -> UserError:
        return UserError(f"process {self.rank} failed: {type(error).__name__}: {error}")

    def by_first(self, work: Callable[[], T]) -> T:
        """Do `work` in the first process only, and return what it got in all."""
        return self.collect(lambda: work() if self.first else None)[0]  # type: ignore[return-value]

    def device(self, wanted: torch.device) -> torch.device:
        """Return `wanted`, or this process's own card where `wanted` leaves its number open."""
        if self.count == 1 or str(wanted) != "cuda":
            return wanted
        return torch.device("cuda", self.local_rank % torch.cuda.device_count())


ALONE = Processes()


def in_turn(parts: Sequence[Sequence[T]]) -> list[T]:
    """Return what `collect` brought together of batches that were dealt out, in the order before."""
    missing = object()
    turns = zip_longest(*parts, fillvalue=missing)
    return [batch for turn in turns for batch in turn if batch is not missing]  # type: ignore[misc]


def first_process() -> bool:
    """Whether this process is the only one, or the first of those that torchrun started."""
    return not dist.is_torchelastic_launched() or os.environ["RANK"] == "0"


@contextmanager
def joined() -> Iterator[Processes]:
    """Join the processes of torchrun, if there are several, for as long as the block lasts.

    Only answers travel between them, on the CPU, so gloo serves whatever the device is. What is logged below an
    error is logged by the first alone.
    """
    if not dist.is_torchelastic_launched() or os.environ["WORLD_SIZE"] == "1":
        yield Processes()
        return
    dist.init_process_group("gloo", timeout=_PATIENCE)
    log = logging.getLogger("openclip_linattn")
    level = log.level
    try:
        if dist.get_rank():
            log.setLevel(logging.ERROR)
        yield Processes(dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"]))
    finally:
        log.setLevel(level)
        dist.destroy_process_group()
