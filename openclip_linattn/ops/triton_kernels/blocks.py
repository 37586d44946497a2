"""Device functions shared by the kernels: blocks of tokens, rows of length one, products.

The rows of one head travel through the kernels as the pair (pointer to its first token, token stride).
A block holds `BLOCK_N` tokens from `start` on, padded to a power-of-two width; tokens from `end` on and columns
from `WIDTH` on are read as zeros and not written.
"""

import os

import triton
import triton.language as tl

from openclip_linattn.ops.inputs import TINY

_TINY = tl.constexpr(TINY)
_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def head_rows(x, heads):
    """The rows of the head of this program (axis 0 of the grid counts B * H) in x = `launch.rows(tensor)`."""
    return rows_of_head(x, heads, tl.program_id(0))


@triton.jit
def rows_of_head(x, heads, head):
    """The rows of one of the B * H heads in x = `launch.rows(tensor)`."""
    # A batch may hold more than 2^31 numbers.
    batch = (head // heads).to(tl.int64)
    return x[0] + batch * x[1] + (head % heads).to(tl.int64) * x[2], x[3]


@triton.jit
def load_rows(rows, start, end, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr):
    """A block (BLOCK_N, BLOCK) of the rows of a head, in the dtype of the tensor."""
    pointers, inside = _block(rows, start, end, WIDTH, BLOCK_N, BLOCK)
    return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def store_rows(rows, start, end, values, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr):
    """Write a block (BLOCK_N, BLOCK), rounded to the dtype of the tensor."""
    pointers, inside = _block(rows, start, end, WIDTH, BLOCK_N, BLOCK)
    tl.store(pointers, values.to(rows[0].dtype.element_ty), mask=inside)


@triton.jit
def _block(rows, start, end, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK)
    # Only the first token of the block can lie further than 2^31 numbers away.
    first = rows[0] + tl.cast(start, tl.int64) * rows[1]
    inside = (n < end - start)[:, None]
    if WIDTH != BLOCK:
        inside &= (d < WIDTH)[None, :]
    return first + n[:, None] * rows[1] + d[None, :], inside


@triton.jit
def load_vector(pointer, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The WIDTH numbers at a pointer, padded with zeros to BLOCK."""
    d = tl.arange(0, BLOCK)
    return tl.load(pointer + d, mask=d < WIDTH, other=0.0)


@triton.jit
def store_vector(pointer, values, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Write the first WIDTH of BLOCK numbers."""
    d = tl.arange(0, BLOCK)
    tl.store(pointer + d, values, mask=d < WIDTH)


@triton.jit
def inverse_lengths(x):
    """(|x_n|^2 + 1e-12)^-1/2 of the rows of a float32 block, by which they get length one."""
    return tl.rsqrt(tl.sum(x * x, 1) + _TINY)


@triton.jit
def unit_gradients(x, inverse, d_unit):
    """The gradient of the rows x_n (float32) from that of x_n inverse_n, the rows brought to length one."""
    along = inverse * tl.sum(x * d_unit, 1)
    return d_unit * inverse[:, None] - x * (inverse * along * inverse)[:, None]


@triton.jit
def fold(x, LANES: tl.constexpr):
    """The sums (LANES, BLOCK) of every LANES-th row of a block (BLOCK_N, BLOCK).

    A sum down to one row crosses the warps of a program; this one stays within each thread where LANES is the
    number of rows that the warps hold side by side. So loops fold, and sum the rest once, at their end.
    """
    return tl.sum(tl.reshape(x, (x.shape[0] // LANES, LANES, x.shape[1])), 0)


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """acc + a b in float32, for factors of one dtype; PRECISION concerns float32 factors."""
    if _INTERPRETED:
        # The interpreter holds bfloat16 as 16-bit integers and would multiply those.
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def as_factor(matrix, DTYPE: tl.constexpr):
    """A float32 matrix as (factor of a product in DTYPE, number by which to multiply the product).

    The sums over all tokens leave the range of float16, so that it gets them with entries up to one.
    """
    if DTYPE.is_fp16():
        largest = tl.max(tl.max(tl.abs(matrix), 1), 0)
        size = tl.where(largest > 1e-30, largest, 1.0)
        matrix = matrix / size
    else:
        size = 1.0
    return matrix.to(DTYPE), size
