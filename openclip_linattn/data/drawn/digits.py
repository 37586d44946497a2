"""A captioned set of real images: the 1,797 handwritten digits of scikit-learn's `load_digits`.

Alpaydin and Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from openclip_linattn.data.drawn.build import (
    BuildResult,
    Recipe,
    build,
    check_image_size,
    check_seed,
    no_progress,
)
from openclip_linattn.data.drawn.drawing import encode_jpeg
from openclip_linattn.data.layout import Part, Sample, check_part_sizes
from openclip_linattn.errors import UserError

VERSION = 1
MAX_GREY = 16  # load_digits counts 0 to 16

SHIFT_JITTER = 0.06  # share of the image's side
ANGLE_JITTER = 0.15  # radians
SCALE_JITTER = 0.1

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TEMPLATES = ("a handwritten digit {c}", "the number {c}", "a photo of the digit {c}")
CAPTIONS = (*TEMPLATES, "the handwritten number {c}", "a gray image of the digit {c}", "{c}, written by hand")
LABEL_SETS = {"digit": {"classes": list(NAMES), "templates": list(TEMPLATES), "fields": ["digit"]}}


IMAGES = 1797
TEST_IMAGES = 360


def sample_count(repeat: int) -> int:
    """Samples that `write_digits` writes, training and test together."""
    return (IMAGES - TEST_IMAGES) * repeat + TEST_IMAGES


@lru_cache(maxsize=1)
def _load() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    from sklearn.datasets import load_digits  # slow to import, and needed only here

    digits = load_digits()
    return digits.images, digits.target


@lru_cache(maxsize=4)
def split(seed: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Indices into `load_digits` of the 1,437 training and the 360 test images, shuffled.

    Both hold every digit in the same proportion.
    """
    from sklearn.model_selection import train_test_split

    _, target = _load()
    train, test = train_test_split(
        np.arange(len(target)), test_size=TEST_IMAGES, random_state=seed, stratify=target
    )
    return tuple(int(i) for i in train), tuple(int(i) for i in test)


def _jitter(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    """Turn, scale and shift the image a little around its center; what comes in from outside is black."""
    side = image.width
    angle = rng.uniform(-ANGLE_JITTER, ANGLE_JITTER)
    scale = 1 + rng.uniform(-SCALE_JITTER, SCALE_JITTER)
    shift = rng.uniform(-SHIFT_JITTER, SHIFT_JITTER, 2) * side
    cos, sin = math.cos(angle) / scale, math.sin(angle) / scale
    middle = side / 2
    x0 = middle - cos * (middle + shift[0]) - sin * (middle + shift[1])
    y0 = middle + sin * (middle + shift[0]) - cos * (middle + shift[1])
    matrix = (cos, sin, x0, -sin, cos, y0)
    return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.BICUBIC)


def digit_sample(index: int, *, seed: int, image_size: int = 64, test: bool = False) -> Sample:
    """Sample number `index` of a split: an 8 x 8 grey image enlarged to an RGB JPEG of `image_size` pixels.

    Training indices beyond the split's length repeat it, with a small jitter of place, size and angle and
    another caption. Attributes: digit (its name), digit_value, source_index, repeat, width, height, seed.
    """
    images, target = _load()
    indices = split(seed)[1 if test else 0]
    repeat, place = divmod(index, len(indices))
    source = indices[place]
    rng = np.random.default_rng([seed, int(test), index])
    grey = np.round(images[source] * (255 / MAX_GREY)).astype(np.uint8)
    image = Image.fromarray(grey).resize((image_size, image_size), Image.Resampling.BICUBIC)
    if repeat:
        image = _jitter(image, rng)
    value = int(target[source])
    templates = TEMPLATES if test else CAPTIONS
    # Each repetition moves on by one template, so an image's captions differ as long as there are templates.
    first = np.random.default_rng([seed, int(test), place]).integers(len(templates))
    text = templates[(int(first) + repeat) % len(templates)].format(c=NAMES[value])
    attributes = {
        "digit": NAMES[value],
        "digit_value": value,
        "source_index": source,
        "repeat": repeat,
        "width": image_size,
        "height": image_size,
        "seed": seed,
    }
    return Sample(encode_jpeg(image.convert("RGB")), text, attributes, value if test else None)


def _parts(out: Path, parameters: Mapping[str, Any]) -> list[Part]:
    train, test = split(parameters["seed"])
    make = partial(digit_sample, seed=parameters["seed"], image_size=parameters["image_size"])
    per_shard = parameters["samples_per_shard"]
    return [
        Part(out / "train", len(train) * parameters["repeat"], per_shard, make),
        Part(out / "test", len(test), per_shard, partial(make, test=True), evaluation=True),
    ]


def write_digits(
    out: Path,
    *,
    seed: int = 0,
    image_size: int = 64,
    repeat: int = 1,
    samples_per_shard: int = 200,
    overwrite: bool = False,
    progress: Callable[[int], None] = no_progress,
) -> BuildResult:
    """Write the digits as captioned shards: `out`/train (each image `repeat` times) and `out`/test (once).

    The same arguments give the same tars. `progress` is called with the number of samples done. Raises
    UserError for numbers out of range and for a folder that holds something else.
    """
    if repeat < 1:
        raise UserError(f"Each image must be written at least once, not {repeat} times.")
    check_image_size(image_size)
    check_seed(seed)
    check_part_sizes(IMAGES * repeat, samples_per_shard)
    parameters = {
        "seed": seed,
        "image_size": image_size,
        "repeat": repeat,
        "samples_per_shard": samples_per_shard,
    }
    texts = {
        "classnames.txt": "".join(f"{name}\n" for name in NAMES),
        "zeroshot_classification_templates.txt": "".join(f"{template}\n" for template in TEMPLATES),
    }
    recipe = Recipe("digits", VERSION, parameters, _parts, texts, LABEL_SETS)
    return build(out, recipe, overwrite=overwrite, progress=progress)
