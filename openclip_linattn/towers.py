"""Swaps the attention of OpenCLIP's own towers, and makes checkpoints say which attention they were trained with."""

import warnings
from functools import partial
from typing import Any

import torch
from open_clip.transformer import ResidualAttentionBlock, Transformer, VisionTransformer
from torch import Tensor, nn

from openclip_linattn.attention import OperatorAttention
from openclip_linattn.errors import AttentionMismatch
from openclip_scaling.flops import TowerName

KIND_BUFFER = "attention_kind"


def build_image_tower(
    tower: TowerName,
    *,
    image_size: int | tuple[int, int],
    output_dim: int,
    patch_dropout: float = 0.0,
    loaded: dict[str, bool] | None = None,
) -> VisionTransformer:
    """OpenCLIP's VisionTransformer of the tower's sizes with its attention swapped.

    Weights, their names and the random numbers drawn are those of the stock tower of the same size. `loaded` is as in
    `swap_attention`.
    """
    visual = VisionTransformer(
        image_size=image_size,
        patch_size=tower.patch,
        width=tower.width,
        layers=tower.layers,
        heads=tower.heads,
        mlp_ratio=4.0,
        output_dim=output_dim,
        patch_dropout=patch_dropout,
    )
    assert tower.train_tokens is not None
    swap_attention(
        visual.transformer, tower.kind, train_tokens=tower.train_tokens, part="image", loaded=loaded
    )
    return visual


def swap_attention(
    transformer: Transformer,
    kind: str,
    *,
    train_tokens: int,
    part: str,
    loaded: dict[str, bool] | None = None,
) -> None:
    """Replaces the attention of every block, in place, and records the kind in the state dict.

    A softmax tower keeps the stock state dict. Every other one gets a buffer `attention_kind` (the kind's ASCII
    codes), so that loading it into a tower of another kind fails instead of giving wrong features in silence.

    Args:
        transformer: an OpenCLIP Transformer with default blocks.
        kind: a key of `openclip_linattn.ops.OPERATORS`.
        train_tokens: see `OperatorAttention`.
        part: "image" or "text", for messages.
        loaded: shared by the towers of one model, which note in it whether a checkpoint was stock: so a stock
            checkpoint is warned of once, with the image tower, which OpenCLIP loads first.
    """
    for block in transformer.resblocks:
        if not isinstance(block, ResidualAttentionBlock) or hasattr(block, "ln_1_kv"):
            raise TypeError(
                f"only OpenCLIP's default attention blocks can be swapped, not {type(block).__name__}"
            )
        block.attn = OperatorAttention.from_existing(block.attn, kind=kind, train_tokens=train_tokens)
    if kind != "softmax":
        transformer.register_buffer(KIND_BUFFER, torch.tensor(list(kind.encode()), dtype=torch.uint8))
    expect_kind(transformer, kind, part=part, loaded=loaded)


def expect_kind(
    transformer: nn.Module, kind: str, *, part: str, loaded: dict[str, bool] | None = None
) -> None:
    """Makes loading weights of another kind into `transformer` an error, strict or not; see `swap_attention`.

    The hook raises AttentionMismatch.
    """
    hook = partial(_check_kind, kind=kind, part=part, loaded={} if loaded is None else loaded)
    register: Any = transformer.register_load_state_dict_pre_hook  # without types in PyTorch
    register(hook)


def _check_kind(
    transformer: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    _metadata: Any,
    _strict: bool,
    _missing: list[str],
    _unexpected: list[str],
    _errors: list[str],
    *,
    kind: str,
    part: str,
    loaded: dict[str, bool],
) -> None:
    """Runs before a state dict is loaded: same kind passes, stock softmax passes with a warning, others are errors."""
    if not any(key.startswith(prefix) for key in state_dict):
        return  # part of a state dict, without this tower
    key = prefix + KIND_BUFFER
    saved = state_dict.get(key)
    loaded[part] = saved is None and kind != "softmax"
    if saved is None:
        if kind != "softmax":
            if part == "image" or not loaded.get("image"):
                _warn_of_stock_weights(kind, part)
            _adopt_stock_weights(transformer, state_dict, prefix)
        return
    saved_kind = bytes(saved.tolist()).decode(errors="replace")
    if saved_kind != kind:
        name = f"...-{saved_kind}-text" if part == "text" else f"...-{saved_kind}"
        raise AttentionMismatch(
            f"the checkpoint's {part} tower was trained with {saved_kind} attention and this model's has {kind}: the "
            f"same weights would give other features. Load it into the model named {name}."
        )


def _warn_of_stock_weights(kind: str, part: str) -> None:
    what = "the checkpoint" if part == "image" else "the checkpoint's text tower"
    warnings.warn(
        f"{what} names no attention kind, so it is taken for stock softmax weights and starts a {kind} model: its "
        "features change until it is trained further",
        stacklevel=2,
    )


def _adopt_stock_weights(transformer: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
    """Fills what a stock softmax checkpoint lacks: the kind, and the initial rho and gamma."""
    state_dict[prefix + KIND_BUFFER] = getattr(transformer, KIND_BUFFER)
    for name, module in transformer.named_modules():
        if isinstance(module, OperatorAttention):
            for factor in module.factors:
                initial: Tensor = module.initial_logits(factor)
                state_dict.setdefault(f"{prefix}{name}.{factor}_logit", initial)
