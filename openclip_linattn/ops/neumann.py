"""The whole Neumann series of normalised linear attention, exactly and in linear time."""

import math

import torch
from torch import Tensor

from openclip_linattn.errors import UserError
from openclip_linattn.ops.doubling import solve_by_doubling
from openclip_linattn.ops.graphs import is_exporting
from openclip_linattn.ops.inputs import (
    Tokens,
    check_heads,
    full_precision,
    is_finite,
    key_counts,
    per_head,
    read_tokens,
    write_output,
)
from openclip_linattn.ops.kernels import fits, selectable
from openclip_linattn.ops.layout import compute_dtype
from openclip_linattn.ops.library import Definition, define
from openclip_linattn.ops.products import product, solve, solve_lower
from openclip_linattn.ops.small_systems import NORM_FLOOR
from openclip_linattn.ops.sums import CHUNK, unit


@selectable
def neumann_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    gamma: float | Tensor = 0.95,
) -> Tensor:
    """Neumann linear attention, o = [(I - gamma A^)^-1 - I] V = sum_{t>=1} gamma^t A^^t V, in O(N D^2 + D^3).

    A = (1 + Q^ K^^T) / 2 are the scores of normalised linear attention (arXiv 2604.10064, Eq. 7) and
    A^ = A / max(|A|_F, 0.05 N), N the number of keys: infinite self-attention (arXiv 2603.00175) on a matrix
    of rank D + 1. With A = Phi Psi^T the push-through identity turns the N x N inverse into one solve of size
    D + 1 per head. The floor, part of the definition, bounds the amplification where A vanishes (antipodal
    tokens). The series converges for 0 <= gamma < 1; numbers outside are refused, tensors are not looked at.

    Shapes: q, k (B, H, N, D), v (B, H, N, Dv), any strides; returns (B, H, N, Dv) in the dtype of v; computed
    in float32 (float64 for float64 inputs), under autocast too. gamma: a number or a tensor (), (H,) or
    (H, 1, 1), which receives gradients. The relative error of float32 grows like 1 / (1 - gamma): for
    identical tokens about 1e-6 at gamma 0.95 and 1e-5 at 0.99.
    causal: A is lower triangular and row i is divided by n_i = max(|A[:i, :i]|_F, 0.05 N_i), the norm of the
    leading block of that triangular matrix and the number of keys up to i, so that no row knows of later
    tokens. key_padding_mask: bool (B, N), True = padding; padded tokens leave A, its norm and N as keys and
    as queries, and give zero. Raises UserError for inputs of another form.
    """
    check_gamma(gamma)
    check_heads(q, k, v)
    if not causal and key_padding_mask is None and fits(q, k, v):
        return _bidirectional(q, k, v, _table(gamma, q))[0]
    tokens = read_tokens(q, k, v, key_padding_mask)
    with full_precision(v):
        factor = per_head(gamma, "gamma", tokens.v)
        o = _causal(tokens, factor) if causal else _all_keys(tokens, factor)
    return write_output(o, tokens)


def check_gamma(gamma: float | Tensor) -> None:
    """Raise UserError for a number with which the Neumann series need not converge."""
    if not isinstance(gamma, Tensor) and not (is_finite(gamma) and 0 <= gamma < 1):
        raise UserError(f"gamma must be at least 0 and below 1 for the series to converge, got {gamma!r}")


def _table(gamma: float | Tensor, q: Tensor) -> Tensor:
    """The values of gamma as (B or 1, H)."""
    factor = per_head(gamma, "gamma", q, compute_dtype(q))
    if not isinstance(factor, Tensor):
        return q.new_full((1, q.shape[1]), factor, dtype=compute_dtype(q))
    factor = factor if factor.dim() == 0 else factor[..., 0, 0]
    return factor.expand(factor.shape[0] if factor.dim() == 2 else 1, q.shape[1])


def _plain(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor) -> Tensor:
    tokens = read_tokens(q, k, v, None)
    return write_output(_all_keys(tokens, gamma[..., None, None]), tokens)


