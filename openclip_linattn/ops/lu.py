"""LU factorisations of many matrices that are right on several threads of a CPU too."""

import torch
from torch import Tensor

LARGEST = 128
"""Matrices of up to this size are factorised together on a CPU.

PyTorch shares larger ones out among its threads without the care that MKL asks for: from size 150 on, two threads
give wrong factors or none (pytorch/pytorch issue 142815).
"""


def lu_factor(a: Tensor) -> tuple[Tensor, Tensor]:
    """The factors (..., M, M) and pivots (..., M) of matrices a (..., M, M), as `torch.linalg.lu_factor`.

    Singular matrices are not looked for, which would wait for the device.
    """
    if a.device.type != "cpu" or a.shape[-1] <= LARGEST or a.shape[:-2].numel() <= 1:
        factors, pivots, _ = torch.linalg.lu_factor_ex(a)
        return factors, pivots
    each = (torch.linalg.lu_factor_ex(x)[:2] for x in a.flatten(0, -3).unbind())
    factors, pivots = (torch.stack(x) for x in zip(*each, strict=True))
    return factors.view(a.shape), pivots.view(a.shape[:-1])


def solve(a: Tensor, b: Tensor) -> Tensor:
    """The solution x (..., M, K) of a x = b, as `torch.linalg.solve`."""
    x: Tensor = torch.linalg.lu_solve(*lu_factor(a), b)
    return x
