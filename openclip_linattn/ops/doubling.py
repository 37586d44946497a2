"""Inverses by matrix products alone, for exported graphs: ONNX has no operation that solves a system."""

from torch import Tensor

from openclip_linattn.ops.products import product

FACTORS = 12
"""The product of so many factors holds the first 4096 powers, and 0.99^4096 is 1e-18."""


def solve_by_doubling(x: Tensor, b: Tensor) -> Tensor:
    """The solution y of (I - x) y = b for matrices x (B, H, M, M) of spectral radius up to 0.99, and b (B, H, M, N).

    (I - x)^-1 = sum_t x^t = (I + x)(I + x^2)(I + x^4)..., each factor twice as many powers as those before it.
    """
    for _ in range(FACTORS - 1):
        b = b + product(x, b)
        x = product(x, x)
    return b + product(x, b)
