"""The images of an evaluation set that an analysis looks at, with labels and boxes."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw
from torch import Tensor

from openclip_linattn.analysis.voc_boxes import Box, VocBoxes
from openclip_linattn.data.reading import RawSample, ShardLog, read_samples
from openclip_linattn.errors import UserError
from openclip_linattn.zeroshot.sets.dataset import open_evaluation_set
from openclip_linattn.zeroshot.sets.folders import IMAGE_SUFFIXES
from openclip_linattn.zeroshot.sets.kinds import EvaluationSet, FolderSet, ShardSet
from openclip_linattn.zeroshot.sets.labels import LabelSet
from openclip_linattn.zeroshot.sets.reading import Transform, decode_image


@dataclass(frozen=True)
class Picture:
    """An image as it is stored, what names it, its class in every label set, and boxes in its own pixels."""

    key: str
    image: Image.Image
    labels: tuple[int, ...] = ()
    boxes: tuple[Box, ...] = ()


@dataclass(frozen=True)
class PictureSource:
    """Images to look at: an evaluation set, or image files without labels; `voc` holds boxes from XML files."""

    name: str
    count: int
    data: EvaluationSet | None = None
    files: tuple[Path, ...] = ()
    voc: VocBoxes | None = None

    @property
    def label_sets(self) -> tuple[LabelSet, ...]:
        """The label sets of the evaluation set; none for plain files."""
        return () if self.data is None else self.data.label_sets

    def pictures(self, most: int) -> Iterator[Picture]:
        """Yield `most` images, or all where there are fewer, spread evenly over the set.

        A sample's boxes are those of the XML file named like it, where a folder of such files was given, and else
        the `bbox` [x0, y0, x1, y1] of its json member, x1 and y1 exclusive. Raises UserError, naming the image, for
        one that cannot be read.
        """
        wanted = set(np.linspace(0, self.count - 1, min(most, self.count)).round().astype(int).tolist())
        if isinstance(self.data, ShardSet):
            yield from (self._sample(self.data, *each) for each in _chosen_samples(self.data, wanted))
        elif isinstance(self.data, FolderSet):
            yield from (self._file(self.data, index) for index in sorted(wanted))
        else:
            for index in sorted(wanted):
                yield Picture(self.files[index].name, _read(self.files[index]))

    def _sample(self, data: ShardSet, shard: Path, sample: RawSample) -> Picture:
        where = f"{shard}: sample {sample.key!r}"
        try:
            image = decode_image(sample.members)
            labels = tuple(label_set.class_of(sample.members) for label_set in data.label_sets)
        except UserError as error:
            raise UserError(f"{where}: {error}") from error
        if self.voc is not None:
            return Picture(sample.key, image, labels, self.voc.of(Path(sample.key).name, image))
        return Picture(sample.key, image, labels, _json_boxes(where, sample.members))

    def _file(self, data: FolderSet, index: int) -> Picture:
        key = data.folders.path(index)
        image = _read(data.folders.root / key)
        labels = tuple(column[int(data.folders.folder_of[index])] for column in data.columns)
        boxes = () if self.voc is None else self.voc.of(Path(key).stem, image)
        return Picture(key, image, labels, boxes)


def open_pictures(
    source: str, *, label_sets: Sequence[str] = (), boxes: Path | None = None, **options: Any
) -> PictureSource:
    """Open an evaluation set (see `open_evaluation_set`, which takes `options`), an image file or a folder of such.

    `boxes` is a folder with one XML file in VOC's form per image, as ImageNet's. Raises UserError for what is neither.
    """
    path = Path(source)
    if path.suffix.lower() in IMAGE_SUFFIXES and not path.exists():
        raise UserError(f"the image {source} does not exist")
    files = _plain_files(path)
    if files and not label_sets and boxes is None:
        return PictureSource(path.name, len(files), files=files)
    data = open_evaluation_set(source, label_sets=label_sets, **options)
    return PictureSource(data.name, data.n, data, voc=None if boxes is None else VocBoxes(boxes))


class Canvas:
    """What a model's preprocessing does to colours and boxes, found by preprocessing black, white and masks."""

    def __init__(self, transform: Transform) -> None:
        self.transform = transform
        self._black, self._white = (
            transform(Image.new("RGB", (64, 64), color)).mean((-2, -1), keepdim=True)
            for color in ("black", "white")
        )

    def colors(self, images: Tensor) -> Tensor:
        """Preprocessed images (..., 3, height, width) as colours from 0 to 1."""
        return ((images - self._black) / (self._white - self._black)).clamp(0, 1)

    def inside(self, picture: Picture) -> Tensor:
        """Where the preprocessed image lies in one of the picture's boxes by half a pixel or more, (height, width)."""
        mask = Image.new("RGB", picture.image.size)
        draw = ImageDraw.Draw(mask)
        for box in picture.boxes:
            left, top, right, bottom = (round(edge) for edge in box)
            draw.rectangle((left, top, max(left, right - 1), max(top, bottom - 1)), fill="white")
        return self.colors(self.transform(mask))[0] >= 0.5


def _plain_files(path: Path) -> tuple[Path, ...]:
    if path.is_file() and path.suffix.lower() in IMAGE_SUFFIXES:
        return (path,)
    if not path.is_dir():
        return ()
    # Hidden folders and files are those of the user's tools (.ipynb_checkpoints) and of macOS (._cat.jpg).
    seen = [each for each in path.iterdir() if not each.name.startswith(".")]
    if any(each.is_dir() for each in seen):
        return ()
    return tuple(sorted(each for each in seen if each.is_file() and each.suffix.lower() in IMAGE_SUFFIXES))


def _chosen_samples(data: ShardSet, wanted: set[int]) -> Iterator[tuple[Path, RawSample]]:
    number = 0
    for shard in data.shards:
        log = ShardLog()
        for sample in read_samples(str(shard), log):
            if number in wanted:
                yield shard, sample
            number += 1
            if number > max(wanted):
                return
        if log.fault is not None:
            raise UserError(f"{shard} {log.fault}; fetch or write it again")


def _json_boxes(where: str, members: Mapping[str, bytes]) -> tuple[Box, ...]:
    if "json" not in members:
        return ()
    try:
        box = json.loads(members["json"]).get("bbox")
    except (ValueError, AttributeError) as error:
        raise UserError(f"{where}: its json member cannot be read ({error})") from error
    if box is None:
        return ()
    numbers = isinstance(box, list) and len(box) == 4 and all(isinstance(each, (int, float)) for each in box)
    if not (numbers and box[0] < box[2] and box[1] < box[3]):
        raise UserError(
            f"{where}: its bbox is {box!r}; it must be [x0, y0, x1, y1] in pixels, x0 < x1 and y0 < y1"
        )
    return ((box[0], box[1], box[2], box[3]),)


def _read(path: Path) -> Image.Image:
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except Exception as error:  # a broken file makes Pillow raise many kinds
        raise UserError(f"{path} cannot be read as an image ({error}); replace it") from error
