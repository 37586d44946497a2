"""The small part of Neumann linear attention: one (D + 1)-system per head and its gradient by hand.

With Phi = [1, Q^] / sqrt 2 and Psi = [1, K^] / sqrt 2, the scores are A = Phi Psi^T and the push-through
identity gives (I - g A)^-1 - I = g Phi (I - g Psi^T Phi)^-1 Psi^T with g = gamma / max(|A|_F, 0.05 N). What an
implementation adds are passes over the tokens: sums on the way in, o_i = [1, q^_i] x on the way out.

None of it rounds to TF32, whatever the program allows: that would cost the gradients of q and k three digits, and
these products are small.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from openclip_linattn.ops.lu import lu_factor
from openclip_linattn.ops.tf32 import without_tf32

NORM_FLOOR = 0.05
"""|A|_F is bounded from below by this times the number of keys."""


class SystemGradients(NamedTuple):
    """Gradients of the inputs of `solve_forward`, in their order."""

    gram_q: Tensor
    gram_k: Tensor
    cross: Tensor
    summed: Tensor
    gamma: Tensor
    """(B, H, 1, 1), to be summed to the shape of gamma."""


def solve_forward(
    gram_q: Tensor, gram_k: Tensor, cross: Tensor, summed: Tensor, counts: float | Tensor, gamma: Tensor
) -> tuple[Tensor, Tensor]:
    """Solve x = h (I - h cross)^-1 summed with h = gamma / max(sqrt(sum(gram_q * gram_k)), 0.1 counts).

    Shapes: gram_q = [1, Q^]^T [1, Q^], gram_k = [1, K^]^T [1, K^] and cross = [1, K^]^T [1, Q^] (B, H, D + 1,
    D + 1), summed = [1, K^]^T V (B, H, D + 1, Dv), counts (a number or (B or 1, 1, 1, 1)) the number of keys,
    gamma (B or 1, H, 1, 1); all of one dtype, float32 or float64. Returns x (B, H, D + 1, Dv), and in one
    tensor of shape (B, H, *saved_shape(D, Dv)) what `solve_backward` needs.
    """
    doubled_norm_squared = (gram_q * gram_k).sum((-2, -1), keepdim=True)
    floor = (2 * NORM_FLOOR * counts) ** 2
    # The floor is applied before the root: the root of a rounded, negative zero would be NaN.
    inverse = doubled_norm_squared.clamp_min(floor).rsqrt_()
    step = gamma * inverse
    slope = -0.5 * step * inverse.square() * (doubled_norm_squared > floor)
    identity = torch.eye(cross.shape[-1], dtype=cross.dtype, device=cross.device)
    with without_tf32(cross.device):
        factors, pivots = lu_factor(torch.addcmul(identity, step, cross, value=-1))
        solved: Tensor = torch.linalg.lu_solve(factors, pivots, summed)
    scalars = (x.expand(-1, -1, cross.shape[-1], 1) for x in (step, inverse, slope))
    saved = torch.cat([factors, gram_q, gram_k, solved, pivots.unsqueeze(-1).to(cross.dtype), *scalars], -1)
    return step * solved, saved


def solve_backward(dx: Tensor, saved: Tensor) -> SystemGradients:
    """Differentiate `solve_forward` for the gradient dx (B, H, D + 1, Dv) of x, without a new factorisation.

    With z = (I - h cross)^-1 summed and u = (I - h cross)^-T dx: d summed = h u, d cross = h^2 u z^T and
    dh = <u, z>. z is kept rather than x = h z, for h may be zero.
    """
    factors, gram_q, gram_k, solved, pivots, step, inverse, slope = _split(saved, dx.shape[-1])
    with without_tf32(dx.device):
        adjoint: Tensor = torch.linalg.lu_solve(factors, pivots.squeeze(-1).int(), dx, adjoint=True)
        of_summed = step * adjoint
        of_cross = (step * of_summed) @ solved.mT
    of_step = (adjoint * solved).sum((-2, -1), keepdim=True)
    through_norm = of_step * slope
    return SystemGradients(
        gram_q=through_norm * gram_k,
        gram_k=through_norm * gram_q,
        cross=of_cross,
        summed=of_summed,
        gamma=of_step * inverse,
    )


def solution(saved: Tensor, value_width: int) -> Tensor:
    """The x of `solve_forward` again, from what it saved."""
    _, _, _, solved, _, step, _, _ = _split(saved, value_width)
    return step * solved


def saved_shape(width: int, value_width: int) -> tuple[int, int]:
    """The last two sizes of what `solve_forward` saves, for queries of width D and values of width Dv."""
    return width + 1, 3 * (width + 1) + value_width + 4


def _split(saved: Tensor, value_width: int) -> tuple[Tensor, ...]:
    """LU factors, gram_q, gram_k, z, pivots; h, dh / dgamma and dh / d gram_q over gram_k (B, H, 1, 1)."""
    size = saved.shape[-2]
    *matrices, step, inverse, slope = torch.split(saved, [size, size, size, value_width, 1, 1, 1, 1], -1)
    return *matrices, *(x[..., :1, :] for x in (step, inverse, slope))
