"""Linear infinite self-attention without its factor rho: see `lininf_kernels` for the formula."""

import torch
from torch import Tensor

from openclip_linattn.ops.inputs import TINY
from openclip_linattn.ops.layout import compute_dtype, empty_gradients, split_gradients
from openclip_linattn.ops.triton_kernels.chunks import tokens_per_program
from openclip_linattn.ops.triton_kernels.launch import choose, on_device_of, rows
from openclip_linattn.ops.triton_kernels.lininf_kernels import (
    backward_kernel,
    forward_kernel,
    key_gradients_kernel,
    query_gradients_kernel,
    sum_queries_kernel,
    sum_values_kernel,
)


def state_shape(q: Tensor, v: Tensor) -> tuple[int, ...]:
    """The shape of the average query, the output, the sum of energies and the sum of scores, side by side."""
    return (*q.shape[:2], 1, q.shape[-1] + v.shape[-1] + 2)


def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The output (B, H, 1, Dv) and the state for `backward`; q, k (B, H, N, D), v (B, H, N, Dv)."""
    batch, heads, tokens, d = q.shape
    dv = v.shape[-1]
    chunk = tokens_per_program(q)
    blocks, options = choose(q, v, backward=False)
    with on_device_of(q):
        if chunk >= tokens:
            o = v.new_empty(batch, heads, 1, dv)
            state = q.new_empty(state_shape(q, v), dtype=compute_dtype(q))
            forward_kernel[(batch * heads,)](
                rows(q), rows(k), rows(v), o, state, heads, tokens, blocks, **options
            )
            return o, state
        grid = (batch * heads, -(-tokens // chunk))
        partial = q.new_empty(grid[1], batch, heads, 1, d + 1, dtype=compute_dtype(q))
        sum_queries_kernel[grid](rows(q), partial, heads, tokens, chunk, blocks, **options)
        query, energy = _quotient(partial)
        partial = q.new_empty(grid[1], batch, heads, 1, dv + 1, dtype=compute_dtype(q))
        sum_values_kernel[grid](rows(k), rows(v), query, partial, heads, tokens, chunk, blocks, **options)
        output, score = _quotient(partial)
        return output.to(v.dtype), torch.cat([query, output, energy, score], -1)


def backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, state: Tensor) -> Tensor:
    """The gradients of q, k and v in one buffer (B, N, 2 H D + H Dv), for the gradient do (B, H, 1, Dv)."""
    gradients = empty_gradients(q, v)
    batch, heads, tokens, d = q.shape
    dq, dk, dv = (rows(x) for x in split_gradients(gradients, heads, d))
    chunk = tokens_per_program(q)
    blocks, options = choose(q, v, backward=True)
    with on_device_of(q):
        if chunk >= tokens:
            backward_kernel[(batch * heads,)](
                rows(do), rows(q), rows(k), rows(v), state, dq, dk, dv, heads, tokens, blocks, **options
            )
            return gradients
        grid = (batch * heads, -(-tokens // chunk))
        partial = state.new_empty(grid[1], batch, heads, d)
        key_gradients_kernel[grid](
            rows(do), rows(k), rows(v), state, dk, dv, partial, heads, tokens, chunk, blocks, **options
        )
        d_query = partial.sum(0)
        query_gradients_kernel[grid](d_query, rows(q), state, dq, heads, tokens, chunk, blocks, **options)
    return gradients


def _quotient(partial: Tensor) -> tuple[Tensor, Tensor]:
    """The weighted mean and the sum of the weights, clamped, from partial sums (chunks, B, H, 1, D + 1)."""
    sums = partial.sum(0)
    weights = sums[..., -1:].clamp_min(TINY)
    return sums[..., :-1] / weights, weights
