"""Queries, keys, values and an output gradient, as a tower hands them to an operator."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from openclip_linattn.errors import UserError

PACKED = "packed"
CONTIGUOUS = "contiguous"
LAYOUTS = (PACKED, CONTIGUOUS)


class Inputs(NamedTuple):
    """Leaves q, k, v and the gradient `do` of the output, all (B, H, N, D)."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor


@dataclass(frozen=True)
class Shape:
    """What the inputs of every length share; sizes are at least 1. Raises UserError for others."""

    batch: int
    heads: int
    head_width: int
    dtype: torch.dtype
    device: torch.device

    def __post_init__(self) -> None:
        for option, value in (("batch", self.batch), ("heads", self.heads), ("head-width", self.head_width)):
            if value < 1:
                raise UserError(f"--{option} must be at least 1, got {value}")

    def tensor_bytes(self, tokens: int) -> int:
        """T, the bytes of one (B, H, N, D) tensor: the unit of memory and of bytes moved."""
        return self.batch * self.heads * tokens * self.head_width * self.dtype.itemsize


def make_inputs(shape: Shape, tokens: int, layout: str, seed: int = 0) -> Inputs:
    """Standard normal inputs; a seed gives the same numbers in both layouts.

    "packed": q, k, v are views of one projection (B, N, 3, H, D), and `do` of the gradient of merged heads
    (B, N, H D). "contiguous": each is a tensor (B, H, N, D) of its own, as no tower has it.
    """
    generator = torch.Generator(shape.device).manual_seed(seed)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, device=shape.device, dtype=shape.dtype)

    packed = normal(shape.batch, tokens, 3, shape.heads, shape.head_width)
    do = normal(shape.batch, tokens, shape.heads, shape.head_width).transpose(1, 2)
    q, k, v = packed.permute(2, 0, 3, 1, 4).unbind(0)
    if layout == CONTIGUOUS:
        q, k, v, do = (x.contiguous() for x in (q, k, v, do))
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    return Inputs(q, k, v, do)
