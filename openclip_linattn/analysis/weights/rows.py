"""One row of a layer's weights as a function of its own query, to sample rows and to differentiate them.

A sum over all tokens that the row's own query takes part in (a norm, an averaged query) is split into what the other
tokens give and what this query gives, so that the derivative is that of the whole N x N form, in O(N D) per row.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from openclip_linattn.analysis.layers import Layer
from openclip_linattn.analysis.weights.features import affine, energy_query, floored_norm, resolvent
from openclip_linattn.analysis.weights.matrices import Quadratic
from openclip_linattn.errors import UserError
from openclip_linattn.ops.inputs import TINY, vanishing_weight
from openclip_linattn.ops.linear import elu_feature
from openclip_linattn.ops.normalized import length_factor
from openclip_linattn.ops.sums import unit

Row = Callable[[Tensor], Tensor]
"""Makes of a query (D,) its weights on all keys (N,)."""


@dataclass(frozen=True)
class Head:
    """One head of a layer on one image: queries and keys (N, D), and the operator's options with one rho or gamma."""

    kind: str
    q: Tensor
    k: Tensor
    options: dict[str, Any]


def heads_of(layer: Layer) -> list[Head]:
    """All heads of all images of a layer, image by image."""
    factors = {
        name: value for name, value in layer.options.items() if isinstance(value, Tensor) and value.dim() == 1
    }
    return [
        Head(
            layer.kind,
            layer.q[image, head],
            layer.k[image, head],
            {**layer.options, **{name: value[head] for name, value in factors.items()}},
        )
        for image in range(layer.q.shape[0])
        for head in range(layer.q.shape[1])
    ]


def row_maker(head: Head) -> Callable[[int], Row]:
    """What makes of a token's number the function from its query to its weights, as in `implied_weights`.

    Raises UserError for an unknown kind.
    """
    makers = {
        "softmax": _softmax,
        "linear": _linear,
        "linearelu": _linear_elu,
        "normlinear": _normalized,
        "normlinearmean": _normalized,
        "infsa": _inf,
        "lininfsa": _linear_inf,
        "neumannlinear": _neumann,
    }
    if head.kind not in makers:
        raise UserError(f"the weights of {head.kind} attention are not known to the analysis")
    return makers[head.kind](head)


def jacobian(row: Row, query: Tensor) -> Tensor:
    """The derivatives (N, D) of a row's weights with regard to its query, in forward mode."""
    with warnings.catch_warnings():
        # PyTorch itself still calls what it deprecates, when forward mode is first used.
        warnings.filterwarnings("ignore", message=".*torch.jit.script", category=FutureWarning)
        derivatives: Tensor = torch.func.jacfwd(row)(query)
    return derivatives


def _softmax(head: Head) -> Callable[[int], Row]:
    return lambda _: lambda query: (head.k @ query / math.sqrt(len(query))).softmax(-1)


def _linear(head: Head) -> Callable[[int], Row]:
    keys = unit(head.k)
    smallest = vanishing_weight(keys.dtype) * len(keys)

    def weights(query: Tensor) -> Tensor:
        scores = 1 + keys @ unit(query)
        total = scores.sum()
        return scores * (total > smallest) / total.clamp_min(TINY)

    return lambda _: weights


def _linear_elu(head: Head) -> Callable[[int], Row]:
    keys = elu_feature(head.k)

    def weights(query: Tensor) -> Tensor:
        scores = keys @ elu_feature(query)
        return scores / scores.sum().clamp_min(TINY)

    return lambda _: weights


def _normalized(head: Head) -> Callable[[int], Row]:
    keys = unit(head.k)
    scale = "mean" if head.kind == "normlinearmean" else head.options.get("length_scale", "none")
    factor = length_factor(len(keys), scale, head.options.get("train_tokens")) / 2
    return lambda _: lambda query: factor * (1 + keys @ unit(query))


def _inf(head: Head) -> Callable[[int], Row]:
    scores = Quadratic(head.q[None, None], head.k[None, None], lambda q, k: (q @ k.mT).relu())
    squared_norm = scores.squared_norm().squeeze()
    rho = head.options.get("rho", 0.95)

    def of_token(token: int) -> Row:
        others = squared_norm - (head.k @ head.q[token]).relu().square().sum()

        def weights(query: Tensor) -> Tensor:
            row = (head.k @ query).relu()
            # Where no score is positive the norm is zero, whose root has no gradient.
            norm = (others + row.square().sum()).clamp_min(TINY**2).sqrt()
            scaled: Tensor = rho * row / norm
            return scaled

        return weights

    return of_token


def _linear_inf(head: Head) -> Callable[[int], Row]:
    energy = torch.linalg.vector_norm(head.q, dim=-1).sum()
    averaged = energy_query(head.q).squeeze(-2) * energy
    rho = head.options.get("rho", 0.95)

    def of_token(token: int) -> Row:
        own = torch.linalg.vector_norm(head.q[token])
        other_energy, others = energy - own, averaged - own * head.q[token]

        def weights(query: Tensor) -> Tensor:
            norm = torch.linalg.vector_norm(query)
            scores = (head.k @ ((others + norm * query) / (other_energy + norm).clamp_min(TINY))).relu()
            shares: Tensor = rho * scores / scores.sum().clamp_min(TINY)
            return shares

        return weights

    return of_token


def _neumann(head: Head) -> Callable[[int], Row]:
    phi, psi = affine(head.q), affine(head.k)
    gram_q, gram_k, cross = phi.mT @ phi, psi.mT @ psi, psi.mT @ phi
    gamma = head.options.get("gamma", 0.95)

    def of_token(token: int) -> Row:
        own = phi[token]
        other_gram, other_cross = gram_q - torch.outer(own, own), cross - torch.outer(psi[token], own)

        def weights(query: Tensor) -> Tensor:
            feature = affine(query)
            norm = floored_norm(((other_gram + torch.outer(feature, feature)) * gram_k).sum(), len(psi))
            here = other_cross + torch.outer(psi[token], feature)
            return psi @ resolvent(feature.unsqueeze(0), here, gamma / norm).squeeze(0)

        return weights

    return of_token
