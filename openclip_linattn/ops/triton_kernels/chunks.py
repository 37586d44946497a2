"""How the tokens of one head are shared out among programs.

Axis 0 of a grid counts the heads, B * H, and axis 1 the chunks of tokens. What a program adds up over its chunk
goes to its own place in a buffer (chunks, B * H, numbers), which is then summed in a fixed order.
"""

import functools
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class Limits(NamedTuple):
    """What bounds the tokens of a program; reached through `LIMITS`, so that tests can cut short sequences."""

    programs: int
    """Programs that run at a time: two on each of the 132 multiprocessors of an H200."""
    shortest: int
    """Fewest tokens of a program: below, the sums that it writes are no longer small beside what it reads."""
    longest: int
    """Most tokens that one program adds up in float32, whose error grows with the number of steps."""


LIMITS = Limits(programs=264, shortest=1024, longest=16384)

_BLOCK = 128
"""A multiple of every block, so that only the last program of a head has a block that is not full."""

_OVERHEAD = 64
"""Tokens that take as long as the sums of one chunk, written and read, at a width of 64."""


def tokens_per_program(q: Tensor) -> int:
    """All tokens of q (B, H, N, D), or fewer where the card then has less to wait for, or N is very long."""
    batch, heads, tokens, _ = q.shape
    return _tokens_per_program(max(1, batch * heads), tokens, LIMITS)


@functools.lru_cache(1024)
def _tokens_per_program(heads: int, tokens: int, limits: Limits) -> int:
    fewest = -(-tokens // limits.longest)
    most = max(fewest, tokens // limits.shortest)
    lengths = {_even(tokens, chunks) for chunks in range(fewest, most + 1)}

    def duration(length: int) -> int:
        # The programs run in waves, and a wave of a few takes as long as a full one.
        waves = -(-heads * -(-tokens // length) // limits.programs)
        return waves * (length + _OVERHEAD)

    return min(sorted(lengths, reverse=True), key=duration)


def _even(tokens: int, chunks: int) -> int:
    """Tokens of each of so many chunks, in full blocks."""
    return tokens if chunks == 1 else -(-tokens // (chunks * _BLOCK)) * _BLOCK


@triton.jit
def chunk_of_program(tokens, chunk):
    """The first token of this program, and the one after its last."""
    start = tl.program_id(1) * chunk
    return start, tl.minimum(start + chunk, tokens)


@triton.jit
def numbers_of_head(x, chunk, NUMBERS: tl.constexpr):
    """Where the numbers of a chunk of this program's head lie in x (chunks, B * H, NUMBERS)."""
    place = tl.cast(chunk, tl.int64) * tl.num_programs(0) + tl.program_id(0)
    return x + place * NUMBERS
