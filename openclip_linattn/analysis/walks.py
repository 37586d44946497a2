"""Walks over tokens: Perron vectors by power iteration, visits and Katz centrality by the Neumann series."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from openclip_linattn.analysis.weights.implied import Hop
from openclip_linattn.analysis.weights.matrices import Weights
from openclip_linattn.errors import UserError
from openclip_linattn.ops.inputs import TINY

_SHIFT = 0.05  # of the mean row sum: a matrix that moves tokens around in cycles has no limit without it


class Perron(NamedTuple):
    """The spectral radius (B, H) and the Perron vector (B, H, N), not negative and of length one.

    `residual` is |W x - radius x| (B, H), `steps` how many products it took, and `converged` (B, H) where the residual
    came below the tolerance times the radius. Elsewhere the vector is NaN: a matrix of radius 0, which moves nothing
    back to where it came from, has none.
    """

    radius: Tensor
    vector: Tensor
    residual: Tensor
    steps: int
    converged: Tensor


def perron(weights: Weights, *, side: str, tolerance: float = 1e-9, most_steps: int = 5000) -> Perron:
    """The Perron vector of W ("right": W x = radius x) or of its transpose ("left"), by power iteration.

    On the left a token counts by what it receives, on the right by what it sends.
    """
    apply = {"right": weights.times, "left": weights.transposed_times}[side]
    x = weights.ones() / weights.tokens**0.5
    shift = _SHIFT * weights.row_sums().mean(-2, keepdim=True)
    steps = 0
    while True:
        steps += 1
        moved = apply(x)
        radius = (x * moved).sum(-2, keepdim=True)
        residual: Tensor = torch.linalg.vector_norm(moved - radius * x, dim=-2, keepdim=True)
        converged = (residual <= tolerance * radius) & (radius > TINY)
        if bool((converged | (shift <= TINY)).all()) or steps == most_steps:
            break
        x = moved + shift * x
        x = x / torch.linalg.vector_norm(x, dim=-2, keepdim=True).clamp_min(TINY)
    vector = x.masked_fill(~converged, torch.nan).squeeze(-1)
    return Perron(radius[..., 0, 0], vector, residual[..., 0, 0], steps, converged[..., 0, 0])


def expected_visits(hop: Hop, start: Tensor) -> Tensor:
    """How often walks from the distribution `start` (B, H, N, 1) are expected on each token, (B, H, N, 1).

    A walk at token i goes on to j with probability gamma A^_ij and else ends: row `start`^T (I - gamma A^)^-1, the
    start counted. Where a row of gamma A^ sums above 1 no chain has such probabilities; there the walk carries a
    weight, multiplied by that sum at each hop, and the visits are counted with it.
    """
    return series(hop.weights.transposed_times, hop.gamma, start)


def katz(hop: Hop) -> Tensor:
    """The Katz index c = (I - gamma A^)^-1 1 - 1 (B, H, N): the weight of all walks that start at a token."""
    ones = hop.weights.ones()
    return (series(hop.weights.times, hop.gamma, ones) - ones).squeeze(-1)


def arrivals(hop: Hop) -> Tensor:
    """The mean over starts of the discounted weight of the walks that arrive at a token, (B, H, N)."""
    start = hop.weights.ones() / hop.weights.tokens
    return (expected_visits(hop, start) - start).squeeze(-1)


def series(
    apply: Callable[[Tensor], Tensor], gamma: Tensor, start: Tensor, tolerance: float = 1e-12
) -> Tensor:
    """start + gamma W start + (gamma W)^2 start + ..., until a term is below the tolerance times the sum.

    Raises UserError where the series does not converge within 100,000 terms, as for a radius of 1 / gamma or more.
    """
    total, term = start, start
    for _ in range(100_000):
        term = gamma * apply(term)
        total = total + term
        size = total.abs().amax((-2, -1))
        if not bool(size.isfinite().all()):
            break
        if bool((term.abs().amax((-2, -1)) <= tolerance * size).all()):
            return total
    raise UserError(
        f"the walks do not die out: gamma is {float(gamma.max()):.6f} and the one-hop operator's spectral radius is "
        "about its inverse; give a smaller --gamma"
    )


def absorption(hop: Hop) -> Tensor:
    """1 - gamma sum_j A^_ij (B, H, N): the probability that a walk ends at a token; negative where none is possible."""
    return 1 - (hop.gamma * hop.weights.row_sums()).squeeze(-1)
