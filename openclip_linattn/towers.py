"""Swaps the attention of OpenCLIP's own towers, and makes checkpoints say which attention they were trained with."""

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from open_clip.transformer import ResidualAttentionBlock, Transformer
from torch import nn

from openclip_linattn.attention import HeadOperator, OperatorAttention
from openclip_linattn.errors import AttentionMismatch
from openclip_linattn.image_tower import ImageTower
from openclip_scaling.flops import TowerName

KIND_BUFFER = "attention_kind"
EXPECTED = "linattn_expected"


def build_image_tower(
    tower: TowerName,
    *,
    image_size: int | tuple[int, int],
    output_dim: int,
    patch_dropout: float = 0.0,
    loaded: dict[str, bool] | None = None,
) -> ImageTower:
    """OpenCLIP's VisionTransformer of the tower's sizes with its attention swapped.

    Weights, their names and the random numbers drawn are those of the stock tower of the same size. `loaded` is as in
    `swap_attention`.
    """
    visual = ImageTower(
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
        visual.transformer,
        tower.kind,
        train_tokens=tower.train_tokens,
        part="image",
        last=tower.last,
        loaded=loaded,
    )
    return visual


def swap_attention(
    transformer: Transformer,
    kind: str,
    *,
    train_tokens: int,
    part: str,
    last: int | None = None,
    loaded: dict[str, bool] | None = None,
) -> None:
    """Replaces the attention of every block, in place, and records the kind in the state dict (see `record_kinds`).

    Args:
        transformer: an OpenCLIP Transformer with default blocks.
        kind: a key of `openclip_linattn.ops.OPERATORS`.
        train_tokens: see `OperatorAttention`.
        part: "image" or "text", for messages.
        last: only so many of the last blocks get the kind, and those before them softmax; None: all get it.
        loaded: shared by the towers of one model, which note in it whether a checkpoint was stock: so a stock
            checkpoint is warned of once, with the image tower, which OpenCLIP loads first.
    """
    blocks = list(transformer.resblocks)
    kinds = ["softmax"] * (len(blocks) - last if last else 0)
    kinds += [kind] * (len(blocks) - len(kinds))
    for block, each in zip(blocks, kinds, strict=True):
        if not isinstance(block, ResidualAttentionBlock) or hasattr(block, "ln_1_kv"):
            raise TypeError(
                f"only OpenCLIP's default attention blocks can be swapped, not {type(block).__name__}"
            )
        block.attn = OperatorAttention.from_existing(block.attn, kind=each, train_tokens=train_tokens)
    record_kinds(transformer, kinds, part=part, loaded=loaded)


def kinds_label(kinds: Sequence[str]) -> str:
    """The kind of a tower whose blocks are alike; else the kinds in order with their counts (softmax8+normlinear4)."""
    runs = [(kind, len(list(group))) for kind, group in groupby(kinds)]
    return runs[0][0] if len(runs) == 1 else "+".join(f"{kind}{count}" for kind, count in runs)


def record_kinds(
    tower: nn.Module, kinds: Sequence[str], *, part: str, loaded: dict[str, bool] | None = None
) -> None:
    """Records the kinds of a tower's blocks in its state dict, in place of what was recorded before.

    A softmax tower keeps the stock state dict. Every other one gets a buffer `attention_kind` (the ASCII codes of
    `kinds_label`), so that loading it into a tower of another kind fails instead of giving wrong features in silence.
    """
    label = kinds_label(kinds)
    if hasattr(tower, KIND_BUFFER):
        delattr(tower, KIND_BUFFER)
    if label != "softmax":
        codes = torch.tensor(list(label.encode()), dtype=torch.uint8, device=_device_of(tower))
        tower.register_buffer(KIND_BUFFER, codes)
    expect_kind(tower, label, part=part, loaded=loaded)


def _device_of(tower: nn.Module) -> torch.device:
    """Where a tower's weights are, so that one device holds all of it, as training with NCCL needs."""
    device = next((parameter.device for parameter in tower.parameters()), torch.device("cpu"))
    return torch.device("cpu") if device.type == "meta" else device


@dataclass
class _Expected:
    """What a tower's weights must say: the kind, "image" or "text", and what its model's towers have noted."""

    kind: str
    part: str
    loaded: dict[str, bool]


def expect_kind(tower: nn.Module, kind: str, *, part: str, loaded: dict[str, bool] | None = None) -> None:
    """Makes loading weights of another kind into `tower` an error, strict or not; see `swap_attention`.

    The hook raises AttentionMismatch. What was expected before is not any more.
    """
    register: Any = tower.register_load_state_dict_pre_hook  # without types in PyTorch
    if EXPECTED not in tower.__dict__:
        register(_check_kind)
    tower.__dict__[EXPECTED] = _Expected(kind, part, {} if loaded is None else loaded)


def _check_kind(
    transformer: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    _metadata: Any,
    _strict: bool,
    _missing: list[str],
    _unexpected: list[str],
    _errors: list[str],
) -> None:
    """Runs before a state dict is loaded: same kind passes, stock softmax passes with a warning, others are errors."""
    if not any(key.startswith(prefix) for key in state_dict):
        return  # part of a state dict, without this tower
    expected: _Expected = transformer.__dict__[EXPECTED]
    kind, part, loaded = expected.kind, expected.part, expected.loaded
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
        raise AttentionMismatch(
            f"the checkpoint's {part} tower was trained with {saved_kind} attention and this model's has {kind}: the "
            "same weights would give other features. Load it into a model of that attention: of ours, one named "
            f"...-{_name_of(saved_kind)}{'-text' if part == 'text' else ''}."
        )


def _name_of(label: str) -> str:
    """The part of a model's name that stands for a label of `kinds_label`."""
    mixed = re.fullmatch(r"softmax\d+\+([a-z]+)(\d+)", label)
    return f"{mixed[1]}-last{mixed[2]}" if mixed else label


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
        if isinstance(module, HeadOperator):
            for factor in module.factors:
                state_dict.setdefault(f"{prefix}{name}.{factor}_logit", module.initial_logits(factor))
