"""The two published forms of infinite self-attention: pure (quadratic) and linear."""

import torch
from torch import Tensor

from openclip_linattn.errors import UserError
from openclip_linattn.ops.inputs import (
    TINY,
    Tokens,
    check_heads,
    full_precision,
    per_head,
    read_tokens,
    write_output,
)
from openclip_linattn.ops.kernels import fits, selectable
from openclip_linattn.ops.layout import compute_dtype
from openclip_linattn.ops.library import Definition, define
from openclip_linattn.ops.products import product


@selectable
def inf_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    rho: float | Tensor = 0.95,
    neumann_terms: int = 1,
) -> Tensor:
    """Pure infinite self-attention, o = sum_{t=1..T} rho^t A^^t V (arXiv 2603.00175), in O(T N^2 D).

    A = ReLU(Q K^T) and A^ = A / max(|A|_F, 1e-12), one Frobenius norm per head; T = neumann_terms, one hop by
    default. A is never held whole: the memory is O(N D) for each hop.

    Shapes: q, k (B, H, N, D), v (B, H, N, Dv), any strides; returns (B, H, N, Dv) in the dtype of v; computed
    in float32 (float64 for float64 inputs), under autocast too. rho: a number or a tensor (), (H,) or
    (H, 1, 1), which receives gradients.
    causal: A is lower triangular and row i is divided by the Frobenius norm of its leading i x i block, since
    one norm for all rows would tell early tokens about later ones. key_padding_mask: bool (B, N), True =
    padding; padded tokens leave A as keys and as queries, and give zero. Raises UserError for inputs of
    another form.
    """
    check_neumann_terms(neumann_terms)
    check_heads(q, k, v)
    tokens = _read(q, k, v, key_padding_mask, one_hop=neumann_terms == 1)
    factor = per_head(rho, "rho", v, compute_dtype(v))
    hop_of = _hop if fits(*tokens[:3]) else _plain_hop
    o = hop = factor * hop_of(tokens.q, tokens.k, tokens.v, causal)
    for _ in range(neumann_terms - 1):
        hop = factor * hop_of(tokens.q, tokens.k, hop, causal)
        o = o + hop
    return write_output(o, tokens)


@selectable
def linear_inf_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    rho: float | Tensor = 0.95,
) -> Tensor:
    """Linear infinite self-attention, o_i = rho sum_j w_j v_j for every i (arXiv 2603.00175), in O(N D).

    The tokens are averaged into one query, qbar = sum_i a_i q_i with a_i = |q_i| / sum |q|; the scores
    s_j = ReLU(qbar.k_j) give the weights w = s / sum s. Every token gets the same vector, and the result is a
    broadcast view of it: clone it before writing to it. Where no score is positive the output is zero.

    Shapes: q, k (B, H, N, D), v (B, H, N, Dv), any strides; returns (B, H, N, Dv) in the dtype of v; computed
    in float32 (float64 for float64 inputs), under autocast too. rho: a number or a tensor (), (H,) or
    (H, 1, 1), which receives gradients. key_padding_mask: bool (B, N), True = padding; padded tokens leave
    the average and the scores, and give zero. There is no causal form: causal=True raises UserError, as do
    inputs of another form.
    """
    refuse_causal(causal=causal)
    check_heads(q, k, v)
    tokens = _read(q, k, v, key_padding_mask, one_hop=True)
    factor = per_head(rho, "rho", v, compute_dtype(v))
    o = factor * (_average if fits(*tokens[:3]) else _plain_average)(*tokens[:3])
    # Cast first: the cast of a broadcast view would write out all N rows.
    return write_output(o.to(v.dtype).expand(-1, -1, v.shape[-2], -1), tokens)


def refuse_causal(*, causal: bool) -> None:
    """Raise UserError when the causal form of linear infinite self-attention is asked for."""
    if causal:
        raise UserError(
            "lininfsa has no causal form: its one query averages all tokens, later ones too; "
            "use another attention kind for a text tower"
        )


def check_neumann_terms(neumann_terms: object) -> None:
    """Raise UserError unless the number of terms is a positive integer."""
    if not isinstance(neumann_terms, int) or neumann_terms < 1:
        raise UserError(f"neumann_terms must be an integer of at least 1, got {neumann_terms!r}")


def _read(q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None, *, one_hop: bool) -> Tokens:
    """The inputs as they are for one hop without padding, else in the dtype of the computation.

    Between hops nothing is rounded to half precision.
    """
    if one_hop and key_padding_mask is None and fits(q, k, v):
        return Tokens(q, k, v, None, v.dtype)
    return read_tokens(q, k, v, key_padding_mask)


def _hop(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return _inf(q, k, v, causal)[0]


def _plain_hop(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    tokens = read_tokens(q, k, v, None)
    with full_precision(v):
        weights = product(tokens.q, tokens.k.mT).relu()
        weights = weights.tril() if causal else weights
        o = product(weights, tokens.v) / _frobenius_norm(weights, prefix=causal)
    return write_output(o, tokens)


def _average(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _lininf(q, k, v)[0]


def _plain_average(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    tokens = read_tokens(q, k, v, None)
    with full_precision(v):
        energy = torch.linalg.vector_norm(tokens.q, dim=-1, keepdim=True)
        query = product(energy.mT, tokens.q) / energy.sum(-2, keepdim=True).clamp_min(TINY)
        score = product(query, tokens.k.mT).relu()
        weights = score / score.sum(-1, keepdim=True).clamp_min(TINY)
        return product(weights, tokens.v).to(v.dtype)


def _frobenius_norm(weights: Tensor, *, prefix: bool) -> Tensor:
    """max(|A|_F, 1e-12) of the whole (B, H, 1, 1), or of the leading block of each row (B, H, N, 1)."""
    if not prefix:
        norm: Tensor = torch.linalg.matrix_norm(weights, keepdim=True)
        return norm.clamp_min(TINY)
    rows: Tensor = torch.linalg.vector_norm(weights, dim=-1, keepdim=True)
    # Clamped before the root, whose gradient at zero is infinite.
    return rows.square().cumsum(-2).clamp_min(TINY**2).sqrt()


_inf = define(
    Definition(
        name="inf",
        plain=_plain_hop,
        forward_macs=lambda tokens, width, value_width: tokens**2 * (width + value_width),
        backward_macs=lambda tokens, width, value_width: tokens**2 * (3 * width + 2 * value_width),
        factors=", bool causal",
        saves_output=True,
        factors_shape_state=True,
    )
)

_lininf = define(
    Definition(
        name="lininf",
        plain=_plain_average,
        forward_macs=lambda tokens, width, value_width: tokens * (2 * width + value_width),
        backward_macs=lambda tokens, width, value_width: tokens * (3 * width + 2 * value_width),
        empty_output=lambda q, v: v.new_empty(*q.shape[:2], 1, v.shape[-1]),
    )
)
