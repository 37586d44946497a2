"""Batches from worker processes; what is wrong with an item ends them with its sentence."""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from torch.utils.data import DataLoader, Dataset, IterableDataset

from openclip_linattn.errors import UserError
from openclip_linattn.zeroshot.processes import Processes

Item = TypeVar("Item")
Merged = TypeVar("Merged")


class DataError(UserError):
    """A sample or a shard of an evaluation set that cannot be evaluated."""


@dataclass(frozen=True)
class Failure:
    """What is wrong, passed on as an item: raised in a worker, it would bring the worker's traceback."""

    reason: str


def batches_of_files(
    images: Dataset[Item | Failure],
    n: int,
    merge: Callable[[list[Item]], Merged],
    *,
    batch_size: int,
    workers: int,
    processes: Processes,
) -> Iterator[Merged]:
    """Yield what `merge` makes of each of this process's batches of `n` numbered images, in order.

    Raises DataError where an item is a Failure.
    """
    dealt = processes.deal(n, batch_size)
    return _stream(images, merge, workers=min(workers, len(dealt)), batch_sampler=dealt)


def batches_of_streams(
    images: IterableDataset[Item | Failure],
    streams: int,
    merge: Callable[[list[Item]], Merged],
    *,
    batch_size: int,
    workers: int,
) -> Iterator[Merged]:
    """The same for images that can only be read one after another, in `streams` independent parts."""
    return _stream(images, merge, workers=min(workers, streams), batch_size=batch_size)


def _stream(
    images: Dataset[Any],
    merge: Callable[[list[Item]], Merged],
    *,
    workers: int,
    batch_size: int = 1,
    batch_sampler: Any = None,
) -> Iterator[Merged]:
    with warnings.catch_warnings():
        # More workers than cores are a choice: they help where reading waits for the network.
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        loader: DataLoader[Any] = DataLoader(
            images,
            batch_size=batch_size,
            batch_sampler=batch_sampler,
            num_workers=workers,
            collate_fn=partial(_merged, merge),
        )
        stream = iter(loader)
    try:
        for batch in stream:
            if isinstance(batch, Failure):
                raise DataError(batch.reason)
            yield batch
    finally:
        # Ends the workers now. Left in the frame of a traceback, the iterator would be collected as part
        # of a cycle, after its queues, and then wait five seconds for each worker that it cannot reach.
        del stream


def _merged(merge: Callable[[list[Item]], Merged], items: list[Item | Failure]) -> Merged | Failure:
    good: list[Item] = []
    for item in items:
        if isinstance(item, Failure):
            return item
        good.append(item)
    return merge(good)
