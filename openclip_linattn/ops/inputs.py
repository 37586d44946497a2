"""What every attention operator does before and after its formula: checks, precision, padding."""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from openclip_linattn.errors import UserError
from openclip_linattn.ops.layout import compute_dtype

TINY = 1e-12
"""Denominators are clamped to this from below; squared token norms have it added."""


class Tokens(NamedTuple):
    """Checked inputs in the dtype of the computation, with padded tokens set to zero.

    Zeroed keys and values drop out of every sum of products by themselves, and rubbish (NaN too) in padded
    positions cannot spread; what is left to an operator is to count the keys with `key_counts`.
    """

    q: Tensor
    """Queries (B, H, N, D)."""
    k: Tensor
    """Keys (B, H, N, D)."""
    v: Tensor
    """Values (B, H, N, Dv)."""
    padding: Tensor | None
    """True where a token is padding, (B, 1, N, 1)."""
    out_dtype: torch.dtype

    @property
    def present(self) -> Tensor:
        """One for a token, zero for padding: a column (B or 1, 1, N, 1)."""
        if self.padding is None:
            return self.q.new_ones(1, 1, self.q.shape[-2], 1)
        return (~self.padding).to(self.q.dtype)


def read_tokens(
    q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None, *, keep_dtype: bool = False
) -> Tokens:
    """Check the inputs of an operator, blank out padding and cast to the dtype of the computation.

    Shapes: q, k (B, H, N, D), v (B, H, N, Dv), key_padding_mask (B, N), bool, True = padding. The computation
    runs in the widest input dtype and at least in float32, or in the dtype of v with `keep_dtype`.
    Raises UserError, naming the argument, for anything else.
    """
    check_heads(q, k, v)
    padding = None
    if key_padding_mask is not None:
        _check_mask(key_padding_mask, q)
        padding = key_padding_mask[:, None, :, None]
        q, k, v = (x.masked_fill(padding, 0) for x in (q, k, v))
    dtype = v.dtype if keep_dtype else compute_dtype(q, k, v)
    return Tokens(q.to(dtype), k.to(dtype), v.to(dtype), padding, v.dtype)


def write_output(o: Tensor, tokens: Tokens) -> Tensor:
    """Cast an operator's result to the dtype of v and set the rows of padded queries to zero."""
    o = o.to(tokens.out_dtype)
    return o if tokens.padding is None else o.masked_fill(tokens.padding, 0)


def check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise UserError, naming the argument, unless q, k (B, H, N, D) and v (B, H, N, Dv) fit together."""
    given: tuple[tuple[str, object], ...] = (("q", q), ("k", k), ("v", v))
    for name, x in given:
        if not isinstance(x, Tensor):
            raise UserError(f"{name} must be a tensor of shape (B, H, N, D), got {type(x).__name__}")
        if x.dim() != 4:
            raise UserError(
                f"{name} must have shape (B, H, N, D), got {x.dim()} dimensions: {tuple(x.shape)}"
            )
        if not x.is_floating_point():
            raise UserError(f"{name} must be floating point, got {x.dtype}")
        if x.device != q.device:
            raise UserError(f"q, k and v must be on one device, got q on {q.device} and {name} on {x.device}")
    if q.shape != k.shape or q.shape[:3] != v.shape[:3]:
        raise UserError(
            "q, k and v must have the same batch, heads and tokens (self-attention), and q and k the same "
            f"width, got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        )
    if 0 in q.shape[1:] or v.shape[3] == 0:
        raise UserError(
            "there must be at least one head and one token of width 1, "
            f"got q {tuple(q.shape)}, v {tuple(v.shape)}"
        )


def full_precision(x: Tensor) -> AbstractContextManager[object]:
    """A context in which autocast leaves the products of an operator alone."""
    # Asking a device without autocast (meta, say) whether it is enabled raises.
    if not torch.amp.is_autocast_available(x.device.type):
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)


def key_counts(tokens: Tokens, *, causal: bool) -> Tensor:
    """The number of keys that each row may attend to, (B or 1, 1, N or 1, 1), at least 1.

    The lower bound matters only for the rows of padded queries, whose output is zero in any case.
    """
    present = tokens.present
    counts = present.cumsum(-2) if causal else present.sum(-2, keepdim=True)
    return counts.clamp_min(1)


def per_head(
    factor: float | Tensor, name: str, like: Tensor, dtype: torch.dtype | None = None
) -> float | Tensor:
    """Bring a factor (a number, or a tensor of one value or one per head) to a form that scales (B, H, N, D).

    Tensors may have shape (), (H,), (H, 1, 1) or (B or 1, H or 1, 1, 1); they are cast to the dtype given,
    or else that of `like`, and keep their gradient. Raises UserError for other shapes and for numbers that are not
    finite.
    """
    if not isinstance(factor, Tensor):
        if not is_finite(factor):
            raise UserError(
                f"{name} must be a finite number or a tensor with one value per head, got {factor!r}"
            )
        return float(factor)
    given = tuple(factor.shape)
    if factor.dim() == 1:
        factor = factor.view(-1, 1, 1)
    batch, heads = like.shape[:2]
    full = (1,) * (4 - factor.dim()) + tuple(factor.shape)
    fits = len(full) == 4 and full[0] in (1, batch) and full[1] in (1, heads) and full[2] == full[3] == 1
    if not fits or not factor.is_floating_point():
        raise UserError(
            f"{name} must hold one floating-point value, or one per head: shape (), ({heads},) or "
            f"({heads}, 1, 1), got shape {given}, {factor.dtype}"
        )
    return factor.to(device=like.device, dtype=dtype or like.dtype)


def vanishing_weight(dtype: torch.dtype) -> float:
    """The mean affine weight of a row up to which the row counts as having no weight at all.

    Where q is opposite to every key, 1 + q^.k^ is zero up to rounding (float32) or up to the 1e-12 in the
    token norm (float64), and a quotient of two such numbers means nothing.
    """
    return 1e-9 if dtype == torch.float64 else 32 * torch.finfo(torch.float32).eps


def is_finite(value: object) -> bool:
    """Whether a factor is a finite number; taken for granted in a graph, where numbers may be symbols."""
    return isinstance(value, (int, float)) and (torch.compiler.is_compiling() or math.isfinite(value))


def _check_mask(mask: object, q: Tensor) -> None:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise UserError(f"key_padding_mask must be a bool tensor with True = padding, got {kind}")
    expected = (q.shape[0], q.shape[2])
    if tuple(mask.shape) != expected:
        raise UserError(f"key_padding_mask must have shape (B, N) = {expected}, got {tuple(mask.shape)}")
    if mask.device != q.device:
        raise UserError(f"key_padding_mask is on {mask.device}, but q is on {q.device}: move it there")
