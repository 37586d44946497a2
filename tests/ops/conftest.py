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


def _tokens_of(
    layout: str,
    batch: int,
    heads: int,
    tokens: int,
    width: int,
    value_width: int,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in a memory layout: contiguous tensors, a packed projection, or rows with gaps ("transposed")."""
    generator = torch.Generator().manual_seed(tokens + width)
    sizes = (width, width, value_width)
    x = torch.randn(batch, tokens, heads, sum(sizes), generator=generator, dtype=torch.float64).to(
        device, dtype
    )
    q, k, v = (part.transpose(1, 2) for part in x.split(sizes, -1))
    if layout == "contiguous":
        return q.contiguous(), k.contiguous(), v.contiguous()
    if layout == "transposed":
        q, k, v = (part.mT.contiguous().mT for part in (q, k, v))
    return q, k, v


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


@pytest.fixture(scope="session")
def tokens_of() -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    return _tokens_of
