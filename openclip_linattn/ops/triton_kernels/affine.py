"""Launches of the two affine kinds: which kernels run, on which chunks, with which buffers."""

import torch
from torch import Tensor

from openclip_linattn.ops.layout import compute_dtype, empty_gradients, empty_output, split_gradients
from openclip_linattn.ops.triton_kernels.affine_kernels import (
    backward_kernel,
    forward_kernel,
    key_gradients_kernel,
    query_gradients_kernel,
    sum_keys_kernel,
    write_outputs_kernel,
)
from openclip_linattn.ops.triton_kernels.chunks import tokens_per_program
from openclip_linattn.ops.triton_kernels.launch import choose, on_device_of, rows

RECOMPUTED_TOKENS = 520
"""Tokens up to which no state is saved: the backward pass sums k and v again, and its second read is cached."""


def state_shape(q: Tensor, v: Tensor, *, denominator: bool) -> tuple[int, ...]:
    """The shape of the saved state: (B, H, D Dv + Dv, and D more with a denominator), or (0,) for none."""
    batch, heads, tokens, d = q.shape
    if tokens <= RECOMPUTED_TOKENS:
        return (0,)
    dv = v.shape[-1]
    return (batch, heads, d * dv + dv + (d if denominator else 0))


def forward(q: Tensor, k: Tensor, v: Tensor, scale: float, *, denominator: bool) -> tuple[Tensor, Tensor]:
    """o_i = scale (sum_j v_j + q^_i.sum_j k^_j v_j^T), over its mean weight with a denominator; and the state."""
    o = empty_output(q, v)
    state = q.new_empty(state_shape(q, v, denominator=denominator), dtype=compute_dtype(q))
    batch, heads, tokens, _ = q.shape
    chunk = _chunk(q)
    blocks, options = choose(q, v, backward=False)
    fixed = (blocks, denominator)
    with on_device_of(q):
        if chunk >= tokens:
            forward_kernel[(batch * heads,)](
                rows(q), rows(k), rows(v), rows(o), state, heads, tokens, scale, *fixed, state.numel() > 0,
                **options,
            )  # fmt: skip
            return o, state
        grid = (batch * heads, -(-tokens // chunk))
        partial = state.new_empty(grid[1], *state.shape)
        sum_keys_kernel[grid](rows(k), rows(v), partial, heads, tokens, chunk, *fixed, **options)
        torch.sum(partial, 0, out=state)
        write_outputs_kernel[grid](rows(q), rows(o), state, heads, tokens, chunk, scale, *fixed, **options)
    return o, state


def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, state: Tensor, scale: float, *, denominator: bool
) -> Tensor:
    """The gradients of q, k and v in the buffer of `layout.empty_gradients`."""
    gradients = empty_gradients(q, v)
    batch, heads, tokens, d = q.shape
    dq, dk, dv = (rows(x) for x in split_gradients(gradients, heads, d))
    chunk = _chunk(q)
    blocks, options = choose(q, v, backward=True)
    fixed = (blocks, denominator)
    with on_device_of(q):
        if chunk >= tokens:
            backward_kernel[(batch * heads,)](
                rows(do), rows(q), rows(k), rows(v), state, dq, dk, dv, heads, tokens, scale, *fixed,
                state.numel() > 0, **options,
            )  # fmt: skip
            return gradients
        grid = (batch * heads, -(-tokens // chunk))
        partial = state.new_empty(grid[1], *state.shape)
        query_gradients_kernel[grid](
            rows(do), rows(q), dq, state, partial, heads, tokens, chunk, scale, *fixed, **options
        )
        d_state = partial.sum(0)
        key_gradients_kernel[grid](
            rows(k), rows(v), dk, dv, state, d_state, heads, tokens, chunk, scale, *fixed, **options
        )
    return gradients


def _chunk(q: Tensor) -> int:
    """Tokens per program; without a saved state one program does all of a head."""
    tokens = q.shape[-2]
    return tokens if tokens <= RECOMPUTED_TOKENS else tokens_per_program(q)
