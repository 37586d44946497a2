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


def summed_weights(q: Tensor, k: Tensor, present: Tensor, *, offset: float) -> Tensor:
    """Sum the weights offset + q_i.k_j over all keys, (B, H, N, 1).

    Shapes: q, k (B, H, N, D), with zero rows of k for padding; present (B or 1, 1, N, 1), zero for padding.
    """
    # A sum, not a product with a column of ones: matrix-vector products add up one token after the other,
    # which costs three digits in float32 at 10^5 tokens.
    return product(q, k.sum(-2, keepdim=True).mT) + offset * present.sum(-2, keepdim=True)


def _causal_weighted_values(q: Tensor, k: Tensor, v: Tensor, offset: float) -> Tensor:
    state: Tensor | None = None
    total: Tensor | None = None
    outputs = []
    chunks = [torch.split(x, CHUNK, -2) for x in (q, k, v)]
    last = len(chunks[0]) - 1
    for index, (q_chunk, k_chunk, v_chunk) in enumerate(zip(*chunks, strict=True)):
        o = product((product(q_chunk, k_chunk.mT) + offset).tril(), v_chunk)
        if state is not None and total is not None:
            o = o + product(q_chunk, state, offset * total)
        outputs.append(o)
        if index < last:
            added, added_total = product(k_chunk.mT, v_chunk), v_chunk.sum(-2, keepdim=True)
            state = added if state is None else state + added
            total = added_total if total is None else total + added_total
    return torch.cat(outputs, -2)
