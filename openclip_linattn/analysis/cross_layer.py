"""The sum over layers that infinite self-attention stands for, from a model's own layers, beside its closed form."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from openclip_linattn.analysis.walks import series
from openclip_linattn.analysis.weights.matrices import Weights
from openclip_linattn.ops.inputs import TINY

_Apply = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class LayerSum:
    """S_L = sum_t gamma^t A(t)...A(1) X(0) over the L layers, against sums with one operator for all layers.

    The closed form is [(I - gamma A)^-1 - I] X(0) with A the mean of the layers' operators, and the truncated sum the
    same series cut after L terms: S_L differs from the truncated sum because the layers differ, and that from the
    closed form (`tail`) because L is finite. Differences are norms over the norm of the closed form; cosines take
    all tokens and widths together; shares are the part of a norm that is not common to all tokens. All are means
    over the images.
    """

    layers: int
    gamma: float
    norm_ratio: float
    difference: float
    cosine: float
    difference_truncated: float
    cosine_truncated: float
    tail: float
    share: float
    share_closed: float

    def as_dict(self) -> dict[str, float]:
        """The fields by name."""
        return asdict(self)


def layer_sum(operators: Sequence[Weights], entering: Tensor, gamma: float) -> LayerSum:
    """Compare the sums for the layers' one-hop operators (each the mean over its heads) and X(0) (B, N, width).

    Raises UserError where the closed form's series does not converge.
    """
    x = entering.unsqueeze(1)
    own = [_head_mean(weights) for weights in operators]

    def mean(y: Tensor) -> Tensor:
        return torch.stack([apply(y) for apply in own]).mean(0)

    layered = discounted_sum(own, x, gamma)
    truncated = discounted_sum([mean] * len(own), x, gamma)
    closed = series(mean, x.new_tensor(gamma), x) - x
    scale = _norm(closed).clamp_min(TINY)
    return LayerSum(
        layers=len(own),
        gamma=gamma,
        norm_ratio=float((_norm(layered) / scale).mean()),
        difference=float((_norm(layered - closed) / scale).mean()),
        cosine=_cosine(layered, closed),
        difference_truncated=float((_norm(layered - truncated) / scale).mean()),
        cosine_truncated=_cosine(layered, truncated),
        tail=float((_norm(truncated - closed) / scale).mean()),
        share=_share(layered),
        share_closed=_share(closed),
    )


def discounted_sum(operators: Sequence[_Apply], x: Tensor, gamma: float) -> Tensor:
    """sum_t gamma^t A(t)...A(1) x over the operators A(1), A(2), ..., given by what they make of a matrix."""
    total = torch.zeros_like(x)
    for apply in operators:
        x = gamma * apply(x)
        total = total + x
    return total


def _head_mean(weights: Weights) -> _Apply:
    return lambda y: weights.times(y.expand(-1, weights.shape[1], -1, -1)).mean(1, keepdim=True)


def _norm(x: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x.flatten(1), dim=-1)
    return norm


def _cosine(x: Tensor, y: Tensor) -> float:
    product = (x.flatten(1) * y.flatten(1)).sum(-1)
    return float((product / (_norm(x) * _norm(y)).clamp_min(TINY)).mean())


def _share(x: Tensor) -> float:
    return float((_norm(x - x.mean(-2, keepdim=True)) / _norm(x).clamp_min(TINY)).mean())