def _all_keys(tokens: Tokens, gamma: float | Tensor) -> Tensor:
    q, k, v = unit(tokens.q), unit(tokens.k), tokens.v
    counts = key_counts(tokens, causal=False)
    q_sum, k_sum = q.sum(-2, keepdim=True), k.sum(-2, keepdim=True)
    # Phi^T Phi, Psi^T Psi and Psi^T Phi, each times two: Phi = [1, Q^] / sqrt 2, Psi = [1, K^] / sqrt 2.
    gram_q = _bordered(counts, q_sum, q_sum.mT, product(q.mT, q))
    gram_k = _bordered(counts, k_sum, k_sum.mT, product(k.mT, k))
    cross = _bordered(counts, q_sum, k_sum.mT, product(k.mT, q))
    squared_norm = 0.25 * (gram_q * gram_k).sum((-2, -1), keepdim=True)
    half_step = 0.5 * gamma / _floored_root(squared_norm, counts)
    summed = torch.cat([v.sum(-2, keepdim=True), product(k.mT, v)], -2)
    solved = half_step * _resolve(half_step * cross, summed)
    return product(q, solved[..., 1:, :], solved[..., :1, :])


def _resolve(x: Tensor, b: Tensor, *, lower: bool = False) -> Tensor:
    """The solution y of (I - x) y = b; `lower`: x is lower triangular."""
    if is_exporting():
        return solve_by_doubling(x, b)
    system = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device) - x
    return solve_lower(system, b) if lower else solve(system, b)


def _bordered(corner: Tensor, row: Tensor, column: Tensor, block: Tensor) -> Tensor:
    """The (D + 1) x (D + 1) matrix [[corner, row], [column, block]] of each head."""
    corner = corner.expand(*block.shape[:2], 1, 1)
    return torch.cat([torch.cat([corner, row], -1), torch.cat([column, block], -1)], -2)


def _floored_root(squared_norm: Tensor, counts: Tensor) -> Tensor:
    # The floor is applied before the root: the root of a rounded, negative zero would be NaN.
    return torch.maximum(squared_norm, (NORM_FLOOR * counts).square()).sqrt()


def _causal(tokens: Tokens, gamma: float | Tensor) -> Tensor:
    """Forward substitution in chunks: (I - G A) o = G A V, G = diag(gamma / n_i), A lower triangular.

    Keys of earlier chunks enter through two states, S = sum_j psi_j (v_j + o_j)^T for the right-hand side and
    sum_j psi_j psi_j^T for the squares of a row of A, which add up to the prefix norms.
    """
    root_half = math.sqrt(0.5)
    present = tokens.present.expand(*tokens.q.shape[:2], -1, 1)
    phi = torch.cat([present, unit(tokens.q)], -1) * root_half
    psi = torch.cat([present, unit(tokens.k)], -1) * root_half
    counts = key_counts(tokens, causal=True)
    width = phi.shape[-1]
    state = phi.new_zeros(*phi.shape[:2], width, tokens.v.shape[-1])
    gram = phi.new_zeros(*phi.shape[:2], width, width)
    squares = phi.new_zeros(*phi.shape[:2], 1, 1)
    outputs = []
    chunks = [torch.split(x, CHUNK, -2) for x in (phi, psi, tokens.v, counts)]
    last = len(chunks[0]) - 1
    for index, (phi_chunk, psi_chunk, v_chunk, count) in enumerate(zip(*chunks, strict=True)):
        scores = product(phi_chunk, psi_chunk.mT).tril()
        row_squares = scores.square().sum(-1, keepdim=True)
        right = product(scores, v_chunk)
        if index > 0:
            row_squares = row_squares + (product(phi_chunk, gram) * phi_chunk).sum(-1, keepdim=True)
            right = right + product(phi_chunk, state)
        squared_norm = squares + row_squares.cumsum(-2)
        step = gamma / _floored_root(squared_norm, count)
        o = _resolve(step * scores, step * right, lower=True)
        outputs.append(o)
        if index < last:
            state = state + product(psi_chunk.mT, v_chunk + o)
            gram = gram + product(psi_chunk.mT, psi_chunk)
            squares = squared_norm[..., -1:, :]
    return torch.cat(outputs, -2)


def _forward_macs(tokens: int, width: int, value_width: int) -> int:
    rank = width + 1
    return tokens * rank * (3 * rank + 2 * value_width) + rank**3 // 3 + rank**2 * value_width


def _backward_macs(tokens: int, width: int, value_width: int) -> int:
    rank = width + 1
    return tokens * rank * (4 * rank + 4 * value_width) + 2 * rank**2 * value_width


_bidirectional = define(
    Definition(
        name="neumann",
        plain=_plain,
        forward_macs=_forward_macs,
        backward_macs=_backward_macs,
        factors=", Tensor gamma",
        factor_gradient=True,
    )
)
