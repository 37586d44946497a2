"""Linear infinite self-attention without its factor rho, in chunks of tokens.

Every token gets the same vector, so that outputs and their gradients have one row: the caller broadcasts.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from openclip_linattn.ops.inputs import TINY
from openclip_linattn.ops.layout import compute_dtype, empty_gradients, split_gradients

TOKENS = 512
"""Tokens of one sample that are read, in all heads, before the next: they stay in the cache of a core."""


def state_shape(q: Tensor, v: Tensor) -> tuple[int, ...]:
    """The shape of the average query, the output, the sum of energies and the sum of scores, side by side."""
    return (*q.shape[:2], 1, q.shape[-1] + v.shape[-1] + 2)


def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return o = sum_j s_j v_j / sum s, s_j = ReLU(qbar.k_j), qbar = sum_i |q_i| q_i / sum |q|.

    Source: arXiv 2603.00175. Shapes: q, k (B, H, N, D), v (B, H, N, Dv), any strides; o (B, H, 1, Dv). Both
    sums are clamped to 1e-12 from below. Where no score is positive the output is zero.
    """
    state = torch.zeros(state_shape(q, v), dtype=compute_dtype(q), device=q.device)
    for sample in range(q.shape[0]):
        _forward(q[sample], k[sample], v[sample], _split(state[sample], q.shape[-1]))
    return _split(state, q.shape[-1]).output.to(v.dtype, copy=True), state


def backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, state: Tensor) -> Tensor:
    """Return the gradients of q, k and v, in the buffer of `empty_gradients`, for the gradient do of o.

    do (B, H, 1, Dv) is the sum over the tokens. Where no score is positive all gradients are zero.
    """
    gradients = empty_gradients(q, v)
    dq, dk, dv = split_gradients(gradients, q.shape[1], q.shape[3])
    do = do.to(state.dtype)
    for sample in range(q.shape[0]):
        sums = _split(state[sample], q.shape[-1])
        d_query = _backward_of_scores(do[sample], k[sample], v[sample], sums, (dk[sample], dv[sample]))
        _backward_of_query(d_query, q[sample], sums, dq[sample])
    return gradients


class _Sums(NamedTuple):
    """Views of the state: what the forward pass writes and the backward pass reads."""

    query: Tensor
    output: Tensor
    energy: Tensor
    score: Tensor


def _split(state: Tensor, width: int) -> _Sums:
    return _Sums(*torch.split(state, [width, state.shape[-1] - width - 2, 1, 1], -1))


def _forward(q: Tensor, k: Tensor, v: Tensor, sums: _Sums) -> None:
    dtype = sums.query.dtype
    for tokens in _chunks(q):
        q_chunk = q[:, tokens].to(dtype)
        energy = torch.linalg.vector_norm(q_chunk, dim=-1, keepdim=True)
        sums.query.add_(energy.mT @ q_chunk)
        sums.energy.add_(energy.sum(1, keepdim=True))
    sums.query.div_(sums.energy.clamp_min_(TINY))
    for tokens in _chunks(q):
        score = _scores(sums.query, k[:, tokens].to(dtype))
        sums.output.add_(score @ v[:, tokens].to(dtype))
        sums.score.add_(score.sum(-1, keepdim=True))
    sums.output.div_(sums.score.clamp_min_(TINY))


def _backward_of_scores(do: Tensor, k: Tensor, v: Tensor, sums: _Sums, out: tuple[Tensor, Tensor]) -> Tensor:
    """Write the gradients of k and v and return that of the average query, (H, 1, D)."""
    dk, dv = out
    d_query = torch.zeros_like(sums.query, memory_format=torch.contiguous_format)
    # A clamped sum is constant.
    through_sum = (do * sums.output).sum(-1, keepdim=True) * (sums.score > TINY)
    for tokens in _chunks(k):
        k_chunk, v_chunk = (x[:, tokens].to(do.dtype) for x in (k, v))
        score = _scores(sums.query, k_chunk)
        d_score = (do @ v_chunk.mT).sub_(through_sum).div_(sums.score).mul_(score > 0)
        d_query.add_(d_score @ k_chunk)
        dk[:, tokens] = d_score.mT * sums.query
        dv[:, tokens] = score.div_(sums.score).mT * do
    return d_query


def _backward_of_query(d_query: Tensor, q: Tensor, sums: _Sums, dq: Tensor) -> None:
    """Write the gradient of q: of the sum of |q_i| q_i, and through |q_i| of both sums."""
    along = d_query / sums.energy
    through_sum = (along * sums.query).sum(-1, keepdim=True) * (sums.energy > TINY)
    for tokens in _chunks(q):
        q_chunk = q[:, tokens].to(along.dtype)
        energy = torch.linalg.vector_norm(q_chunk, dim=-1, keepdim=True)
        # The gradient of the length of a zero vector is zero.
        of_energy = (q_chunk @ along.mT).sub_(through_sum).div_(energy).masked_fill_(energy == 0, 0)
        dq[:, tokens] = (q_chunk * of_energy).addcmul_(energy, along)


def _scores(query: Tensor, k: Tensor) -> Tensor:
    return torch.relu_(query @ k.mT)


def _chunks(x: Tensor) -> Iterator[slice]:
    for start in range(0, x.shape[1], TOKENS):
        yield slice(start, start + TOKENS)
