"""What a launch passes to a kernel: strides, block sizes, precision of float32 products."""

import functools
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, TypeVar

import torch
import triton.language as tl
from torch import Tensor

from openclip_linattn.ops.tf32 import tf32_allowed

Sizes = TypeVar("Sizes", bound=Any)

Rows = tuple[Tensor, int, int, int]
"""A tensor (B, H, N, D) for `blocks.head_rows`: itself and its batch, head and token strides."""


@dataclass(frozen=True)
class Blocks:
    """The constants of a compiled kernel; passed as one constexpr."""

    d: int
    """Width of q and k."""
    dv: int
    """Width of v."""
    block_d: int
    """Width of q and k, padded to a power of two of at least 16."""
    block_dv: int
    """Width of v, padded likewise."""
    block_n: int
    """Tokens per step of a loop."""
    lanes: int
    """Rows of a block that the warps hold side by side: see `blocks.fold`."""
    stages: int
    """Steps whose reads are under way at a time."""
    precision: str
    """How float32 factors are multiplied: "ieee" or "tf32"."""


_LONGEST_STEP = 1 << 24
"""The largest token stride: kernels count the numbers within a block of up to 128 tokens in 32 bits."""


class Tile(NamedTuple):
    """The sizes of a kernel."""

    tokens: int
    """Tokens per step of a loop."""
    warps: int
    stages: int
    """Steps whose reads are under way at a time."""
    registers: int | None = None
    """Most registers per thread, where the compiler would take so many that one program fills a multiprocessor."""


# Bytes per number and padded width of the wider of q and v -> sizes. All of them are estimates, none was timed: they
# are what the assembler reports as best for compute capability 9.0, that is few or no spilled registers, and room
# for two programs of 8 warps or three of 4 on a multiprocessor. More than one stage in float32 keeps the factors of
# exact products in registers, and spills them. To tune for a card, edit the numbers (tokens and warps are powers of
# two, tokens from 16 to 128); nothing else depends on them.
_FORWARD = {
    (2, 16): Tile(128, 4, 2),
    (2, 32): Tile(64, 4, 3),
    (2, 64): Tile(64, 4, 2),
    (2, 128): Tile(64, 8, 2, registers=128),
    (4, 16): Tile(64, 4, 1),
    (4, 32): Tile(64, 4, 1),
    (4, 64): Tile(32, 8, 1),
    (4, 128): Tile(32, 16, 1),
}
_BACKWARD = {
    (2, 16): Tile(64, 4, 2),
    (2, 32): Tile(64, 4, 2),
    (2, 64): Tile(64, 8, 2, registers=128),
    (2, 128): Tile(64, 16, 2),
    (4, 16): Tile(64, 4, 1),
    (4, 32): Tile(32, 4, 1),
    (4, 64): Tile(32, 8, 1),
    (4, 128): Tile(16, 16, 1),
}


def choose(q: Tensor, v: Tensor, *, backward: bool) -> tuple[Blocks, dict[str, int | None]]:
    """The constants and the launch options for inputs q (B, H, N, D) and v (B, H, N, Dv)."""
    return choose_from(_BACKWARD if backward else _FORWARD, q, v)


def choose_from(
    table: Mapping[tuple[int, int], Tile], q: Tensor, v: Tensor
) -> tuple[Blocks, dict[str, int | None]]:
    """`choose` for a kernel with a table of its own."""
    d, dv, number_size = q.shape[-1], v.shape[-1], q.element_size()
    tile = table[number_size, max(padded(d), padded(dv))]
    return _constants(d, dv, number_size, float32_precision(), tile)


@functools.cache
def _constants(
    d: int, dv: int, number_size: int, precision: str, tile: Tile
) -> tuple[Blocks, dict[str, int | None]]:
    block_d, block_dv = padded(d), padded(dv)
    # A thread reads 16 bytes at a time.
    lanes = min(tile.tokens, tile.warps * 32 * (16 // number_size) // max(block_d, block_dv))
    blocks = Blocks(d, dv, block_d, block_dv, tile.tokens, lanes, tile.stages, precision)
    return as_constant(blocks), {"num_warps": tile.warps, "maxnreg": tile.registers}


def as_constant(sizes: Sizes) -> Sizes:
    """A dataclass of numbers and strings as a kernel takes it: Triton up to 3.6 wants its fields wrapped too."""
    return replace(sizes, **{field.name: tl.constexpr(getattr(sizes, field.name)) for field in fields(sizes)})


def padded(width: int) -> int:
    """The smallest power of two that holds a width and that a matrix product takes."""
    return max(16, 1 << (width - 1).bit_length())


def float32_precision() -> str:
    """How float32 factors are multiplied, as Triton calls it; follows PyTorch's switch."""
    return "tf32" if tf32_allowed() else "ieee"


def rows(x: Tensor) -> Rows:
    """A tensor (B, H, N, D) of any strides for a kernel; copied only if its rows have gaps or lie far apart."""
    gaps = x.stride(-1) != 1 and x.shape[-1] > 1
    if gaps or x.stride(-2) > _LONGEST_STEP:
        x = x.contiguous()
    return x, x.stride(0), x.stride(1), x.stride(2)


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """A context in which kernels are launched on the device of x; none for the CPU of the interpreter."""
    return torch.cuda.device(x.device if x.is_cuda else -1)
