"""The parts of reading a sample for training, each measured alone in one process on the same samples.

The parts are OpenCLIP's own (open_clip_train/data.py): the tar reader, webdataset's decoders, the training transform,
the tokenizer and the stacking of a batch.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
import webdataset as wds
from open_clip_train.data import filter_no_caption_or_no_image, log_and_continue, tarfile_to_samples_nothrow
from torchvision.transforms import Compose

from openclip_linattn.bench.timing import CpuClock, interleave
from openclip_linattn.data.decoding import IMAGE_SUFFIXES, decode_image
from openclip_linattn.errors import UserError

Sample = dict[str, Any]
Seconds = list[float]


@dataclass(frozen=True)
class Samples:
    """The same samples as the tar holds them and as the decoders leave them."""

    raw: list[Sample]
    decoded: list[Sample]

    @classmethod
    def read(cls, urls: list[str], count: int) -> "Samples":
        """The first `count` samples of the shards that OpenCLIP can decode; raises UserError where there is none."""
        raw, decoded = [], []
        for sample in read_usable(urls, count):
            for result in wds.decode("pilrgb", handler=log_and_continue)(iter([sample])):
                raw.append(sample)
                decoded.append(result)
        if not decoded:
            raise UserError(f"none of the first {count:,} samples of {urls[0]} can be decoded")
        return cls(raw, decoded)


def read_usable(urls: list[str], count: int) -> list[Sample]:
    """The first samples of the shards that have an image and a caption, undecoded."""
    stream = tarfile_to_samples_nothrow({"url": url} for url in urls)
    return list(islice(filter(filter_no_caption_or_no_image, stream), count))


def measure_parts(
    urls: list[str],
    transform: Compose,
    tokenizer: Callable[[str], torch.Tensor],
    *,
    count: int,
    rounds: int,
) -> dict[str, Seconds]:
    """Seconds per sample of every part in every round, over the first `count` samples.

    Raises UserError where none of them decodes.
    """
    samples = Samples.read(urls, count)
    files = [_image(sample) for sample in samples.raw]
    images = [_image(sample) for sample in samples.decoded]
    others = [
        {key: value for key, value in sample.items() if key not in IMAGE_SUFFIXES} for sample in samples.raw
    ]
    captions = [sample["txt"] for sample in samples.decoded]
    pixels = [transform(image) for image in images]
    parts: dict[str, Callable[[], Any]] = {
        "tar": lambda: read_usable(urls, count),
        "image decoding": lambda: [decode_image(data) for data in files],
        "other members": lambda: list(wds.decode("pilrgb", handler=log_and_continue)(iter(others))),
        **_steps(transform, images),
        "tokenizer": lambda: [tokenizer(caption)[0] for caption in captions],
        "batch": lambda: torch.stack(pixels),
    }
    times = interleave(parts, CpuClock(), rounds=rounds, seconds=math.inf)
    return {part: [seconds / len(files) for seconds in times[part]] for part in parts}


def _steps(transform: Compose, images: list[Any]) -> dict[str, Callable[[], Any]]:
    """Every step of the transform over what the steps before it made of the images, by the step's class."""
    steps: dict[str, Callable[[], Any]] = {}
    for step in transform.transforms:
        steps[type(step).__name__] = partial(_each, step, images)
        images = _each(step, images)
    return steps


def _each(step: Callable[[Any], Any], images: list[Any]) -> list[Any]:
    return [step(image) for image in images]


def _image(sample: Sample) -> Any:
    return next(sample[suffix] for suffix in IMAGE_SUFFIXES if suffix in sample)
