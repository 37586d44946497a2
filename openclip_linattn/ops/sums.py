"""Sums over keys whose weights are inner products, in time and memory linear in the number of tokens."""

import torch
from torch import Tensor

from openclip_linattn.ops.inputs import TINY
from openclip_linattn.ops.products import product

CHUNK = 128
"""Tokens per step of a causal scan: one step covers a text tower (77 tokens)."""


def unit(x: Tensor) -> Tensor:
    """Scale each row of x (..., N, D) to length one: x (|x|^2 + 1e-12)^-1/2, zero for a zero row."""
    # vector_norm has a zero gradient at zero and, unlike x * x, needs no temporary of the size of x.
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * (norm.square() + TINY).rsqrt()


def weighted_values(q: Tensor, k: Tensor, v: Tensor, *, offset: float, causal: bool) -> Tensor:
    """Sum the values with weights offset + q_i.k_j, over all keys or over the keys up to i.

    Shapes: q, k (B, H, N, D), v (B, H, N, Dv); returns (B, H, N, Dv). Needs O(N D Dv) operations;
    the causal form keeps one D x Dv state per chunk of tokens, never one per token.
    """
    if causal:
        return _causal_weighted_values(q, k, v, offset)
    return product(q, product(k.mT, v), offset * v.sum(-2, keepdim=True) if offset else None)


def summed_weights(q: Tensor, k: Tensor, present: Tensor, *, offset: float, causal: bool) -> Tensor:
    """Sum the weights offset + q_i.k_j over the keys of `weighted_values`, (B, H, N, 1).

    Shapes: q, k (B, H, N, D), with zero rows of k for padding; present (B or 1, 1, N, 1), zero for padding.
    """
    if causal:
        return _causal_weighted_values(q, k, present.expand(*k.shape[:2], -1, -1), offset)
    # A sum, not a product with a column of ones: matrix-vector products add up one token after the other,
    # which costs three digits in float32 at 10^5 tokens.
    return product(q, k.sum(-2, keepdim=True).mT) + offset * present.sum(-2, keepdim=True)


def _causal_weighted_values(q: Tensor, k: Tensor, v: Tensor, offset: float) -> Tensor:
    state: Tensor | None = None
    total: Tensor | None = None
    outputs = []
    chunks = zip(*(torch.split(x, CHUNK, -2) for x in (q, k, v)), strict=True)
    for q_chunk, k_chunk, v_chunk in chunks:
        o = product((product(q_chunk, k_chunk.mT) + offset).tril(), v_chunk)
        added, added_total = product(k_chunk.mT, v_chunk), v_chunk.sum(-2, keepdim=True)
        if state is None or total is None:
            state, total = added, added_total
        else:
            o = o + product(q_chunk, state, offset * total)
            state, total = state + added, total + added_total
        outputs.append(o)
    return torch.cat(outputs, -2)
