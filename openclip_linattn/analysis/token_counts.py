"""Smoothing against the number of tokens: one model at several image sizes."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import open_clip
import torch
from torch import Tensor

from openclip_linattn.analysis.images import PictureSource
from openclip_linattn.analysis.layers import attention_kind
from openclip_linattn.analysis.models import Subject
from openclip_linattn.analysis.smoothing import over_layers, smoothing_rows
from openclip_linattn.data.drawn.shapes import draw_sample
from openclip_linattn.errors import UserError
from openclip_linattn.zeroshot.encoders.models import LoadedModel
from openclip_linattn.zeroshot.sets.reading import decode_image
from openclip_scaling.flops import parse_tower_name

Fields = dict[str, Any]


@dataclass(frozen=True)
class SmoothingOptions:
    """What is measured: numbers of patches (squares), images, sampled rows per head and layer, and their seed.

    Raises UserError for numbers out of range.
    """

    patches: Sequence[int]
    images: int = 1
    rows: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        for count in self.patches:
            if count < 1 or math.isqrt(count) ** 2 != count:
                raise UserError(
                    f"--tokens has {count}; an image is a square of patches, so give squares such as 64, 256, 1024"
                )
        for name, value in (("--images", self.images), ("--rows", self.rows)):
            if value < 1:
                raise UserError(f"{name} is {value}; it must be at least 1")


def smoothing_of(
    subject: Subject,
    source: PictureSource | None,
    options: SmoothingOptions,
    device: torch.device,
    advance: Callable[[int], None] = lambda _: None,
) -> list[Fields]:
    """One dict per number of patches: the measures of `smoothing_rows` over all layers, and per layer under "layers".

    The images of `source` (default: shapes drawn at each size) are resized, and positional embeddings as OpenCLIP
    does for --force-image-size. Raises UserError where the model cannot be built or read.
    """
    found = []
    for count in dict.fromkeys(options.patches):
        loaded = subject.load(device, _pixels(subject, count))
        images = _images(loaded, source, options.images)
        layers = smoothing_rows(loaded.clip.visual, images.to(device), rows=options.rows, seed=options.seed)
        about = {
            "trained": subject.trained,
            "attention": attention_kind(loaded.clip.visual),
            "image_size": loaded.image_size,
        }
        found.append({**about, **over_layers(layers), "layers": layers})
        advance(1)
    return found


def _pixels(subject: Subject, patches: int) -> int:
    model = subject.random if subject.checkpoint is None else subject.checkpoint.model
    return math.isqrt(patches) * _patch_size(model)


def _patch_size(model: str) -> int:
    """Pixels of a patch, from OpenCLIP's own config or from the name of one of our towers."""
    config = open_clip.get_model_config(model)
    if config is None:
        raise UserError(f"unknown model {model!r}; `openclip-linattn models` lists ours")
    vision = config["vision_cfg"]
    name = vision.get("timm_model_name", "")
    if name.startswith("linattn_"):
        return parse_tower_name(name).patch
    if not isinstance(vision.get("patch_size"), int):
        raise UserError(
            f"the image tower of {model} is none with square patches of OpenCLIP's own or of ours"
        )
    return int(vision["patch_size"])


def _images(loaded: LoadedModel, source: PictureSource | None, count: int) -> Tensor:
    if source is not None:
        return torch.stack([loaded.transform(picture.image) for picture in source.pictures(count)])
    side = max(loaded.clip.visual.image_size)
    drawn = [draw_sample(index, seed=0, image_size=side).jpeg for index in range(count)]
    return torch.stack([loaded.transform(decode_image({"jpg": jpeg})) for jpeg in drawn])
