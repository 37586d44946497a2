"""Normalised linear attention: scores in [0, 1] and no denominator."""

from typing import TypeVar

from torch import Tensor

from openclip_linattn.errors import UserError
from openclip_linattn.ops.inputs import (
    check_heads,
    full_precision,
    is_finite,
    key_counts,
    read_tokens,
    write_output,
)
from openclip_linattn.ops.kernels import fits, selectable
from openclip_linattn.ops.library import Definition, define
from openclip_linattn.ops.sums import unit, weighted_values

LENGTH_SCALES = ("none", "mean", "train")


@selectable
def normalized_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    scale: float = 1.0,
    length_scale: str = "none",
    train_tokens: int | None = None,
) -> Tensor:
    """Normalised linear attention, o_i = c sum_j s_ij v_j with s_ij = (1 + q^_i.k^_j) / 2, in O(N D^2).

    q^ and k^ have length one, so that every score lies in [0, 1] (arXiv 2604.10064, Eq. 7). There is no
    denominator; c = scale * length factor, with N the number of keys that the row may attend to:
    length_scale "none": 1; "mean": 2 / N, so that a mean score of 1/2 weighs like softmax's 1/N; "train":
    train_tokens / N, equal to "none" at the training resolution and bounded at every other. The last two keep
    the common part of the values constant over N; a part with zero mean still shrinks like 1 / sqrt N.

    Shapes: q, k (B, H, N, D), v (B, H, N, Dv), any strides; returns (B, H, N, Dv) in the dtype of v. Sums
    over tokens are taken in float32 (float64 for float64 inputs), under autocast too, and scaled before
    the cast. With "none" the output grows with N and may leave the range of float16.
    causal: row i attends to the keys up to i, and N counts those. key_padding_mask: bool (B, N), True =
    padding; padded keys leave the sum and N, and padded queries give zero. train_tokens is read with "train"
    only. Raises UserError for inputs of another form.
    """
    check_scale(scale, length_scale, train_tokens)
    check_heads(q, k, v)
    if not causal and key_padding_mask is None and fits(q, k, v):
        return _bidirectional(q, k, v, 0.5 * scale * length_factor(q.shape[-2], length_scale, train_tokens))[
            0
        ]
    tokens = read_tokens(q, k, v, key_padding_mask)
    with full_precision(v):
        factor = 0.5 * scale * length_factor(key_counts(tokens, causal=causal), length_scale, train_tokens)
        o = factor * weighted_values(unit(tokens.q), unit(tokens.k), tokens.v, offset=1.0, causal=causal)
    return write_output(o, tokens)


Counts = TypeVar("Counts", int, Tensor)


def length_factor(counts: Counts, length_scale: str, train_tokens: int | None) -> Counts | float:
    """The factor by which each row's sum is scaled, from the number of keys that it may attend to.

    Shapes: counts (B or 1, 1, N or 1, 1), or one number for all rows; at least 1. Returns the same shape, or 1.0
    for "none".
    """
    if length_scale == "mean":
        return 2 / counts
    if length_scale == "train" and train_tokens is not None:
        return train_tokens / counts
    return 1.0


def check_scale(scale: float, length_scale: str, train_tokens: int | None) -> None:
    """Raise UserError unless the three factors of normalised linear attention fit together."""
    if not is_finite(scale):
        raise UserError(f"scale must be a finite number, got {scale!r}")
    if length_scale not in LENGTH_SCALES:
        raise UserError(f"length_scale must be one of {', '.join(LENGTH_SCALES)}, got {length_scale!r}")
    if length_scale == "train" and (train_tokens is None or train_tokens < 1):
        raise UserError(
            "length_scale 'train' needs train_tokens, the number of tokens at the training resolution "
            f"(197 for patch 16 at 224 px), got {train_tokens!r}"
        )


def _plain(q: Tensor, k: Tensor, v: Tensor, factor: float) -> Tensor:
    tokens = read_tokens(q, k, v, None)
    o = factor * weighted_values(unit(tokens.q), unit(tokens.k), tokens.v, offset=1.0, causal=False)
    return write_output(o, tokens)


_bidirectional = define(
    Definition(
        name="normalized",
        plain=_plain,
        forward_macs=lambda tokens, width, value_width: 2 * tokens * width * value_width,
        backward_macs=lambda tokens, width, value_width: 4 * tokens * width * value_width,
        factors=", float scale",
    )
)
