"""The operators on tokens that are made a chunk at a time: sums over all of them first, then the output's rows.

For inference on sequences whose queries, keys and values are not to be held at once. An operator here takes a
function that makes the tokens anew at every pass: `chunks("kv")` yields the keys and values of one range of tokens
after the other, "q" the queries, "qkv" all three, each (B, H, L, D). It returns the function from queries to their
rows of the output; or the output itself, (B, H, N, D), or (B, H, 1, D) where it is the same for every token. The
output is in the dtype of sums over tokens, or in that of the values where the tokens are held: the two kinds that are
quadratic in the tokens do that, softmax its keys and values and infsa all three, and hold nothing of N x N.
The formulas are those of `openclip_linattn.ops.OPERATORS`, for all keys and without padding. Gradients are not meant
to be taken: they would keep every chunk.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from openclip_linattn.ops import infinite
from openclip_linattn.ops.inputs import TINY, full_precision, per_head, vanishing_weight
from openclip_linattn.ops.layout import compute_dtype
from openclip_linattn.ops.linear import elu_feature
from openclip_linattn.ops.normalized import length_factor
from openclip_linattn.ops.small_systems import solve_forward
from openclip_linattn.ops.sums import unit

Chunks = Callable[[str], Iterable[tuple[Tensor, ...]]]
Rows = Callable[[Tensor], Tensor]


def linear_attention(chunks: Chunks, tokens: int, *, feature_map: str = "affine") -> Rows:
    """o_i = sum_j w_ij v_j / sum_j w_ij, w_ij = 1 + q^_i.k^_j ("affine") or phi(q_i).phi(k_j) ("elu")."""
    feature, offset = (unit, 1.0) if feature_map == "affine" else (elu_feature, 0.0)
    product, value_sum, key_sum = _sums(
        (_product(keys.mT, v), v.sum(-2, keepdim=True), keys.sum(-2, keepdim=True))
        for keys, v in ((feature(k), v) for k, v in _wide(chunks("kv")))
    )

    def rows(q: Tensor) -> Tensor:
        queries = feature(_widened(q))
        total = _product(queries, key_sum.mT) + offset * tokens
        smallest = offset * tokens * vanishing_weight(total.dtype)
        inverse = (total > smallest).to(total.dtype) / total.clamp_min(TINY)
        return (_product(queries, product) + offset * value_sum) * inverse

    return rows


def normalized_linear_attention(
    chunks: Chunks,
    tokens: int,
    *,
    scale: float = 1.0,
    length_scale: str = "none",
    train_tokens: int | None = None,
) -> Rows:
    """o_i = c sum_j s_ij v_j, s_ij = (1 + q^_i.k^_j) / 2."""
    factor = 0.5 * scale * length_factor(tokens, length_scale, train_tokens)
    product, value_sum = _sums(
        (factor * _product(unit(k).mT, v), factor * v.sum(-2, keepdim=True)) for k, v in _wide(chunks("kv"))
    )

    def rows(q: Tensor) -> Tensor:
        return _product(unit(_widened(q)), product) + value_sum

    return rows


def linear_inf_attention(chunks: Chunks, tokens: int, *, rho: float | Tensor = 0.95) -> Tensor:  # noqa: ARG001
    """o = rho sum_j w_j v_j for every token, w = s / sum s, s_j = ReLU(qbar.k_j), qbar = sum |q_i| q_i / sum |q_i|."""
    energies = ((q, torch.linalg.vector_norm(q, dim=-1, keepdim=True)) for (q,) in _wide(chunks("q")))
    # Sums, not products with a column: those add up one token after the other, which costs digits.
    query, energy = _sums(((e * q).sum(-2, keepdim=True), e.sum(-2, keepdim=True)) for q, e in energies)
    query = query / energy.clamp_min(TINY)
    weighted, total = _sums(
        ((score * v).sum(-2, keepdim=True), score.sum(-2, keepdim=True))
        for score, v in ((_product(k, query.mT).relu(), v) for k, v in _wide(chunks("kv")))
    )
    return per_head(rho, "rho", weighted) * weighted / total.clamp_min(TINY)


def neumann_linear_attention(chunks: Chunks, tokens: int, *, gamma: float | Tensor = 0.95) -> Rows:
    """o = [(I - gamma A^)^-1 - I] V, A^ = A / max(|A|_F, 0.05 N), A = (1 + Q^ K^^T) / 2."""
    gram_q, gram_k, cross, summed = _sums(
        (_product(phi.mT, phi), _product(psi.mT, psi), _product(psi.mT, phi), _product(psi.mT, v))
        for phi, psi, v in ((_bordered(q), _bordered(k), v) for q, k, v in _wide(chunks("qkv")))
    )
    factor = torch.as_tensor(per_head(gamma, "gamma", cross), dtype=cross.dtype, device=cross.device)
    factor = factor.expand(*cross.shape[:2], 1, 1)
    with full_precision(cross):
        x, _ = solve_forward(gram_q, gram_k, cross, summed, tokens, factor)

    def rows(q: Tensor) -> Tensor:
        return _product(_bordered(_widened(q)), x)

    return rows


def softmax_attention(chunks: Chunks, tokens: int) -> Rows:
    """o_i = sum_j softmax_j(q_i.k_j / sqrt D) v_j, with the keys and values held."""
    k, v = _held(chunks("kv"), tokens)

    def rows(q: Tensor) -> Tensor:
        with full_precision(v):
            return F.scaled_dot_product_attention(q.to(v.dtype), k, v)

    return rows


def inf_attention(chunks: Chunks, tokens: int, *, rho: float | Tensor = 0.95) -> Tensor:
    """o = rho A V / |A|_F, A = ReLU(Q K^T), with all three held: the norm would take a pass of its own over N x N."""
    q, k, v = _held(chunks("qkv"), tokens)
    return infinite.inf_attention(q, k, v, rho=rho)


STREAMS: dict[str, Callable[..., Rows | Tensor]] = {
    "softmax": softmax_attention,
    "linear": linear_attention,
    "linearelu": partial(linear_attention, feature_map="elu"),
    "normlinear": normalized_linear_attention,
    "normlinearmean": partial(normalized_linear_attention, length_scale="mean"),
    "infsa": inf_attention,
    "lininfsa": linear_inf_attention,
    "neumannlinear": neumann_linear_attention,
}
"""The streamed form of every kind: (chunks, number of tokens, its own factors)."""


def _held(chunks: Iterable[tuple[Tensor, ...]], tokens: int) -> list[Tensor]:
    """The named parts of all tokens, each (B, H, N, D), in the dtype of the last part."""
    held: list[Tensor] = []
    first = 0
    for parts in chunks:
        # Stored as (B, N, H, D), as a projection makes them.
        held = held or [
            parts[-1].new_empty(x.shape[0], tokens, x.shape[1], x.shape[3]).transpose(1, 2) for x in parts
        ]
        last = first + parts[0].shape[2]
        for whole, part in zip(held, parts, strict=True):
            whole[:, :, first:last] = part
        first = last
    return held


def _sums(terms: Iterable[tuple[Tensor, ...]]) -> list[Tensor]:
    """The sums over all chunks of each tensor of the tuples."""
    iterator = iter(terms)
    totals = list(next(iterator))
    for term in iterator:
        for total, x in zip(totals, term, strict=True):
            total.add_(x)
    return totals


def _wide(chunks: Iterable[tuple[Tensor, ...]]) -> Iterator[tuple[Tensor, ...]]:
    """The chunks in the dtype of sums over tokens."""
    for chunk in chunks:
        yield tuple(_widened(x) for x in chunk)


def _widened(x: Tensor) -> Tensor:
    return x.to(compute_dtype(x))


def _bordered(x: Tensor) -> Tensor:
    """The rows [1, x^] (B, H, L, D + 1)."""
    return torch.cat([x.new_ones(*x.shape[:-1], 1), unit(x)], -1)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """The matrix product a b, which autocast leaves alone.

    The switch is here and not around the passes: the chunks are made in between, under the caller's autocast.
    """
    with full_precision(a):
        return a @ b
