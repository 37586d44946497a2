"""Reads the images of a retrieval set in batches, from files or from their places in tars."""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from openclip_linattn.errors import UserError
from openclip_linattn.zeroshot.reading import DataError, Transform, decode_image


@dataclass(frozen=True, slots=True)
class ImagePlace:
    """Where an image's bytes stand: a whole file (`size` None), or `size` bytes from `offset` of a tar.

    `key` names the image in its set; `suffix` is that of its file, lower-case and without the dot.
    """

    path: Path
    key: str
    suffix: str
    offset: int = 0
    size: int | None = None

    def read(self) -> bytes:
        """Return the image's bytes; raises UserError where they cannot be read or are fewer than stated."""
        try:
            with self.path.open("rb") as stream:
                stream.seek(self.offset)
                data = stream.read(-1 if self.size is None else self.size)
        except OSError as error:
            raise UserError(f"it cannot be read: {error.strerror or error}") from error
        if self.size is not None and len(data) < self.size:
            raise UserError("its tar has become shorter; did it change meanwhile?")
        return data


class _Images(Dataset[Tensor | str]):
    """The transformed images; in place of one that cannot be used, what is wrong with it.

    Raised in a worker, an error would bring the worker's traceback.
    """

    def __init__(self, places: Sequence[ImagePlace], transform: Transform) -> None:
        self.places = places
        self.transform = transform

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> Tensor | str:
        place = self.places[index]
        try:
            return self.transform(decode_image({place.suffix: place.read()}))
        except UserError as error:
            return f"{place.path}: image {place.key!r}: {error}"


def image_batches(
    places: Sequence[ImagePlace], transform: Transform, *, batch_size: int, workers: int
) -> Iterator[Tensor]:
    """Yield the images in order as (B, 3, height, width); raises DataError naming one that cannot be used."""
    with warnings.catch_warnings():
        # More workers than cores are a choice: they help where reading waits for the network.
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        loader = DataLoader(
            _Images(places, transform), batch_size=batch_size, num_workers=workers, collate_fn=_collate
        )
        stream = iter(loader)
    try:
        for batch in stream:
            if isinstance(batch, str):
                raise DataError(batch)
            yield batch
    finally:
        del stream  # ends the workers now: left in a traceback's frame it would outlive its queues


def _collate(items: list[Tensor | str]) -> Tensor | str:
    images: list[Tensor] = []
    for item in items:
        if isinstance(item, str):
            return item
        images.append(item)
    return torch.stack(images)
