"""The forward passes of image towers with one residual stream: OpenCLIP's, timm's and those of transformers' CLIP."""

from typing import Any

import torch
from open_clip.transformer import PatchDropout, ResidualAttentionBlock, VisionTransformer
from timm.layers import DropPath, PatchEmbed
from timm.layers import PatchDropout as TimmPatchDropout
from timm.models.vision_transformer import Block, ResPostBlock
from timm.models.vision_transformer import VisionTransformer as TimmVisionTransformer
from torch import Tensor, nn

from openclip_linattn.errors import UserError
from openclip_linattn.image_tower import ImageTower
from openclip_linattn.low_memory.blocks import (
    OPENCLIP,
    TIMM,
    TIMM_POST_NORM,
    TRANSFORMERS,
    TRANSFORMERS_MODULE,
    BlockNames,
    add_block,
    apply,
    heads_of,
)
from openclip_linattn.low_memory.tokens import openclip_tokens, timm_tokens

TIMM_BLOCKS = {Block: TIMM, ResPostBlock: TIMM_POST_NORM}


@torch.no_grad()
def openclip_forward(tower: VisionTransformer, tokens_per_chunk: int, x: Tensor) -> Any:
    """What OpenCLIP's tower gives for images x (B, 3, height, width)."""
    refuse_dropping(tower)
    size = _size(tokens_per_chunk, x)
    tokens = openclip_tokens(tower, x, size)
    for block in tower.transformer.resblocks:
        tokens = add_block(tokens, block, OPENCLIP, size)
    pooled, rest = _openclip_pooled(tower, tokens, size)
    pooled = pooled if tower.proj is None else pooled @ tower.proj
    return (pooled, rest) if tower.output_tokens else pooled


@torch.no_grad()
def timm_features(
    tower: TimmVisionTransformer, tokens_per_chunk: int, x: Tensor, attn_mask: Any = None, **options: Any
) -> Tensor:
    """timm's `forward_features` of images x (B, channels, height, width): the normed tokens."""
    if attn_mask is not None or any(options.values()):
        raise UserError("low-memory inference takes no attention masks")
    refuse_dropping(tower)
    size = _size(tokens_per_chunk, x)
    tokens = timm_tokens(tower, x, size)
    for block in tower.blocks:
        tokens = add_block(tokens, block, TIMM_BLOCKS[type(block)], size)
    return apply(tower.norm, tokens, size)


@torch.no_grad()
def timm_forward(tower: TimmVisionTransformer, tokens_per_chunk: int, x: Tensor, **options: Any) -> Tensor:
    """timm's forward pass of images x (B, channels, height, width)."""
    output: Tensor = tower.forward_head(timm_features(tower, tokens_per_chunk, x, **options))
    return output


@torch.no_grad()
def transformers_forward(
    encoder: Any, tokens_per_chunk: int, inputs_embeds: Tensor, attention_mask: Any = None, **options: Any
) -> Any:
    """The tokens (B, N, width) that transformers' encoder gives, as it returns them."""
    from transformers.modeling_outputs import BaseModelOutput

    if attention_mask is not None:
        raise UserError("low-memory inference takes no attention masks")
    for name in ("output_hidden_states", "output_attentions"):
        if options.get(name) or getattr(encoder.config, name, False):
            raise UserError(f"low-memory inference keeps no tokens of single layers: leave out {name}")
    refuse_dropping(encoder)
    size = _size(tokens_per_chunk, inputs_embeds)
    tokens = inputs_embeds.clone()
    for block in encoder.layers:
        tokens = add_block(tokens, block, TRANSFORMERS, size)
    return BaseModelOutput(last_hidden_state=tokens)


def check_openclip(tower: VisionTransformer) -> None:
    """Raises UserError where the tower computes something else than `openclip_forward`."""
    own = type(tower)
    if own._embeds not in (VisionTransformer._embeds, ImageTower._embeds):
        raise _unknown(tower)
    _check_class(tower, VisionTransformer, ("forward", "_pool", "_global_pool"))
    for block in tower.transformer.resblocks:
        _check_block(block, {ResidualAttentionBlock: OPENCLIP})


def check_timm(tower: TimmVisionTransformer) -> None:
    """Raises UserError where the tower computes something else than `timm_forward`."""
    _check_class(tower, TimmVisionTransformer, ("forward", "forward_features", "_pos_embed"))
    if type(tower.patch_embed) is not PatchEmbed:
        raise _unknown(tower.patch_embed)
    for block in tower.blocks:
        _check_block(block, TIMM_BLOCKS)


def check_transformers(encoder: Any) -> None:
    """Raises UserError where a block of an encoder, or its attention, is not known."""
    from transformers.models.clip.modeling_clip import CLIPEncoderLayer

    for block in encoder.layers:
        _check_block(block, {CLIPEncoderLayer: TRANSFORMERS})


def refuse_dropping(tower: nn.Module) -> None:
    """Raises UserError where a part of the tower drops values at random."""
    for module in tower.modules():
        if module.training and _rate(module):
            raise UserError(
                f"the model is in training mode and drops values ({type(module).__name__}): call model.eval() first"
            )


def _rate(module: Any) -> float:
    rate: float = 0.0
    if isinstance(module, (PatchDropout, TimmPatchDropout)):
        rate = module.prob
    elif isinstance(module, DropPath):
        rate = module.drop_prob
    elif isinstance(module, nn.Dropout):
        rate = module.p
    elif isinstance(module, nn.MultiheadAttention) or type(module).__module__ == TRANSFORMERS_MODULE:
        rate = getattr(module, "dropout", 0.0)
    return rate


def _check_class(tower: nn.Module, known: type, methods: tuple[str, ...]) -> None:
    if any(getattr(type(tower), name) is not getattr(known, name) for name in methods):
        raise _unknown(tower)


def _check_block(block: nn.Module, known: dict[type, BlockNames]) -> None:
    if type(block) not in known or hasattr(block, "ln_1_kv"):
        raise _unknown(block)
    heads_of(getattr(block, known[type(block)].attention))


def _unknown(module: nn.Module) -> UserError:
    return UserError(
        f"low-memory inference does not know a part of this image tower, {type(module).__name__}: run it as it is"
    )


def _size(tokens_per_chunk: int, x: Tensor) -> int:
    """The tokens of one image in a chunk."""
    return max(1, tokens_per_chunk // max(1, x.shape[0]))


def _openclip_pooled(tower: VisionTransformer, tokens: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """OpenCLIP's `_pool`, with only as much normed as is needed."""
    if tower.attn_pool is None:
        if tower.pool_type == "tok" and not tower.output_tokens:
            return tower.ln_post(tokens[:, 0]), tokens
        if not tower.final_ln_after_pool:
            pooled, rest = tower._global_pool(apply(tower.ln_post, tokens, size))
            return pooled, rest
    pooled, rest = tower._pool(tokens)
    return pooled, rest
