"""Shapes and memory layouts that every implementation of an operator shares."""

import torch
from torch import Tensor


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """The dtype of sums over tokens: float32, or float64 where one of the inputs is float64."""
    dtype = torch.float32
    for x in tensors:
        dtype = torch.promote_types(dtype, x.dtype)
    return dtype


def empty_output(q: Tensor, v: Tensor) -> Tensor:
    """An output (B, H, N, Dv) in the dtype of v, stored as (B, N, H, Dv): merging its heads is a view."""
    batch, heads, tokens, _ = q.shape
    return v.new_empty(batch, tokens, heads, v.shape[-1]).transpose(1, 2)


def empty_gradients(q: Tensor, v: Tensor) -> Tensor:
    """One buffer (B, N, 2 H D + H Dv) for the gradients of q, k and v.

    For D = Dv it has the layout of a packed projection (B, N, 3, H, D), whose gradient it then is as it stands.
    """
    batch, heads, tokens, width = q.shape
    return q.new_empty(batch, tokens, heads * (2 * width + v.shape[-1]))


def split_gradients(gradients: Tensor, heads: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """The views dq, dk (B, H, N, D) and dv (B, H, N, Dv) of the buffer of `empty_gradients`."""
    size = heads * width
    dq, dk, dv = gradients.split_with_sizes((size, size, gradients.shape[-1] - 2 * size), -1)
    return _heads_first(dq, heads), _heads_first(dk, heads), _heads_first(dv, heads)


def _heads_first(x: Tensor, heads: int) -> Tensor:
    return x.view(*x.shape[:2], heads, x.shape[-1] // heads).transpose(1, 2)
