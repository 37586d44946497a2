"""Inputs and measures shared by the tests of the operators."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor


def _packed_tokens(
    batch: int, heads: int, tokens: int, width: int, dtype: torch.dtype = torch.float64, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as strided views of one (B, N, 3, H, D) projection, each a leaf of its own gradient."""
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randn(batch, tokens, 3, heads, width, generator=generator, dtype=torch.float64).to(dtype)
    q, k, v = packed.permute(2, 0, 3, 1, 4).unbind(0)
    return tuple(x.detach().requires_grad_() for x in (q, k, v))


def _relative_error(got: Tensor, expected: Tensor) -> float:
    """|got - expected| / |expected|, in float64; the absolute error where the expected value is zero."""
    got, expected = got.detach().double(), expected.detach().double()
    size = expected.norm().item()
    return (got - expected).norm().item() / (size or 1.0)


@pytest.fixture(scope="session")
def packed_tokens() -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    return _packed_tokens


@pytest.fixture(scope="session")
def relative_error() -> Callable[[Tensor, Tensor], float]:
    return _relative_error
