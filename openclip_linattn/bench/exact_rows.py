"""Single output rows by their explicit formulas, in float64 and in O(N), to check an operator at any length.

A row of the reference needs one query and all keys and values. The formulas are those of
`openclip_linattn.ops.reference`; infsa and neumannlinear have none, since each row of theirs needs all N x N scores.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from openclip_linattn.ops.inputs import TINY

BLOCK = 1 << 16
"""Keys that are held in float64 at once."""
RHO = 0.95  # the default of the infinite kinds


@dataclass(frozen=True)
class RowFormula:
    """o = normalise(score(q, K)) V for rows q (H, R, D) and keys K (H, N, D).

    pooled: every row sees the average query of the whole sequence instead of its own.
    """

    score: Callable[[Tensor, Tensor], Tensor]
    normalise: Callable[[Tensor], Tensor]
    pooled: bool = False

    def queries(self, q: Tensor, index: list[int]) -> Tensor:
        """The queries of rows `index` of q (H, N, D) in float64: (H, R, D), or (H, 1, D) where they share one."""
        return _pooled_query(q) if self.pooled else q[:, index].double()

    def rows(self, queries: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The output (H, R, Dv) of queries (H, R, D) for k (H, N, D), v (H, N, Dv) of any dtype, in float64."""
        scores = torch.cat([self.score(queries, block.double()) for block in torch.split(k, BLOCK, -2)], -1)
        weights = torch.split(self.normalise(scores), BLOCK, -1)
        parts = [w @ block.double() for w, block in zip(weights, torch.split(v, BLOCK, -2), strict=True)]
        return torch.stack(parts).sum(0)


def _pooled_query(q: Tensor) -> Tensor:
    weighted = energy = torch.zeros((), dtype=torch.float64, device=q.device)
    for block in torch.split(q, BLOCK, -2):
        exact = block.double()
        norm: Tensor = torch.linalg.vector_norm(exact, dim=-1, keepdim=True)
        weighted = weighted + (norm * exact).sum(-2, keepdim=True)
        energy = energy + norm.sum(-2, keepdim=True)
    return weighted / energy.clamp_min(TINY)


def _dot(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT


def _scaled(q: Tensor, k: Tensor) -> Tensor:
    return _dot(q, k) / math.sqrt(q.shape[-1])


def _affine(q: Tensor, k: Tensor) -> Tensor:
    return 1 + _dot(_unit(q), _unit(k))


def _half_affine(q: Tensor, k: Tensor) -> Tensor:
    return _affine(q, k) / 2


def _elu(q: Tensor, k: Tensor) -> Tensor:
    return _dot(torch.nn.functional.elu(q) + 1, torch.nn.functional.elu(k) + 1)


def _rectified(q: Tensor, k: Tensor) -> Tensor:
    return _dot(q, k).relu()


def _unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + TINY).rsqrt()


def _as_is(scores: Tensor) -> Tensor:
    return scores


def _softmax(scores: Tensor) -> Tensor:
    return scores.softmax(-1)


def _quotient(scores: Tensor) -> Tensor:
    return scores / scores.sum(-1, keepdim=True).clamp_min(TINY)


def _twice_the_mean(scores: Tensor) -> Tensor:
    return scores * (2 / scores.shape[-1])


def _damped_quotient(scores: Tensor) -> Tensor:
    return RHO * _quotient(scores)


ROW_FORMULAS = {
    "softmax": RowFormula(_scaled, _softmax),
    "bare": RowFormula(_dot, _as_is),
    "bare-contiguous": RowFormula(_dot, _as_is),
    "linear": RowFormula(_affine, _quotient),
    "linearelu": RowFormula(_elu, _quotient),
    "normlinear": RowFormula(_half_affine, _as_is),
    "normlinearmean": RowFormula(_half_affine, _twice_the_mean),
    "lininfsa": RowFormula(_rectified, _damped_quotient, pooled=True),
}
