"""The weights by which a layer sums its values, and the one-hop operator that its walks go along."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from openclip_linattn.analysis.layers import Layer
from openclip_linattn.analysis.weights.features import (
    affine,
    energy_weights,
    floored_norm,
    resolvent,
)
from openclip_linattn.analysis.weights.matrices import LowRank, Quadratic, Weights
from openclip_linattn.errors import UserError
from openclip_linattn.ops.inputs import TINY, per_head, vanishing_weight
from openclip_linattn.ops.linear import elu_feature
from openclip_linattn.ops.normalized import length_factor


class Hop(NamedTuple):
    """A one-hop operator A^ of spectral radius 1 at most, and the discount gamma < 1 of a further hop (H, 1, 1)."""

    weights: Weights
    gamma: Tensor


def implied_weights(layer: Layer) -> Weights:
    """W with o = W v for the layer's operator, all its factors included.

    neumannlinear's W is the whole series gamma A^ + (gamma A^)^2 + ..., of rank D + 1 as A^ is.
    """
    kind, q, k = layer.kind, layer.q, layer.k
    if kind == "neumannlinear":
        phi, psi = affine(q), affine(k)
        scores = LowRank(phi, psi)
        step = _factor(layer, "gamma") / floored_norm(scores.squared_norm(), layer.tokens)
        return LowRank(resolvent(phi, psi.mT @ phi, step), psi)
    if kind in ("normlinear", "normlinearmean"):
        return LowRank(affine(q), affine(k)).scaled(_length_factor(layer))
    weights = hop_of(layer).weights
    return weights.scaled(_factor(layer, "rho")) if kind in ("infsa", "lininfsa") else weights


def hop_of(layer: Layer, gamma: float = 0.95) -> Hop:
    """The kind's one-hop operator and its discount: the layer's own rho or gamma, else the one given.

    Rows sum to one for softmax, linear, linearelu and lininfsa. The scores of infsa, normlinear and normlinearmean
    are divided by their Frobenius norm, those of neumannlinear by max(|A|_F, 0.05 N). Raises UserError for a gamma
    outside [0, 1).
    """
    if not 0 <= gamma < 1:
        raise UserError(f"gamma is {gamma!r}; for walks to end it must be at least 0 and below 1")
    own = next((_factor(layer, name) for name in ("gamma", "rho") if name in layer.options), None)
    discount = layer.q.new_full((1, 1, 1), gamma) if own is None else own
    return Hop(_one_hop(layer), discount)


def pure_hop(layer: Layer) -> Weights:
    """ReLU(Q K^T) over its Frobenius norm, the full operator of infinite self-attention, whatever the layer's kind."""
    scores = Quadratic(layer.q, layer.k, _relu_rows)
    return scores.scaled(scores.squared_norm().sqrt().clamp_min(TINY).reciprocal())


def _one_hop(layer: Layer) -> Weights:
    if layer.kind not in _HOPS:
        raise UserError(f"the weights of {layer.kind} attention are not known to the analysis")
    return _HOPS[layer.kind](layer)


def _linear(layer: Layer) -> Weights:
    smallest = vanishing_weight(layer.q.dtype) / 2 * layer.tokens
    return _stochastic(LowRank(affine(layer.q), affine(layer.k)), smallest)


def _over_norm(layer: Layer) -> Weights:
    scores = LowRank(affine(layer.q), affine(layer.k))
    return scores.scaled(scores.squared_norm().clamp_min(TINY**2).rsqrt())


def _over_floored_norm(layer: Layer) -> Weights:
    scores = LowRank(affine(layer.q), affine(layer.k))
    return scores.scaled(floored_norm(scores.squared_norm(), layer.tokens).reciprocal())


def _stochastic(scores: LowRank, smallest: float) -> LowRank:
    """Rows divided by their sums; a row without weights, up to rounding, stays zero."""
    total = scores.row_sums()
    return scores.scaled((total > smallest).to(total.dtype) / total.clamp_min(TINY))


def _length_factor(layer: Layer) -> float:
    scale = "mean" if layer.kind == "normlinearmean" else layer.options.get("length_scale", "none")
    return float(length_factor(layer.tokens, scale, layer.options.get("train_tokens")))


def _factor(layer: Layer, name: str) -> Tensor:
    """rho or gamma as (H, 1, 1) or (1, 1, 1)."""
    value = per_head(layer.options.get(name, 0.95), name, layer.q)
    return value if isinstance(value, Tensor) else layer.q.new_full((1, 1, 1), value)


def _softmax_rows(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)


def _relu_rows(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.mT).relu()


_HOPS: dict[str, Callable[[Layer], Weights]] = {
    "softmax": lambda layer: Quadratic(layer.q, layer.k, _softmax_rows),
    "linear": _linear,
    "linearelu": lambda layer: _stochastic(LowRank(elu_feature(layer.q), elu_feature(layer.k)), 0.0),
    "normlinear": _over_norm,
    "normlinearmean": _over_norm,
    "infsa": pure_hop,
    "lininfsa": lambda layer: LowRank(torch.ones_like(layer.q[..., :1]), energy_weights(layer.q, layer.k)),
    "neumannlinear": _over_floored_norm,
}
