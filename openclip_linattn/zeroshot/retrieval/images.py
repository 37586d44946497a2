"""Reads the images of a retrieval set in batches, from files or from their places in tars."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from openclip_linattn.errors import UserError
from openclip_linattn.zeroshot.processes import Processes
from openclip_linattn.zeroshot.sets.reading import Transform, decode_image
from openclip_linattn.zeroshot.sets.streaming import Failure, batches_of_files


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


class _Images(Dataset[Tensor | Failure]):
    """The transformed images; in place of one that cannot be used, what is wrong with it."""

    def __init__(self, places: Sequence[ImagePlace], transform: Transform) -> None:
        self.places = places
        self.transform = transform

    def __getitem__(self, index: int) -> Tensor | Failure:
        place = self.places[index]
        try:
            return self.transform(decode_image({place.suffix: place.read()}))
        except UserError as error:
            return Failure(f"{place.path}: image {place.key!r}: {error}")


def image_batches(
    places: Sequence[ImagePlace],
    transform: Transform,
    *,
    batch_size: int,
    workers: int,
    processes: Processes,
) -> Iterator[Tensor]:
    """Yield this process's batches (B, 3, height, width) in order, as `batches_of_files` deals them.

    Raises DataError naming an image that cannot be used.
    """
    images = _Images(places, transform)
    return batches_of_files(
        images, len(places), torch.stack, batch_size=batch_size, workers=workers, processes=processes
    )
