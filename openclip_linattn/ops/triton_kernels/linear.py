"""Linear attention with the affine feature map, o_i = sum_j w_ij v_j / sum_j w_ij, w_ij = 1 + q^_i.k^_j.

A row whose weights sum to at most `vanishing_weight` per key gives zero with zero gradient.
"""

from torch import Tensor

from openclip_linattn.ops.triton_kernels import affine


def state_shape(q: Tensor, v: Tensor) -> tuple[int, ...]:
    """The shape of the state that `forward` returns."""
    return affine.state_shape(q, v, denominator=True)


def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The output (B, H, N, Dv) and the state for `backward`; q, k (B, H, N, D), v (B, H, N, Dv)."""
    return affine.forward(q, k, v, 1 / q.shape[-2], denominator=True)


def backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, state: Tensor) -> Tensor:
    """The gradients of q, k and v in one buffer (B, N, 2 H D + H Dv)."""
    return affine.backward(do, q, k, v, state, 1 / q.shape[-2], denominator=True)
