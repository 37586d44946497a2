"""The towers of OpenCLIP's CLIP models, ours and stock ones."""

from functools import partial
from typing import Any

from open_clip.model import CLIP, CustomTextCLIP
from open_clip.timm_model import TimmModel
from open_clip.transformer import (
    Attention,
    ResidualAttentionBlock,
    TextTransformer,
    Transformer,
    VisionTransformer,
)
from torch import Tensor, nn

from openclip_linattn.attention import OperatorAttention
from openclip_linattn.conversion.places import TowerPlace, no_such_tower
from openclip_linattn.conversion.timm_models import timm_place
from openclip_linattn.errors import UserError


def openclip_place(model: nn.Module, part: str) -> TowerPlace | None:
    """The tower of a CLIP, CustomTextCLIP, VisionTransformer or TextTransformer of OpenCLIP; None for other models.

    Raises UserError for a tower that is no transformer of default blocks.
    """
    if isinstance(model, (CLIP, CustomTextCLIP)):
        return _image_place(model.visual) if part == "image" else _text_place(model)
    if isinstance(model, (VisionTransformer, TextTransformer)):
        if (part == "image") != isinstance(model, VisionTransformer):
            raise no_such_tower(model, part)
        return _image_place(model) if part == "image" else _text_place(model)
    return None


def _image_place(visual: Any) -> TowerPlace:
    if isinstance(visual, TimmModel):
        place = timm_place(visual.trunk, "image")
        if place is not None:
            return place
    if not isinstance(visual, VisionTransformer):
        raise UserError(f"the image tower is a {type(visual).__name__}, and only ViTs can be converted")
    return _place(visual.transformer, "image", tokens=visual.positional_embedding.shape[0], causal=False)


def _text_place(model: Any) -> TowerPlace:
    text = model.text if isinstance(model, CustomTextCLIP) else model
    if not isinstance(text, (CLIP, TextTransformer)):
        raise UserError(
            f"the text tower is a {type(text).__name__}, and only OpenCLIP's own can be converted"
        )
    if getattr(text, "cls_emb", None) is not None or getattr(text, "use_pad_mask", False):
        raise UserError(
            "the text tower has a mask of its own for every text (class embedding or padding), which only softmax "
            "attention takes"
        )
    return _place(
        text.transformer,
        "text",
        tokens=text.positional_embedding.shape[0],
        causal=text.attn_mask is not None,
    )


def _place(transformer: Transformer, part: str, *, tokens: int, causal: bool) -> TowerPlace:
    if not isinstance(transformer, Transformer) or not transformer.batch_first:
        raise UserError(f"the {part} tower is no Transformer of OpenCLIP with the batch first")
    for block in transformer.resblocks:
        if not isinstance(block, ResidualAttentionBlock) or hasattr(block, "ln_1_kv"):
            raise UserError(
                f"the {part} tower has blocks of {type(block).__name__}, and only OpenCLIP's default attention blocks "
                "can be converted"
            )
    first = transformer.resblocks[0].attn
    return TowerPlace(
        part=part,
        container=transformer,
        blocks=list(transformer.resblocks),
        attribute="attn",
        train_tokens=first.train_tokens if isinstance(first, OperatorAttention) else tokens,
        causal=causal,
        wrap=_wrap,
        call=_call,
    )


def _wrap(module: nn.Module, kind: str, train_tokens: int) -> OperatorAttention:
    if isinstance(module, nn.MultiheadAttention) and module.dropout:
        raise UserError(
            f"the attention drops weights at a rate of {module.dropout}, and linear forms have no N x N weights to "
            "drop: set it to 0"
        )
    return OperatorAttention.from_existing(module, kind=kind, train_tokens=train_tokens)


def _call(module: nn.Module, x: Tensor) -> Tensor:
    attend = partial(type(module).forward, module)  # without the user's hooks
    output: Tensor
    if isinstance(module, nn.MultiheadAttention):
        output = attend(x, x, x, need_weights=False)[0]
        return output
    if isinstance(module, Attention):
        output = attend(x)
        return output
    raise UserError(f"an attention module of the type {type(module).__name__} cannot be converted")
