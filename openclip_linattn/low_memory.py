"""Inference of image towers that holds one residual stream, and of everything else one chunk of tokens.

A block of a plain forward pass holds five to ten tensors of the size of its input at once: the normed tokens, the
packed projection, the output of the attention, the four times wider hidden layer. Here the stream is changed in
place, a chunk of tokens at a time; attention that is linear in the tokens sums over all chunks first and then makes
its output chunk by chunk (`openclip_linattn.ops.streaming`). Beyond the image and the weights the memory is one
(B, N, width) tensor.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import repeat

import torch
from open_clip.transformer import PatchDropout, ResidualAttentionBlock, VisionTransformer
from torch import Tensor, nn

from openclip_linattn.attention import OperatorAttention
from openclip_linattn.errors import UserError
from openclip_linattn.image_tower import positions_for
from openclip_linattn.ops.streaming import STREAMS, Chunks

TOKENS_PER_CHUNK = 8192
"""Tokens of all images of a batch that are worked on at a time: products of this size lose no speed."""


@contextmanager
def low_memory_inference(model: nn.Module, *, tokens_per_chunk: int = TOKENS_PER_CHUNK) -> Iterator[None]:
    """Inside, the image towers of `model` compute their features without gradients and in little memory.

        with openclip_linattn.low_memory_inference(model):
            features = model.encode_image(images)

    The features are those of the plain forward pass up to rounding (1e-5 in fp32). Nothing else changes: weights and
    state dict, text towers, training afterwards. Forward hooks on blocks and on attention are not called, those on the
    smaller parts once per chunk, and compiled models run uncompiled inside. Attention that is quadratic in the tokens
    (softmax, infsa) holds its packed projection and its output as well. A copy of the model that is made inside
    stays so.

    Args:
        model: a CLIP model of this package, its image tower, or a module around them.
        tokens_per_chunk: tokens of all images of a batch that are worked on at a time.

    Raises UserError where there is no such tower, or one with parts that are not known here (attentional pooling,
    pooling without class token, stock attention), and, in the forward pass, for patch dropout in training mode.
    """
    if tokens_per_chunk < 1:
        raise UserError(f"tokens_per_chunk must be at least 1, got {tokens_per_chunk}")
    towers = [module for module in model.modules() if isinstance(module, VisionTransformer)]
    if not towers:
        raise UserError(f"{type(model).__name__} has no image tower of OpenCLIP")
    for tower in towers:
        _check_tower(tower)
    before = [vars(tower).get("forward") for tower in towers]
    for tower in towers:
        tower.forward = partial(_features, tower, tokens_per_chunk)
    try:
        # A compiler would unroll the loops over chunks.
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for tower, forward in zip(towers, before, strict=True):
            del tower.forward
            if forward is not None:
                tower.forward = forward


def _check_tower(tower: VisionTransformer) -> None:
    if tower.attn_pool is not None or tower.pool_type != "tok" or tower.output_tokens:
        raise UserError(
            "low-memory inference knows image towers only that return the features of their class token"
        )
    for block in tower.transformer.resblocks:
        if not isinstance(block, ResidualAttentionBlock) or not isinstance(block.attn, OperatorAttention):
            raise UserError(
                f"low-memory inference knows the attention of this package only, not {type(block).__name__} with "
                f"{type(getattr(block, 'attn', None)).__name__}"
            )


@torch.no_grad()
def _features(tower: VisionTransformer, tokens_per_chunk: int, images: Tensor) -> Tensor:
    """The forward pass of `tower`."""
    if tower.training and isinstance(tower.patch_dropout, PatchDropout):
        raise UserError("the model is in training mode and drops patches: call model.eval() first")
    size = max(1, tokens_per_chunk // images.shape[0])
    x = _embedded(tower, images, size)
    for block in tower.transformer.resblocks:
        _add_attention(block, x, size)
        for chunk in torch.split(x, size, 1):
            chunk += block.ls_2(block.mlp(block.ln_2(chunk)))
    pooled: Tensor = tower.ln_post(x[:, 0])
    return pooled if tower.proj is None else pooled @ tower.proj


def _embedded(tower: VisionTransformer, images: Tensor, size: int) -> Tensor:
    """The tokens (B, N, width) that enter the first block, made a few rows of patches at a time."""
    positions = positions_for(tower, images)
    rows, columns = positions.grid
    height = tower.patch_size[0]
    token = tower.class_embedding + positions.class_token
    band = max(1, size // columns)
    x: Tensor | None = None
    for first in range(0, rows, band):
        last = min(rows, first + band)
        patches = tower.conv1(images[:, :, first * height : last * height]).flatten(2).mT
        part = tower.ln_pre(patches + positions.rows(first, last).to(patches.dtype))
        if x is None:
            x = part.new_empty(images.shape[0], 1 + rows * columns, part.shape[-1])
            x[:, 0] = tower.ln_pre(token.to(patches.dtype))
        x[:, 1 + first * columns : 1 + last * columns] = part
    assert x is not None
    return x


def _add_attention(block: ResidualAttentionBlock, x: Tensor, size: int) -> None:
    """x += attention(ln_1(x)), in place: a chunk is changed after it was read for the last time."""
    attention: OperatorAttention = block.attn

    def chunks(parts: str) -> Iterator[tuple[Tensor, ...]]:
        for chunk in torch.split(x, size, 1):
            yield attention.project(block.ln_1(chunk), parts)

    stream = STREAMS.get(attention.kind)
    outputs = (
        _whole_outputs(attention, chunks, x, size)
        if stream is None
        else _streamed_outputs(attention, chunks, x)
    )
    for chunk, o in zip(torch.split(x, size, 1), outputs, strict=False):
        chunk += block.ls_1(attention.out_proj(o.to(x.dtype).transpose(1, 2).flatten(2)))


def _streamed_outputs(attention: OperatorAttention, chunks: Chunks, x: Tensor) -> Iterator[Tensor]:
    """The output (B, H, L, D) of one chunk after the other, or again and again the one row of all tokens."""
    output = STREAMS[attention.kind](chunks, x.shape[1], **attention.operator_arguments())
    if isinstance(output, Tensor):
        yield from repeat(output)
    else:
        for (q,) in chunks("q"):
            yield output(q)


def _whole_outputs(attention: OperatorAttention, chunks: Chunks, x: Tensor, size: int) -> Iterator[Tensor]:
    """The output of a quadratic operator, computed at once and handed out in chunks."""
    packed = x.new_empty(*x.shape[:2], 3, attention.num_heads, attention.head_dim)
    q, k, v = packed.permute(2, 0, 3, 1, 4).unbind(0)
    first = 0
    for parts in chunks("qkv"):
        last = first + parts[0].shape[2]
        for whole, part in zip((q, k, v), parts, strict=True):
            whole[:, :, first:last] = part
        first = last
    yield from torch.split(attention.operator(q, k, v, **attention.operator_arguments()), size, 2)
