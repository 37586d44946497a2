"""timm's VisionTransformers."""

from typing import Any

from timm.layers import Attention
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from openclip_linattn.conversion.foreign import ForeignAttention, refuse_dropout
from openclip_linattn.conversion.places import TowerPlace, no_such_tower
from openclip_linattn.errors import UserError


class TimmAttention(ForeignAttention):
    """timm's attention with another operator; qk-norm, gate, output norm and projection dropout stay.

    Parameters keep timm's names (qkv, proj, q_norm, ...).
    """

    qkv: nn.Linear
    q_norm: nn.Module
    k_norm: nn.Module
    proj: nn.Linear
    proj_drop: nn.Module

    def __init__(self, module: nn.Module, kind: str, train_tokens: int) -> None:
        stock: Any = module
        refuse_dropout(stock.attn_drop.p)
        super().__init__(
            module, kind, num_heads=stock.num_heads, train_tokens=train_tokens, weight=stock.qkv.weight
        )
        self.norm = getattr(self, "norm", None) or nn.Identity()
        self.gate: nn.Module | None = getattr(self, "gate", None)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Attention of x (B, N, width) over itself.

        attn_mask: None, or causal and padding masks as timm takes them. Raises UserError for other masks.
        """
        B, N, _ = x.shape
        heads: tuple[Tensor, ...] = (
            self.qkv(x).view(B, N, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        )
        q, k = self.q_norm(heads[0]), self.k_norm(heads[1])
        o = self.attend(q, k, heads[2], attn_mask, causal=is_causal)
        o = self.norm(o.transpose(1, 2).reshape(B, N, -1))
        if self.gate is not None:
            o = o * self.gate(x).sigmoid()
        output: Tensor = self.proj_drop(self.proj(o))
        return output


def timm_place(model: nn.Module, part: str) -> TowerPlace | None:
    """The tower of a timm VisionTransformer; None for other models.

    Raises UserError for blocks with another attention than timm's own.
    """
    if not isinstance(model, VisionTransformer):
        return None
    if part != "image":
        raise no_such_tower(model, part)
    for block in model.blocks:
        attention = getattr(block, "attn", None)
        if type(attention) is not Attention and not isinstance(attention, TimmAttention):
            raise UserError(
                f"the blocks of this VisionTransformer ({type(block).__name__}) have no attention of timm's default "
                "type, so they cannot be converted"
            )
    return TowerPlace(
        part="image",
        container=model,
        blocks=list(model.blocks),
        attribute="attn",
        train_tokens=model.patch_embed.num_patches + model.num_prefix_tokens,
        causal=False,
        wrap=TimmAttention,
        call=_call,
    )


def _call(module: nn.Module, x: Tensor) -> Tensor:
    output: Tensor = type(module).forward(module, x)  # without the user's hooks
    return output
