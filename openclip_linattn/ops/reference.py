"""Every attention kind as its explicit N x N formula, to read and to test against.

Same signatures as the fast operators, in the dtype of the inputs; nothing here is fast or spares memory.
`visible` is 1 where row i may attend to key j and neither is padding, else 0.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from openclip_linattn.ops import lu
from openclip_linattn.ops.infinite import check_neumann_terms, refuse_causal
from openclip_linattn.ops.inputs import TINY, per_head, vanishing_weight
from openclip_linattn.ops.linear import check_feature_map, elu_feature
from openclip_linattn.ops.neumann import check_gamma
from openclip_linattn.ops.normalized import check_scale, length_factor
from openclip_linattn.ops.small_systems import NORM_FLOOR


def softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, key_padding_mask: Tensor | None = None
) -> Tensor:
    """o_i = sum_j softmax_j(q_i.k_j / sqrt D) v_j."""
    visible = _visible(q, key_padding_mask, causal=causal)
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(visible == 0, -torch.inf)
    # A row without any key has softmax 0/0; its weights are zero.
    nothing = visible.sum(-1, keepdim=True) == 0
    return scores.masked_fill(nothing, 0).softmax(-1).masked_fill(nothing, 0) @ v


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    feature_map: str = "affine",
) -> Tensor:
    """o_i = sum_j w_ij v_j / sum_j w_ij, w_ij = 1 + q^_i.k^_j or phi(q_i).phi(k_j)."""
    check_feature_map(feature_map)
    visible = _visible(q, key_padding_mask, causal=causal)
    if feature_map == "elu":
        weights = (elu_feature(q) @ elu_feature(k).mT) * visible
        return weights @ v / weights.sum(-1, keepdim=True).clamp_min(TINY)
    weights = (1 + _unit(q) @ _unit(k).mT) * visible
    total = weights.sum(-1, keepdim=True)
    nothing = total <= vanishing_weight(total.dtype) * visible.sum(-1, keepdim=True)
    return weights.masked_fill(nothing, 0) @ v / total.clamp_min(TINY)


def normalized_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    scale: float = 1.0,
    length_scale: str = "none",
    train_tokens: int | None = None,
) -> Tensor:
    """o_i = c_i sum_j s_ij v_j, s_ij = (1 + q^_i.k^_j) / 2."""
    check_scale(scale, length_scale, train_tokens)
    visible = _visible(q, key_padding_mask, causal=causal)
    scores = _scores(q, k, visible)
    counts = visible.sum(-1, keepdim=True).clamp_min(1)
    return scale * length_factor(counts, length_scale, train_tokens) * (scores @ v)


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
    """o = sum_{t=1..T} rho^t A^^t V, A^ = A / |A|_F, A = ReLU(Q K^T)."""
    check_neumann_terms(neumann_terms)
    weights = (q @ k.mT).relu() * _visible(q, key_padding_mask, causal=causal)
    hop = per_head(rho, "rho", v) * weights / _norm(weights, causal=causal).clamp_min(TINY)
    o = torch.zeros_like(v)
    for _ in range(neumann_terms):
        o = hop @ (v + o)
    return o


def linear_inf_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    rho: float | Tensor = 0.95,
) -> Tensor:
    """o_i = rho sum_j w_j v_j, w = s / sum s, s_j = ReLU(qbar.k_j), qbar = sum_i |q_i| q_i / sum_i |q_i|."""
    refuse_causal(causal=causal)
    visible = _visible(q, key_padding_mask, causal=causal)
    present = visible.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    energy: Tensor = torch.linalg.vector_norm(q, dim=-1, keepdim=True) * present
    query = (energy * q).sum(-2, keepdim=True) / energy.sum(-2, keepdim=True).clamp_min(TINY)
    scores = (query @ k.mT).relu() * visible
    weights = scores / scores.sum(-1, keepdim=True).clamp_min(TINY)
    return per_head(rho, "rho", v) * (weights @ v)


def neumann_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    gamma: float | Tensor = 0.95,
) -> Tensor:
    """o = [(I - gamma A^)^-1 - I] V, A^ = A / max(|A|_F, 0.05 N), A = (1 + Q^ K^^T) / 2, by a dense solve."""
    check_gamma(gamma)
    visible = _visible(q, key_padding_mask, causal=causal)
    scores = _scores(q, k, visible)
    present = visible.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    counts = present.cumsum(-2) if causal else present.sum(-2, keepdim=True)
    norm = torch.maximum(_norm(scores, causal=causal), NORM_FLOOR * counts.clamp_min(1))
    system = torch.eye(q.shape[-2]).to(scores) - per_head(gamma, "gamma", v) * scores / norm
    # LAPACK has no half precision.
    solvable = torch.promote_types(system.dtype, torch.float32)
    o = lu.solve(system.to(solvable), v.to(solvable))
    return o.to(v.dtype) - v


def _visible(q: Tensor, key_padding_mask: Tensor | None, *, causal: bool) -> Tensor:
    """1 where row i may attend to key j and both are tokens, else 0, (B, 1, N, N)."""
    batch, _, tokens, _ = q.shape
    visible = q.new_ones(batch, 1, tokens, tokens)
    if key_padding_mask is not None:
        present = (~key_padding_mask).to(q.dtype)
        visible = visible * present[:, None, :, None] * present[:, None, None, :]
    return visible.tril() if causal else visible


def _unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + TINY).rsqrt()


def _scores(q: Tensor, k: Tensor, visible: Tensor) -> Tensor:
    return (1 + _unit(q) @ _unit(k).mT) / 2 * visible


def _norm(weights: Tensor, *, causal: bool) -> Tensor:
    """|A|_F (B, H, 1, 1), or in the causal form |A[:i, :i]|_F of every row i (B, H, N, 1)."""
    if causal:
        blocks = [weights[..., : i + 1, : i + 1] for i in range(weights.shape[-1])]
        return torch.stack([torch.linalg.matrix_norm(block) for block in blocks], -1).unsqueeze(-1)
    norm: Tensor = torch.linalg.matrix_norm(weights, keepdim=True)
    return norm


REFERENCES: dict[str, Callable[..., Tensor]] = {
    "softmax": softmax_attention,
    "linear": linear_attention,
    "linearelu": partial(linear_attention, feature_map="elu"),
    "normlinear": normalized_linear_attention,
    "normlinearmean": partial(normalized_linear_attention, length_scale="mean"),
    "infsa": inf_attention,
    "lininfsa": linear_inf_attention,
    "neumannlinear": neumann_linear_attention,
}
"""The explicit N x N formula of every kind in `openclip_linattn.ops.OPERATORS`."""
