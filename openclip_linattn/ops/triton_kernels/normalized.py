"""Normalised linear attention, o_i = scale * sum_j (1 + q^_i.k^_j) v_j."""

from torch import Tensor

from openclip_linattn.ops.triton_kernels import affine


def state_shape(q: Tensor, v: Tensor) -> tuple[int, ...]:
    """The shape of the state that `forward` returns."""
    return affine.state_shape(q, v, denominator=False)


def forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The output (B, H, N, Dv) and the state for `backward`; q, k (B, H, N, D), v (B, H, N, Dv)."""
    return affine.forward(q, k, v, scale, denominator=False)


def backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, state: Tensor, scale: float) -> Tensor:
    """The gradients of q, k and v in one buffer (B, N, 2 H D + H Dv)."""
    return affine.backward(do, q, k, v, state, scale, denominator=False)
