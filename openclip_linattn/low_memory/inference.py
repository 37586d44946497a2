"""Inference of image towers that holds one residual stream, and of everything else one chunk of tokens.

A block of a plain forward pass holds five to ten tensors of the size of its input at once: the normed tokens, the
packed projection, the output of the attention, the four times wider hidden layer. Here the stream is changed in
place, a chunk of tokens at a time, block by block according to its own attention (`low_memory.blocks`). Beyond the
image and the weights the memory is one (B, N, width) tensor, and in a block of a quadratic kind two more of the same
size with softmax (keys and values), or about five with infsa (queries and output too).
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from open_clip.timm_model import TimmModel
from open_clip.transformer import VisionTransformer
from timm.models.vision_transformer import VisionTransformer as TimmVisionTransformer
from torch import nn

from openclip_linattn.errors import UserError
from openclip_linattn.low_memory.blocks import TRANSFORMERS_MODULE
from openclip_linattn.low_memory.towers import (
    check_openclip,
    check_timm,
    check_transformers,
    openclip_forward,
    timm_features,
    timm_forward,
    transformers_forward,
)

TOKENS_PER_CHUNK = 8192
"""Tokens of all images of a batch that are worked on at a time: products of this size lose no speed."""

Methods = dict[str, Callable[..., Any]]


@contextmanager
def low_memory_inference(model: nn.Module, *, tokens_per_chunk: int = TOKENS_PER_CHUNK) -> Iterator[None]:
    """Inside, the image towers of `model` compute their features without gradients and in little memory.

        with openclip_linattn.low_memory_inference(model):
            features = model.encode_image(images)

    Takes OpenCLIP's CLIP models with ViT towers, timm's VisionTransformers (`infvit4_16_KIND` among them) and the CLIP
    models of transformers, or their image towers, as they are or converted, whole or in their last blocks, with every
    kind of attention. The outputs are those of the plain forward pass up to rounding (1e-5 in fp32). Nothing else
    changes: weights and state dict, text towers, training afterwards, and `forward_intermediates`, which stays plain.
    Forward hooks on blocks and on attention are not called, those on the smaller parts once per chunk, if at all, and
    compiled models run uncompiled inside. A copy of the model that is made inside stays so. Pooling by attention holds
    the keys and values of all tokens; towers of transformers hold what enters their encoder, and the projection after
    such a tower has gradients unless the caller turns them off.

    Args:
        model: a model with image towers of one of these libraries, or a module around it.
        tokens_per_chunk: tokens of all images of a batch that are worked on at a time.

    Raises UserError where there is no such tower, or one with parts that are not known here (other blocks, or other
    attention than ours and the libraries' default), and, in the forward pass, for dropout in training mode, for images
    of a size that the tower does not take, and for attention masks.
    """
    _check_tokens(tokens_per_chunk)
    found = [(module, _methods(module, tokens_per_chunk)) for module in model.modules()]
    if not any(methods for module, methods in found if not isinstance(module, TimmModel)):
        raise UserError(
            f"{type(model).__name__} has no image tower that is a ViT of OpenCLIP, a VisionTransformer of timm or one "
            "of transformers' CLIP"
        )
    before = [(module, name, vars(module).get(name)) for module, methods in found for name in methods]
    try:
        for module, methods in found:
            vars(module).update(methods)
        # A compiler would unroll the loops over chunks.
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module, name, method in before:
            vars(module).pop(name, None)
            if method is not None:
                vars(module)[name] = method


def _check_tokens(count: object) -> None:
    if not isinstance(count, int) or count < 1:
        raise UserError(f"tokens_per_chunk must be a whole number of at least 1, got {count!r}")


def _methods(module: nn.Module, tokens_per_chunk: int) -> Methods:
    """What replaces methods of a module; raises UserError for an image tower that is not known."""
    if isinstance(module, VisionTransformer):
        check_openclip(module)
        return {"forward": partial(openclip_forward, module, tokens_per_chunk)}
    if isinstance(module, TimmVisionTransformer):
        check_timm(module)
        return {
            "forward": partial(timm_forward, module, tokens_per_chunk),
            "forward_features": partial(timm_features, module, tokens_per_chunk),
        }
    if _is_image_encoder(module):
        check_transformers(module)
        return {"forward": partial(transformers_forward, module, tokens_per_chunk)}
    if isinstance(module, TimmModel) or any(map(_is_image_encoder, module.children())):
        return {"forward": partial(_without_gradients, module)}
    return {}


@torch.no_grad()
def _without_gradients(module: nn.Module, *args: Any, **options: Any) -> Any:
    return type(module).forward(module, *args, **options)


def _is_image_encoder(module: nn.Module) -> bool:
    """Whether it is the encoder of an image tower of transformers' CLIP."""
    if type(module).__module__ != TRANSFORMERS_MODULE:
        return False
    clip: Any = sys.modules[type(module).__module__]
    config: Any = getattr(module, "config", None)
    return isinstance(module, clip.CLIPEncoder) and isinstance(config, clip.CLIPVisionConfig)
