"""One hop of pure infinite self-attention without its factor rho: see `inf_kernels` for the formula.

A and its gradient are made in blocks and made again in the backward pass: memory is linear in the tokens. A row
is divided by its norm only when all rows (of the causal form: all earlier ones) have added to it; until then it
is kept in float32.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from openclip_linattn.ops.inputs import TINY
from openclip_linattn.ops.layout import compute_dtype, empty_gradients, empty_output, split_gradients
from openclip_linattn.ops.triton_kernels.inf_kernels import (
    aligned_kernel,
    forward_kernel,
    key_gradients_kernel,
    query_gradients_kernel,
)
from openclip_linattn.ops.triton_kernels.launch import (
    as_constant,
    float32_precision,
    on_device_of,
    padded,
    rows,
)


@dataclass(frozen=True)
class Tiles:
    """The constants of a compiled kernel; passed as one constexpr."""

    d: int
    """Width of q and k."""
    dv: int
    """Width of v."""
    block_d: int
    """Width of q and k, padded to a power of two of at least 16."""
    block_dv: int
    """Width of v, padded likewise."""
    rows: int
    """Rows of a block of scores."""
    keys: int
    """Keys of a block of scores."""
    stages: int
    """Steps whose reads are under way at a time."""
    precision: str
    """How float32 factors are multiplied: see `launch.float32_precision`."""


# Bytes per number and padded width of the wider of q and v -> rows, keys, warps, stages. No entry has been timed:
# in the code compiled for compute capability 9.0 they spill no registers (float32 of width 128: a few).
_FORWARD = {
    (2, 16): (128, 64, 4, 3),
    (2, 32): (128, 64, 4, 3),
    (2, 64): (128, 64, 8, 3),
    (2, 128): (128, 64, 8, 2),
    (4, 16): (64, 32, 4, 2),
    (4, 32): (64, 32, 4, 2),
    (4, 64): (64, 32, 8, 2),
    (4, 128): (32, 32, 8, 2),
}
_QUERY_GRADIENTS = _FORWARD
_KEY_GRADIENTS = {
    (2, 16): (64, 128, 8, 2),
    (2, 32): (64, 128, 8, 2),
    (2, 64): (64, 128, 8, 2),
    (2, 128): (64, 64, 8, 2),
    (4, 16): (32, 64, 4, 2),
    (4, 32): (32, 64, 8, 2),
    (4, 64): (32, 64, 8, 2),
    (4, 128): (32, 32, 8, 2),
}


def state_shape(q: Tensor, v: Tensor, causal: bool) -> tuple[int, ...]:  # noqa: ARG001
    """The shape of the norms: one per row if causal, else one per head."""
    return (*q.shape[:2], q.shape[2] if causal else 1, 1)


def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """The output (B, H, N, Dv) and the norms; q, k (B, H, N, D), v (B, H, N, Dv)."""
    o = empty_output(q, v)
    batch, heads, tokens, _ = q.shape
    total = q.new_empty(o.shape, dtype=compute_dtype(q))
    squares = total.new_empty(batch, heads, tokens, 1)
    tiles, warps = _choose(_FORWARD, q, v)
    with on_device_of(q):
        forward_kernel[_grid(q, tiles.rows)](
            rows(q), rows(k), rows(v), rows(total), squares, heads, tokens, tiles, causal, num_warps=warps
        )
    squares = squares.cumsum(2) if causal else squares.sum(2, keepdim=True)
    norm = squares.sqrt_().clamp_min_(TINY)
    return torch.div(total, norm, out=o), norm


def backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, norm: Tensor, causal: bool) -> Tensor:
    """The gradients of q, k and v in one buffer (B, N, 2 H D + H Dv)."""
    gradients = empty_gradients(q, v)
    batch, heads, tokens, d = q.shape
    dq, dk, dv = (rows(x) for x in split_gradients(gradients, heads, d))
    inputs = rows(do), rows(q), rows(k), rows(v)
    aligned = norm.new_empty(batch, heads, tokens, 1)
    by_rows, row_warps = _choose(_QUERY_GRADIENTS, q, v)
    by_keys, key_warps = _choose(_KEY_GRADIENTS, q, v)
    with on_device_of(q):
        aligned_kernel[_grid(q, by_rows.rows)](
            inputs[0], rows(o), aligned, heads, tokens, by_rows, num_warps=row_warps
        )
        factors = norm.reciprocal(), _slope_of_norm(aligned, norm, causal)
        query_gradients_kernel[_grid(q, by_rows.rows)](
            *inputs, *factors, dq, heads, tokens, by_rows, causal, num_warps=row_warps
        )
        key_gradients_kernel[_grid(q, by_keys.keys)](
            *inputs, *factors, dk, dv, heads, tokens, by_keys, causal, num_warps=key_warps
        )
    return gradients


def _slope_of_norm(aligned: Tensor, norm: Tensor, causal: bool) -> Tensor:
    """What a score's own value is multiplied with in its gradient, shaped as the norms."""
    aligned = aligned if causal else aligned.sum(2, keepdim=True)
    # A clamped norm is constant.
    slope = torch.where(norm > TINY, -aligned / norm / norm, 0)
    return slope.flip(2).cumsum(2).flip(2) if causal else slope


def _choose(
    table: dict[tuple[int, int], tuple[int, int, int, int]], q: Tensor, v: Tensor
) -> tuple[Tiles, int]:
    """The constants and the number of warps for inputs q (B, H, N, D) and v (B, H, N, Dv)."""
    d, dv = q.shape[-1], v.shape[-1]
    block_d, block_dv = padded(d), padded(dv)
    row_count, key_count, warps, stages = table[q.element_size(), max(block_d, block_dv)]
    tiles = Tiles(d, dv, block_d, block_dv, row_count, key_count, stages, float32_precision())
    return as_constant(tiles), warps


def _grid(q: Tensor, size: int) -> tuple[int]:
    """One program per head and block of `size` tokens."""
    batch, heads, tokens, _ = q.shape
    # `size` is one of Triton's constants, and so would be the quotient; launchers want a plain number.
    return (batch * heads * -(-tokens // int(size)),)
