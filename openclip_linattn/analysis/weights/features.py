"""The low-rank factors of the linear kinds, and the quantities that the weights of infinite attention share."""

import math

import torch
from torch import Tensor

from openclip_linattn.ops.inputs import TINY
from openclip_linattn.ops.small_systems import NORM_FLOOR
from openclip_linattn.ops.sums import unit


def affine(x: Tensor) -> Tensor:
    """[1, x^] / sqrt 2 (..., N, D + 1): the scores (1 + q^.k^) / 2 are inner products of such rows."""
    return torch.cat([torch.ones_like(x[..., :1]), unit(x)], -1) * math.sqrt(0.5)


def floored_norm(squared_norm: Tensor, tokens: int) -> Tensor:
    """max(|A|_F, 0.05 N), by which neumannlinear divides its scores A."""
    return squared_norm.clamp_min((NORM_FLOOR * tokens) ** 2).sqrt()


def resolvent(phi: Tensor, cross: Tensor, step: Tensor) -> Tensor:
    """g Phi (I - g M)^-1 (..., R) for rows phi (..., R, D + 1), M = Psi^T Phi and g = gamma / |A|.

    Times Psi^T these are rows of (I - g A)^-1 - I, by the push-through identity.
    """
    identity = torch.eye(cross.shape[-1], dtype=cross.dtype, device=cross.device)
    solved: Tensor = torch.linalg.solve((identity - step * cross).mT, phi.mT)
    return step * solved.mT


def energy_query(q: Tensor) -> Tensor:
    """qbar = sum_i |q_i| q_i / sum_i |q_i| (..., 1, D), the one query of lininfsa."""
    energy: Tensor = torch.linalg.vector_norm(q, dim=-1, keepdim=True)
    return (energy * q).sum(-2, keepdim=True) / energy.sum(-2, keepdim=True).clamp_min(TINY)


def energy_weights(q: Tensor, k: Tensor) -> Tensor:
    """The weights (..., N, 1) of lininfsa, without rho: ReLU(qbar.k_j) over their sum; zero where none is positive."""
    scores = (k @ energy_query(q).mT).relu()
    return scores / scores.sum(-2, keepdim=True).clamp_min(TINY)
