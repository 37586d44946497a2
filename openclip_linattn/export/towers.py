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
    encode: Callable[..., Tensor]
    """The model's own way to the same features."""
    batches: list[Tensor]


def find_tower(loaded: LoadedModel, part: str) -> Tower:
    """One tower of a CLIP model; raises UserError for a model of another class, CoCa say."""
    clip = loaded.clip
    if type(clip) not in (open_clip.CLIP, open_clip.CustomTextCLIP):
        raise UserError(
            f"a {type(clip).__name__} cannot be exported by towers; only CLIP and CustomTextCLIP models can"
        )
    if part == "image":
        images = [noise_images(clip, count) for count in BATCHES]
        return Tower(part, "images", ImageFeatures(clip.visual), clip.encode_image, images)
    tokens = [loaded.tokenizer(list(CAPTIONS[:count])) for count in BATCHES]
    return Tower(part, "tokens", TextFeatures(clip), clip.encode_text, tokens)


def largest_difference(tower: Tower, features: Callable[[Tensor], Tensor]) -> float:
    """The largest absolute difference between `features` and the model's, over all batches."""
    with torch.no_grad():
        differences = [
            (features(batch) - tower.encode(batch, normalize=True)).abs().max().item()
            for batch in tower.batches
        ]
    # max() would pass over a NaN that is not the first.
    return float(torch.tensor(differences).max())


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
