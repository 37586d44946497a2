"""Streams an evaluation set in batches; what is wrong with a sample stops the evaluation by name."""

import io
import os
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from webdataset.tariterators import group_by_keys, tar_file_expander

from openclip_linattn.errors import UserError
from openclip_linattn.zeroshot.processes import ALONE, Processes
from openclip_linattn.zeroshot.sets.kinds import EvaluationSet, FolderSet, ShardSet
from openclip_linattn.zeroshot.sets.labels import LabelSet
from openclip_linattn.zeroshot.sets.streaming import DataError, Failure, batches_of_files, batches_of_streams

IMAGE_MEMBERS = ("webp", "png", "jpg", "jpeg")  # clip_benchmark's, in its order
Transform = Callable[[Image.Image], Tensor]


class Batch(NamedTuple):
    """Images (B, 3, height, width), class indices in every label set (B, L), and what names each image."""

    images: Tensor
    labels: Tensor
    keys: list[str]


Item = tuple[Tensor, Tensor, str]


class FolderImages(Dataset[Item | Failure]):
    """Image files by number: (image (3, height, width), class index in every label set (L,), path in the set)."""

    def __init__(self, data: FolderSet, transform: Transform) -> None:
        super().__init__()
        self.folders = data.folders
        self.labels = torch.tensor(data.columns)
        self.transform = transform

    def __len__(self) -> int:
        return len(self.folders.files)

    def __getitem__(self, index: int) -> Item | Failure:
        key = self.folders.path(index)
        path = self.folders.root / key
        try:
            image = _open_rgb(path)
        except Exception as error:  # a broken file makes Pillow raise many kinds, SyntaxError among them
            return Failure(f"{path} cannot be read as an image ({error}); replace it")
        return self.transform(image), self.labels[:, int(self.folders.folder_of[index])], key


class ShardImages(IterableDataset[Item | Failure]):
    """Yields (image (3, height, width), class index in every label set (L,), shard/key) for each sample once.

    Shards are read in order and dealt out to the workers, so that more workers than shards is harmless.
    """

    def __init__(
        self, shards: tuple[Path, ...], label_sets: tuple[LabelSet, ...], transform: Transform, root: str
    ) -> None:
        super().__init__()
        self.shards = shards
        self.label_sets = label_sets
        self.transform = transform
        self.root = root

    def __iter__(self) -> Iterator[Item | Failure]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for shard in self.shards[first::step]:
            yield from self._read(shard)

    def _read(self, shard: Path) -> Iterator[Item | Failure]:
        try:
            with shard.open("rb") as stream:
                members = tar_file_expander([{"url": str(shard), "stream": stream}])
                for sample in group_by_keys(members):
                    yield self._item(shard, sample)
        except (tarfile.TarError, OSError, EOFError, zlib.error, ValueError) as error:
            reason = error.args[0] if error.args else error
            yield Failure(f"{shard} cannot be read to its end: {reason}")

    def _item(self, shard: Path, sample: Mapping[str, Any]) -> Item | Failure:
        try:
            labels = [label_set.class_of(sample) for label_set in self.label_sets]
            image = self.transform(decode_image(sample))
        except UserError as error:
            return Failure(f"{shard}: sample {sample['__key__']!r}: {error}")
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
    data: EvaluationSet,
    transform: Transform,
    *,
    batch_size: int,
    workers: int,
    processes: Processes = ALONE,
) -> Iterator[Batch]:
    """Yield this process's batches of `data`, every image once over all; L of `Batch` are the label sets of `data`.

    Raises DataError naming file, or shard and key, of an image without a label, that cannot be read or with a label
    out of range, and, in a process alone, what `check_count` raises.
    """
    seen = 0
    for batch in _batches(data, transform, batch_size, workers, processes):
        seen += len(batch.images)
        yield batch
    if processes.count == 1:
        check_count(data, seen)


def check_count(data: EvaluationSet, seen: int) -> None:
    """Raise DataError where fewer or more images arrived than were counted."""
    if seen != data.n:
        raise DataError(
            f"{data.source}: {seen} of {data.n} samples arrived; did the shards change meanwhile?"
        )


def _batches(
    data: EvaluationSet, transform: Transform, batch_size: int, workers: int, processes: Processes
) -> Iterator[Batch]:
    """Deal out batches of files to the processes and workers, or whole shards."""
    if isinstance(data, FolderSet):
        files = FolderImages(data, transform)
        return batches_of_files(
            files, data.n, _merge, batch_size=batch_size, workers=workers, processes=processes
        )
    if isinstance(data, ShardSet):
        shards = data.shards[processes.rank :: processes.count]
        root = os.path.commonpath([shard.parent for shard in data.shards])
        images = ShardImages(shards, data.label_sets, transform, root)
        return batches_of_streams(images, len(shards), _merge, batch_size=batch_size, workers=workers)
    raise TypeError(f"no way to read a {type(data).__name__}")


def _merge(items: list[Item]) -> Batch:
    images, labels, keys = zip(*items, strict=True)
    return Batch(torch.stack(images), torch.stack(labels), list(keys))
