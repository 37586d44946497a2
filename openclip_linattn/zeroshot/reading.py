"""Streams an evaluation set in batches; what is wrong with a sample stops the evaluation by name."""

import io
import os
import tarfile
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from webdataset.tariterators import group_by_keys, tar_file_expander

from openclip_linattn.errors import UserError
from openclip_linattn.zeroshot.labels import LabelSet
from openclip_linattn.zeroshot.sets import EvaluationSet, FolderSet, ShardSet

IMAGE_MEMBERS = ("webp", "png", "jpg", "jpeg")  # clip_benchmark's, in its order
Transform = Callable[[Image.Image], Tensor]


class DataError(UserError):
    """A sample or a shard of an evaluation set that cannot be evaluated."""


class Batch(NamedTuple):
    """Images (B, 3, height, width), class indices in every label set (B, L), and what names each image."""

    images: Tensor
    labels: Tensor
    keys: list[str]


@dataclass(frozen=True)
class _Failure:
    """What is wrong, passed on as an item: raised in a worker, it would bring the worker's traceback."""

    reason: str


_Item = tuple[Tensor, Tensor, str]


class FolderImages(Dataset[_Item | _Failure]):
    """Image files by number: (image (3, height, width), class index in every label set (L,), path in the set)."""

    def __init__(self, data: FolderSet, transform: Transform) -> None:
        super().__init__()
        self.folders = data.folders
        self.labels = torch.tensor(data.columns)
        self.transform = transform

    def __len__(self) -> int:
        return len(self.folders.files)

    def __getitem__(self, index: int) -> _Item | _Failure:
        key = self.folders.path(index)
        path = self.folders.root / key
        try:
            image = _open_rgb(path)
        except Exception as error:  # a broken file makes Pillow raise many kinds, SyntaxError among them
            return _Failure(f"{path} cannot be read as an image ({error}); replace it")
        return self.transform(image), self.labels[:, int(self.folders.folder_of[index])], key


class ShardImages(IterableDataset[_Item | _Failure]):
    """Yields (image (3, height, width), class index in every label set (L,), shard/key) for each sample once.

    Shards are read in order and dealt out to the workers, so that more workers than shards is harmless.
    """

    def __init__(
        self, shards: tuple[Path, ...], label_sets: tuple[LabelSet, ...], transform: Transform
    ) -> None:
        super().__init__()
        self.shards = shards
        self.label_sets = label_sets
        self.transform = transform
        self.root = os.path.commonpath([shard.parent for shard in shards])

    def __iter__(self) -> Iterator[_Item | _Failure]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for shard in self.shards[first::step]:
            yield from self._read(shard)

    def _read(self, shard: Path) -> Iterator[_Item | _Failure]:
        try:
            with shard.open("rb") as stream:
                members = tar_file_expander([{"url": str(shard), "stream": stream}])
                for sample in group_by_keys(members):
                    yield self._item(shard, sample)
        except (tarfile.TarError, OSError, EOFError, zlib.error, ValueError) as error:
            reason = error.args[0] if error.args else error
            yield _Failure(f"{shard} cannot be read to its end: {reason}")

    def _item(self, shard: Path, sample: Mapping[str, Any]) -> _Item | _Failure:
        try:
            labels = [label_set.class_of(sample) for label_set in self.label_sets]
            image = self.transform(decode_image(sample))
        except UserError as error:
            return _Failure(f"{shard}: sample {sample['__key__']!r}: {error}")
        return image, torch.tensor(labels), f"{shard.relative_to(self.root)}/{sample['__key__']}"


def decode_image(sample: Mapping[str, Any]) -> Image.Image:
    """Return the RGB image of a sample (suffix -> bytes); raises UserError where it is absent or broken."""
    suffix = next((each for each in IMAGE_MEMBERS if each in sample), None)
    if suffix is None:
        seen = ", ".join(key for key in sample if not key.startswith("__")) or "none"
        raise UserError(f"it has no image ({', '.join(IMAGE_MEMBERS)}); members seen: {seen}")
    try:
        return _open_rgb(io.BytesIO(sample[suffix]))
    except Exception as error:  # a broken file makes Pillow raise many kinds, SyntaxError among them
        raise UserError(f"its {suffix} does not decode ({error})") from error


def _open_rgb(source: Path | io.BytesIO) -> Image.Image:
    with Image.open(source) as image:
        return image.convert("RGB")


def keyed_batches(
    data: EvaluationSet, transform: Transform, *, batch_size: int, workers: int
) -> Iterator[Batch]:
    """Yield the batches of `data`, every image once; L of `Batch` are the label sets of `data`.

    Raises DataError naming file, or shard and key, of an image without a label, that cannot be read or with
    a label out of range, and when fewer or more images arrive than were counted.
    """
    with warnings.catch_warnings():
        # More workers than cores are a choice: they help where reading waits for the network.
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        stream = iter(_loader(data, transform, batch_size, workers))
    seen = 0
    try:
        for batch in stream:
            if isinstance(batch, _Failure):
                raise DataError(batch.reason)
            seen += len(batch.images)
            yield batch
    finally:
        # Ends the workers now. Left in the frame of a traceback, the iterator would be collected as part
        # of a cycle, after its queues, and then wait five seconds for each worker that it cannot reach.
        del stream
    if seen != data.n:
        raise DataError(
            f"{data.source}: {seen} of {data.n} samples arrived; did the shards change meanwhile?"
        )


def _loader(data: EvaluationSet, transform: Transform, batch_size: int, workers: int) -> DataLoader[Any]:
    """Deal out batches of files to the workers, or whole shards, as many workers as there are of these."""
    images: Dataset[_Item | _Failure]
    if isinstance(data, FolderSet):
        images, parts = FolderImages(data, transform), -(-data.n // batch_size)
    elif isinstance(data, ShardSet):
        images, parts = ShardImages(data.shards, data.label_sets, transform), len(data.shards)
    else:
        raise TypeError(f"no way to read a {type(data).__name__}")
    return DataLoader(images, batch_size=batch_size, num_workers=min(workers, parts), collate_fn=_collate)


def _collate(items: list[_Item | _Failure]) -> Batch | _Failure:
    good: list[_Item] = []
    for item in items:
        if isinstance(item, _Failure):
            return item
        good.append(item)
    images, labels, keys = zip(*good, strict=True)
    return Batch(torch.stack(images), torch.stack(labels), list(keys))
