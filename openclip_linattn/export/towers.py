"""The two towers of a CLIP model, each as a module of one input and one output."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import open_clip
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from openclip_linattn.conversion.branches import CAPTIONS, noise_images
from openclip_linattn.errors import UserError
from openclip_linattn.zeroshot.encoders.models import LoadedModel

TOWERS = ("image", "text")
BATCHES = (1, 3)
"""The batches on which an exported tower is compared with the model."""


class Tower(NamedTuple):
    """A tower that is to be exported, and what its features are compared on."""

    part: str
    """"image" or "text"."""
    input_name: str
    features: nn.Module
    """(B, 3, height, width) images, or (B, context length) int64 tokens, to features (B, width) of length one."""
    batches: list[Tensor]
    expected: list[Tensor]
    """The features that the model itself gives to each batch."""


def find_tower(loaded: LoadedModel, part: str) -> Tower:
    """One tower of a CLIP model with its features.

    Raises UserError for a model of another class, CoCa say, and for one whose features are no numbers.
    """
    clip = loaded.clip
    if type(clip) not in (open_clip.CLIP, open_clip.CustomTextCLIP):
        raise UserError(
            f"a model of class {type(clip).__name__} cannot be exported; only CLIP and CustomTextCLIP can"
        )
    if part == "image":
        batches = [noise_images(clip, count) for count in BATCHES]
        expected = _features_of(part, clip.encode_image, batches)
        return Tower(part, "images", ImageFeatures(clip.visual), batches, expected)
    batches = [loaded.tokenizer(list(CAPTIONS[:count])) for count in BATCHES]
    expected = _features_of(part, clip.encode_text, batches)
    return Tower(part, "tokens", TextFeatures(clip), batches, expected)


def _features_of(part: str, encode: Callable[..., Tensor], batches: list[Tensor]) -> list[Tensor]:
    try:
        with torch.no_grad():
            features = [encode(batch, normalize=True) for batch in batches]
    except Exception as error:  # a foreign tower's own complaint
        raise UserError(
            f"the model itself computes no {part} features of {tuple(batches[0].shape)} inputs: {first_line(error)}"
        ) from error
    if not all(bool(batch.isfinite().all()) for batch in features):
        raise UserError(f"the model's own {part} features are NaN or infinite: export another checkpoint")
    return features


def largest_difference(tower: Tower, features: Callable[[Tensor], Tensor]) -> float:
    """The largest absolute difference between `features` and the model's, over all batches."""
    with torch.no_grad():
        differences = [
            (features(batch) - expected).abs().max().item()
            for batch, expected in zip(tower.batches, tower.expected, strict=True)
        ]
    # max() would pass over a NaN that is not the first.
    return float(torch.tensor(differences).max())


def first_line(error: BaseException) -> str:
    """The first line of what an error says, or its name where it says nothing."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


class ImageFeatures(nn.Module):
    """`clip.encode_image(images, normalize=True)`."""

    def __init__(self, visual: nn.Module) -> None:
        super().__init__()
        self.visual = visual

    def forward(self, images: Tensor) -> Tensor:
        """Features (B, width) of images (B, 3, height, width)."""
        return F.normalize(self.visual(images), dim=-1)


class TextFeatures(nn.Module):
    """`clip.encode_text(tokens, normalize=True)`, without the weights of the image tower."""

    def __init__(self, clip: Any) -> None:
        super().__init__()
        self.clip = copy.copy(clip)
        self.clip._modules = {name: module for name, module in clip._modules.items() if name != "visual"}

    def forward(self, tokens: Tensor) -> Tensor:
        """Features (B, width) of tokens (B, context length)."""
        features: Tensor = self.clip.encode_text(tokens, normalize=True)
        return features
