"""Whether maps show what a model looks at: deletion curves and boxes, beside controls, with intervals over images."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from openclip_linattn.analysis.box_scores import box_scores
from openclip_linattn.analysis.controls import CONTROLS, control_maps
from openclip_linattn.analysis.deletion import (
    AGGREGATIONS,
    FILLS,
    UNITS,
    Probability,
    area_over,
    check_choice,
    deletion_curve,
    deletion_ranks,
    filling,
)
from openclip_linattn.analysis.images import Canvas, Picture, PictureSource
from openclip_linattn.analysis.maps import METHODS, token_maps
from openclip_linattn.analysis.targets import TARGETS, ZeroShot
from openclip_linattn.errors import UserError
from openclip_linattn.zeroshot.encoders.models import LoadedModel

Fields = dict[str, Any]
Floats = NDArray[np.float64]
_DRAWS = 2000


@dataclass(frozen=True)
class FaithfulnessOptions:
    """What is measured; raises UserError for a value that is not known.

    methods: the maps (see `TokenMaps`) of layer `layer` (None: the last) and head `head` (None: the mean over heads);
    unit, fill, aggregation: see `deletion_ranks`, `filling` and `area_over`; steps: deletions from the whole image to
    the empty one; target: see `ZeroShot.of_targets`; gamma: the discount of kinds without their own; images: how many
    to take; seed: of the random control and of ties.
    """

    methods: Sequence[str] = ("class", "arrivals", "rollout")
    layer: int | None = None
    head: int | None = None
    unit: str = "patch"
    fill: str = "mean"
    steps: int = 20
    aggregation: str = "ratio"
    target: str = "predicted"
    gamma: float = 0.95
    images: int = 100
    batch_size: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        for method in self.methods:
            check_choice("--map", method, METHODS)
        check_choice("--unit", self.unit, UNITS)
        check_choice("--fill", self.fill, FILLS)
        check_choice("--aggregation", self.aggregation, AGGREGATIONS)
        check_choice("--target", self.target, TARGETS)
        for name, value in (
            ("--steps", self.steps),
            ("--images", self.images),
            ("--batch-size", self.batch_size),
        ):
            if value < 1:
                raise UserError(f"{name} is {value}; it must be at least 1")


@dataclass
class _Found:
    """What one map reached on every image so far: curves (images, steps + 1) and scores of images with boxes."""

    morf: list[Tensor] = field(default_factory=list)
    lerf: list[Tensor] = field(default_factory=list)
    boxes: list[tuple[float, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Faithfulness:
    """The rows of one model, a row per map and control, and the mean curves (steps + 1) behind them, by map."""

    rows: list[Fields]
    morf: dict[str, list[float]]
    lerf: dict[str, list[float]]


def faithfulness(
    loaded: LoadedModel,
    source: PictureSource,
    options: FaithfulnessOptions,
    advance: Callable[[int], None] = lambda _: None,
) -> Faithfulness:
    """Delete the images' patches in the order of each map and of the controls, and compare the maps with boxes.

    The first label set of the source has the classes. MoRF deletes the most relevant first, LeRF the least; `gap` is
    the area between the two curves. `above_random` and `above_centre` are differences of MoRF areas image by image.
    Images without boxes, or all inside them, have no box scores. Intervals are 95 % bootstraps over images.
    Raises UserError for sources without labels, and what the maps raise.
    """
    if not source.label_sets:
        raise UserError(
            f"{source.name} has no classes; faithfulness needs an evaluation set with class names"
        )
    judge = ZeroShot(loaded, source.label_sets[0])
    canvas = Canvas(loaded.transform)
    draw = torch.Generator().manual_seed(options.seed)
    found = {name: _Found() for name in (*options.methods, *CONTROLS)}
    areas: list[float] = []
    for pictures in _batches(source.pictures(options.images), options.batch_size):
        images = torch.stack([loaded.transform(picture.image) for picture in pictures]).to(loaded.device)
        maps = _maps(loaded, images, options, draw)
        probability = judge.of_targets(images, pictures, options.target)
        fill = filling(images, options.fill, int(loaded.clip.visual.patch_size[0]))
        for name, values in maps.items():
            morf, lerf = _delete(values, images, fill, probability, options, draw)
            found[name].morf.append(morf)
            found[name].lerf.append(lerf)
        areas += _compare(maps, pictures, found, canvas)
        advance(len(pictures))
    rows = [_row(name, found, areas, options) for name in found]
    return Faithfulness(rows, _curves(found, "morf"), _curves(found, "lerf"))


def _batches(pictures: Iterator[Picture], size: int) -> Iterator[list[Picture]]:
    while batch := list(islice(pictures, size)):
        yield batch


def _maps(
    loaded: LoadedModel, images: Tensor, options: FaithfulnessOptions, draw: torch.Generator
) -> dict[str, Tensor]:
    found = token_maps(loaded.clip.visual, images, options.methods, gamma=options.gamma)
    maps = {each.method: each.choose(options.layer, options.head) for each in found}
    like = next(iter(maps.values()))
    return maps | {name: control_maps(name, like, draw) for name in CONTROLS}


def _delete(
    maps: Tensor,
    images: Tensor,
    fill: Tensor,
    probability: Probability,
    options: FaithfulnessOptions,
    draw: torch.Generator,
) -> list[Tensor]:
    """The MoRF and the LeRF curves (B, steps + 1) of one map."""
    ranks = deletion_ranks(maps, (images.shape[-2], images.shape[-1]), options.unit, draw)
    return [
        deletion_curve(probability, images, order, fill, options.steps).double().cpu()
        for order in (ranks, ranks.amax() - ranks)
    ]


def _compare(
    maps: dict[str, Tensor], pictures: Sequence[Picture], found: dict[str, _Found], canvas: Canvas
) -> list[float]:
    """Score the maps of images with pixels inside and outside of boxes, and return the areas of these boxes."""
    masks = {number: canvas.inside(each) for number, each in enumerate(pictures) if each.boxes}
    masks = {number: mask for number, mask in masks.items() if bool(mask.any()) and not bool(mask.all())}
    if not masks:
        return []
    inside = torch.stack(list(masks.values()))
    for name, values in maps.items():
        found[name].boxes += box_scores(values[list(masks)], inside)
    return inside.flatten(1).double().mean(1).tolist()


def _row(name: str, found: dict[str, _Found], areas: list[float], options: FaithfulnessOptions) -> Fields:
    morf = {each: _areas(found[each].morf, options) for each in (name, *CONTROLS)}
    lerf = _areas(found[name].lerf, options)
    measured = {"morf": morf[name], "lerf": lerf, "gap": morf[name] - lerf}
    measured |= {f"above_{each}": morf[name] - morf[each] for each in CONTROLS if each != name}
    row: Fields = {"map": name, "control": name in CONTROLS, "images": len(lerf)}
    for key, values in measured.items():
        row |= _mean(key, values)
    scores = np.array(found[name].boxes, dtype=np.float64).reshape(-1, 2)
    row["images_with_boxes"] = len(scores)
    if len(scores):
        row |= {**_mean("roc_auc", scores[:, 0]), **_mean("pr_auc", scores[:, 1])}
        row["box_area"] = float(np.mean(areas))
    return row


def _areas(curves: Sequence[Tensor], options: FaithfulnessOptions) -> Floats:
    areas: Floats = area_over(torch.cat(list(curves)), options.aggregation).numpy()
    return areas


def _mean(key: str, values: Floats) -> Fields:
    """The mean over images and its 95 % bootstrap interval; none for a single image."""
    row: Fields = {key: float(values.mean())}
    if len(values) > 1:
        rng = np.random.default_rng(0)
        means = [values[rng.integers(len(values), size=len(values))].mean() for _ in range(_DRAWS)]
        row[f"{key}_interval"] = np.quantile(means, [0.025, 0.975]).tolist()
    return row


def _curves(found: dict[str, _Found], order: str) -> dict[str, list[float]]:
    return {name: torch.cat(getattr(each, order)).mean(0).tolist() for name, each in found.items()}
