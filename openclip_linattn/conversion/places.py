"""Where the attention modules of a model's towers are, and how one of them is replaced."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from openclip_linattn.attention import HeadOperator
from openclip_linattn.errors import UserError

PARTS = ("image", "text")


@dataclass(frozen=True)
class TowerPlace:
    """One tower of a model: its blocks, and what their library needs of an attention module.

    Args:
        part: "image" or "text".
        container: the module whose state dict says with which attention the tower's weights work.
        blocks: the residual blocks, the first one first.
        attribute: the name of a block's attention module.
        train_tokens: tokens of a whole input, the N_train of a new attention.
        causal: whether a token sees those before it only.
        wrap: (attention module, kind, train_tokens) to the module that takes its place, with the same parameters.
        call: an attention module's output for tokens (B, N, width) without any mask.
    """

    part: str
    container: nn.Module
    blocks: Sequence[nn.Module]
    attribute: str
    train_tokens: int
    causal: bool
    wrap: Callable[[nn.Module, str, int], HeadOperator]
    call: Callable[[nn.Module, Tensor], Tensor]

    @property
    def attentions(self) -> list[nn.Module]:
        """The attention module of every block."""
        return [getattr(block, self.attribute) for block in self.blocks]

    @property
    def kinds(self) -> list[str]:
        """The attention kind of every block; softmax for a library's own."""
        return [each.kind if isinstance(each, HeadOperator) else "softmax" for each in self.attentions]


def find_place(model: nn.Module, part: str) -> TowerPlace:
    """The place of a model's image or text tower; raises UserError, with the reason, where it cannot be converted."""
    if part not in PARTS:
        raise UserError(f"unknown tower {part!r}; the towers are {' and '.join(PARTS)}")
    from openclip_linattn.conversion.openclip_models import openclip_place
    from openclip_linattn.conversion.timm_models import timm_place
    from openclip_linattn.conversion.transformers_models import transformers_place

    finders: tuple[Callable[[Any, str], TowerPlace | None], ...] = (
        openclip_place,
        timm_place,
        transformers_place,
    )
    for find in finders:
        place = find(model, part)
        if place is not None:
            return place
    raise UserError(
        f"the attention of {type(model).__name__} cannot be converted: give an OpenCLIP CLIP model with ViT towers, a "
        "timm VisionTransformer, or a CLIP model of transformers, bare (not compiled, and not wrapped for training)"
    )


def no_such_tower(model: nn.Module, part: str) -> UserError:
    """The error for a model that has one tower, and not this one."""
    return UserError(f"{type(model).__name__} has no {part} tower")
