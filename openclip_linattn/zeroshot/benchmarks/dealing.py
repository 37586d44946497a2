"""Deals the items of a dataset that clip_benchmark built to processes, each item to one."""

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset
from webdataset import WebDataset

from openclip_linattn.zeroshot.processes import Processes


@dataclass(frozen=True)
class Share:
    """A process's part of a stream of items, of which whole batches are dealt."""

    processes: Processes
    batch_size: int

    def __call__(self, stream: Iterable[Any]) -> Iterator[Any]:
        """Yield the items of `stream` that are this process's."""
        for number, item in enumerate(stream):
            if number // self.batch_size % self.processes.count == self.processes.rank:
                yield item


class _SharedStream(IterableDataset[Any]):
    """A process's share of an iterable dataset, which divides itself among the workers as before."""

    def __init__(self, stream: IterableDataset[Any], share: Share) -> None:
        super().__init__()
        self.stream = stream
        self.share = share

    def __iter__(self) -> Iterator[Any]:
        return self.share(self.stream)


def dealt_batches(
    dataset: Dataset[Any],
    collate: Callable[[list[Any]], Any],
    *,
    batch_size: int,
    workers: int,
    processes: Processes,
) -> Iterator[Any]:
    """Return this process's batches of `dataset`; `collate` makes a batch of items that are numbered.

    Whole batches are dealt, so that what a batch holds does not depend on the number of processes. Tars are read by
    every process, and each decodes its share. What only yields decoded items is decoded by each, and encoded once.
    """
    share = Share(processes, batch_size)
    with warnings.catch_warnings():
        # More workers than cores are a choice: they help where reading waits for the network.
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        if isinstance(dataset, WebDataset):
            batched = _share_of_tars(dataset, share).batched(batch_size)
            return iter(DataLoader(batched, batch_size=None, num_workers=workers))
        if isinstance(dataset, IterableDataset):
            stream = _SharedStream(dataset, share)
            return iter(DataLoader(stream, batch_size, num_workers=workers, collate_fn=collate))
        dealt: Any = processes.deal(len(dataset), batch_size)  # type: ignore[arg-type]  # numbered items have a length
        return iter(DataLoader(dataset, batch_sampler=dealt, num_workers=workers, collate_fn=collate))


def _share_of_tars(dataset: Any, share: Share) -> Any:
    """Return `dataset` with a stage that leaves out other processes' samples before their images are decoded."""
    shared = dataset.compose()  # a copy
    # Any WebDataset begins with the list of its tars, their division among processes and workers, and reading.
    reading = len(WebDataset("0.tar", nodesplitter=iter).pipeline)
    shared.pipeline.insert(reading, share)
    return shared
