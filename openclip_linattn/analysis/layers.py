"""What every attention layer of an image tower computes with, read by hooks while the tower runs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from open_clip.transformer import Attention, VisionTransformer
from torch import Tensor, nn

from openclip_linattn.attention import OperatorAttention
from openclip_linattn.errors import UserError
from openclip_linattn.ops import OPERATORS


@dataclass(frozen=True)
class Layer:
    """One attention layer on some images: its number from 0, its kind, and queries, keys and values (B, H, N, D).

    `options` are the keyword arguments of the kind's operator: rho or gamma as a tensor (H,), the length scale of
    normalised linear attention. Token 0 is the class token.
    """

    number: int
    kind: str
    q: Tensor
    k: Tensor
    v: Tensor
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """N, the class token included."""
        return self.q.shape[-2]

    def double(self) -> "Layer":
        """The layer in float64, in which spectra and walks are computed."""
        factors = {
            name: value.double() if isinstance(value, Tensor) else value
            for name, value in self.options.items()
        }
        return replace(self, q=self.q.double(), k=self.k.double(), v=self.v.double(), options=factors)

    def output(self) -> Tensor:
        """What the kind's operator makes of the values, (B, H, N, D)."""
        return OPERATORS[self.kind](self.q, self.k, self.v, **self.options)


def read_layers(visual: nn.Module, images: Tensor, look: Callable[[Layer], None]) -> Tensor:
    """Run the image tower on preprocessed images (B, 3, height, width), handing every layer to `look` in order.

    Returns the tokens (B, N, width) that enter the first block. A layer is not kept here, so that `look` decides
    what stays in memory. Raises UserError for a tower whose attention is not one of ours or stock softmax.
    """
    modules = attention_modules(visual)
    entering: list[Tensor] = []
    hooks = [
        modules[0][0].register_forward_pre_hook(lambda _module, inputs: entering.append(inputs[0].detach()))
    ]
    hooks += [
        attention.register_forward_pre_hook(partial(_hand_over, number=number, look=look))
        for number, (_, attention) in enumerate(modules)
    ]
    try:
        with torch.no_grad():
            visual(images)
    finally:
        for hook in hooks:
            hook.remove()
    return entering[0]


def attention_modules(visual: nn.Module) -> Sequence[tuple[nn.Module, nn.Module]]:
    """The blocks of an image tower and their attentions; raises UserError for a tower that is not understood."""
    if not isinstance(visual, VisionTransformer):
        raise UserError(
            f"the image tower is a {type(visual).__name__}; attention is analysed in OpenCLIP's own "
            "VisionTransformer and in the models of this package"
        )
    pairs = [(block, block.attn) for block in visual.transformer.resblocks]
    for number, (_, attention) in enumerate(pairs):
        if _kind(attention) is None:
            raise UserError(
                f"block {number} has a {type(attention).__name__} with options of its own (scaled cosine, "
                "normalised queries, scaled heads); only stock softmax attention and ours are analysed"
            )
    return pairs


def attention_kind(visual: nn.Module) -> str:
    """The kind of the tower's layers, several joined by "+"; raises UserError as `attention_modules` does."""
    kinds = (_kind(attention) for _, attention in attention_modules(visual))
    return "+".join(dict.fromkeys(kind for kind in kinds if kind is not None))


def _kind(attention: nn.Module) -> str | None:
    if isinstance(attention, OperatorAttention):
        return str(attention.kind)
    if isinstance(attention, nn.MultiheadAttention):
        return "softmax"
    plain = (
        isinstance(attention, Attention)
        and attention.logit_scale is None
        and attention.head_scale is None
        and isinstance(attention.ln_q, nn.Identity)
        and isinstance(attention.ln_inner, nn.Identity)
    )
    return "softmax" if plain else None


def _hand_over(
    attention: Any, inputs: tuple[Tensor, ...], *, number: int, look: Callable[[Layer], None]
) -> None:
    x = inputs[0].detach()
    if not getattr(attention, "batch_first", True):
        x = x.transpose(0, 1)
    B, N, C = x.shape
    packed = F.linear(x, attention.in_proj_weight, attention.in_proj_bias)
    q, k, v = packed.view(B, N, 3, attention.num_heads, C // attention.num_heads).permute(2, 0, 3, 1, 4)
    options = attention.operator_arguments() if isinstance(attention, OperatorAttention) else {}
    kind = _kind(attention)
    assert kind is not None  # looked at before the tower ran
    look(Layer(number, kind, q, k, v, options))
