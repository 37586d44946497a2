"""Items of clip_benchmark's datasets among processes: each to one, and decoded by no other."""

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from clip_benchmark.datasets.builder import build_wds_dataset
from PIL import Image
from torch.utils.data import Dataset, IterableDataset, default_collate, get_worker_info

from openclip_linattn.zeroshot.benchmarks.dealing import dealt_batches
from openclip_linattn.zeroshot.processes import Processes, in_turn

COUNT = 3

# clip_benchmark leaves shards to be closed by the collector.
pytestmark = pytest.mark.filterwarnings(r"ignore:unclosed file .*\.tar'>:ResourceWarning")


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """Collects what a test leaves behind while its filters for warnings hold."""
    yield
    gc.collect()


class Numbered(Dataset[int]):
    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> int:
        return index


class Streamed(IterableDataset[int]):
    """Divides itself among workers, as clip_benchmark's sets from TFDS do."""

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return iter(range(first, 23, step))

    def __len__(self) -> int:
        return 23


def parts(dataset: Any, workers: int) -> list[list[list[int]]]:
    """The batches of every process."""
    return [
        [
            batch.tolist()
            for batch in dealt_batches(
                dataset, default_collate, batch_size=4, workers=workers, processes=Processes(rank, COUNT)
            )
        ]
        for rank in range(COUNT)
    ]


@pytest.mark.parametrize("workers", [0, 2])
def test_numbered_items_are_dealt_in_whole_batches(workers: int) -> None:
    found = in_turn(parts(Numbered(), workers))
    assert found == [list(range(start, min(start + 4, 23))) for start in range(0, 23, 4)]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_is_dealt_in_the_batches_of_one_process(workers: int) -> None:
    dealt = dealt_batches(Streamed(), default_collate, batch_size=4, workers=workers, processes=Processes())
    alone = [batch.tolist() for batch in dealt]
    found = parts(Streamed(), workers)
    assert sorted(batch for part in found for batch in part) == sorted(alone)
    assert all(found)
    if not workers:
        assert in_turn(found) == alone


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_of_a_tar_is_decoded_in_one_process(
    tmp_path: Path, make: Any, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    folder = make.set(tmp_path / "set", make.samples(23), shards=2)
    decoded: list[int] = []

    def transform(image: Image.Image) -> torch.Tensor:
        decoded.append(1)
        return torch.tensor(image.getpixel((0, 0)))

    def build() -> Any:
        return build_wds_dataset("set", transform, data_dir=str(folder))

    seen: list[tuple[int, ...]] = []
    for rank in range(COUNT):
        for images, _labels in dealt_batches(
            build(), default_collate, batch_size=4, workers=workers, processes=Processes(rank, COUNT)
        ):
            seen += [tuple(pixel) for pixel in images.tolist()]
    every = [tuple(image.tolist()) for image, _ in build()]
    assert sorted(seen) == sorted(every)
    assert len(every) == 23
    if not workers:
        assert len(decoded) == 2 * 23  # once by the processes, once here


def test_batches_stand_in_the_order_in_which_they_were_dealt() -> None:
    assert in_turn([[0, 3, 6], [1, 4], [2, 5]]) == list(range(7))
    assert in_turn([[None], []]) == [None]
    assert json.dumps(in_turn([[], []])) == "[]"
