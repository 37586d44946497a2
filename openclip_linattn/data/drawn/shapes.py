"""A captioned set of drawn shapes: 8 shapes x 8 colors x 3 sizes x 5 positions x 4 backgrounds.

Training sample i of a seed is drawn from `default_rng([seed, 0, i])` and evaluation sample i from
`default_rng([seed, 1, i])`: it depends on nothing else, a longer set begins with the shorter one, and no
evaluation sample shares its random stream with a training sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from openclip_linattn.data.drawn.build import (
    BuildResult,
    Recipe,
    build,
    check_image_size,
    check_seed,
    no_progress,
)
from openclip_linattn.data.drawn.captions import article
from openclip_linattn.data.drawn.drawing import BACKGROUNDS, COLORS, SHAPES, bounding_box, coverage, paint
from openclip_linattn.data.layout import Part, Sample, check_part_sizes
from openclip_linattn.errors import UserError

VERSION = 1
TRAIN, TEST = 0, 1

# Lengths in pixels of a 64-pixel image; other sizes scale them.
RADII = {"small": 12.0, "medium": 17.0, "large": 22.0}
OFFSETS = {
    "left": (-9.0, 0.0),
    "right": (9.0, 0.0),
    "top": (0.0, -9.0),
    "bottom": (0.0, 9.0),
    "center": (0.0, 0.0),
}
POSITION_JITTER = 3.0
RADIUS_JITTER = 0.1
ANGLE_JITTER = 0.3
COLOR_JITTER = 25.0
NOISE = 20

CLASSES = tuple(f"{color} {shape}" for color in COLORS for shape in SHAPES)
TEMPLATES = ("a photo of a {c}", "a picture of a {c}", "a {c}")
CAPTIONS = (
    "{a_size} {color} {shape} on {a_background} background",
    "{background} background with {a_size} {color} {shape} at the {position}",
    "a photo of {a_color} {shape}",
    "a picture of {a_color} {shape}",
    "a photo of {a_size} {color} {shape}",
    "{a_color} {shape} at the {position}",
    "{a_color} {shape} on {background}",
    "{size} {color} {shape}, {position}",
)
LABEL_SETS = {
    "color x shape": {"classes": list(CLASSES), "templates": list(TEMPLATES), "fields": ["color", "shape"]},
    "color": {
        "classes": list(COLORS),
        "templates": ["a photo of a {c} shape", "a picture of a {c} shape", "a {c} shape"],
        "fields": ["color"],
    },
    "shape": {"classes": list(SHAPES), "templates": list(TEMPLATES), "fields": ["shape"]},
}


def _choose(rng: np.random.Generator, names: Mapping[str, Any] | tuple[str, ...]) -> str:
    return list(names)[int(rng.integers(len(names)))]


def caption(template: int, attributes: Mapping[str, str]) -> str:
    """Caption number `template` for the attributes; every caption names the color and the shape."""
    with_articles = {f"a_{name}": f"{article(value)} {value}" for name, value in attributes.items()}
    return CAPTIONS[template].format(**attributes, **with_articles)


def draw_sample(index: int, *, seed: int, image_size: int = 64, split: int = TRAIN) -> Sample:
    """Sample number `index` of the set with this seed: a square JPEG of `image_size` pixels.

    Its attributes are the five names, `bbox` [x0, y0, x1, y1] in pixels (x1, y1 exclusive; around the pixels
    that the shape covers by half or more), width, height, seed and index. Evaluation samples have a class.
    """
    rng = np.random.default_rng([seed, split, index])
    names = {
        "shape": _choose(rng, SHAPES),
        "color": _choose(rng, COLORS),
        "size": _choose(rng, RADII),
        "position": _choose(rng, OFFSETS),
        "background": _choose(rng, BACKGROUNDS),
    }
    unit = image_size / 64
    offset = np.array(OFFSETS[names["position"]]) + rng.uniform(-POSITION_JITTER, POSITION_JITTER, 2)
    center = image_size / 2 + unit * offset
    radius = unit * RADII[names["size"]] * (1 + rng.uniform(-RADIUS_JITTER, RADIUS_JITTER))
    angle = rng.uniform(-ANGLE_JITTER, ANGLE_JITTER)
    mask = coverage(names["shape"], (float(center[0]), float(center[1])), radius, angle, image_size)
    color = np.array(COLORS[names["color"]]) + rng.uniform(-COLOR_JITTER, COLOR_JITTER, 3)
    noise = rng.integers(-NOISE, NOISE + 1, (image_size, image_size, 3), dtype=np.int8)
    jpeg = paint(mask, color, np.array(BACKGROUNDS[names["background"]], dtype=np.float64), noise)
    text = caption(int(rng.integers(len(CAPTIONS))), names)
    box = list(bounding_box(mask))
    numbers = {"bbox": box, "width": image_size, "height": image_size, "seed": seed, "index": index}
    label = CLASSES.index(f"{names['color']} {names['shape']}") if split == TEST else None
    return Sample(jpeg, text, {**names, **numbers}, label)


def _parts(out: Path, parameters: Mapping[str, Any]) -> list[Part]:
    make = partial(draw_sample, seed=parameters["seed"], image_size=parameters["image_size"])
    per_shard = parameters["samples_per_shard"]
    parts = [Part(out, parameters["samples"], per_shard, make)]
    if parameters["test_samples"]:
        held_out = partial(make, split=TEST)
        parts.append(Part(out / "test", parameters["test_samples"], per_shard, held_out, evaluation=True))
    return parts


def write_shapes(
    out: Path,
    samples: int,
    *,
    test_samples: int = 0,
    seed: int = 0,
    image_size: int = 64,
    samples_per_shard: int = 1000,
    overwrite: bool = False,
    progress: Callable[[int], None] = no_progress,
) -> BuildResult:
    """Write `samples` captioned images of `image_size` pixels into `out`, and a held-out set into its test/.

    The same arguments give the same tars, byte for byte (with the same versions of Pillow and NumPy).
    `progress` is called with the number of samples done. Raises UserError for numbers out of range and for a
    folder that holds something else.
    """
    if samples < 1:
        raise UserError(f"The number of samples must be at least 1, not {samples}.")
    if test_samples < 0:
        raise UserError(f"The number of test samples must be at least 0, not {test_samples}.")
    check_image_size(image_size)
    check_seed(seed)
    check_part_sizes(max(samples, test_samples), samples_per_shard)
    parameters = {
        "samples": samples,
        "test_samples": test_samples,
        "seed": seed,
        "image_size": image_size,
        "samples_per_shard": samples_per_shard,
    }
    texts = {
        "classnames.txt": "".join(f"{name}\n" for name in CLASSES),
        "zeroshot_classification_templates.txt": "".join(f"{template}\n" for template in TEMPLATES),
    }
    recipe = Recipe("shapes", VERSION, parameters, _parts, texts, LABEL_SETS)
    return build(out, recipe, overwrite=overwrite, progress=progress)
