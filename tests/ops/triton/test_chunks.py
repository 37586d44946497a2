"""How the tokens of a head are shared out among programs; no kernel runs."""

from itertools import product

import pytest
import torch


def programs(chunks, heads, tokens):
    """The tokens of a program and the number of programs."""
    length = chunks.tokens_per_program(torch.empty(1, heads, tokens, 64, device="meta"))
    return length, heads * -(-tokens // length)


@pytest.mark.parametrize(
    ("heads", "tokens"), list(product([1, 12, 48, 192, 263, 265, 300, 3072], [197, 1024, 4096, 16384]))
)
def test_a_nearly_empty_last_wave_does_not_double_the_time(heads, tokens, kernel_module):
    chunks = kernel_module("chunks")
    length, count = programs(chunks, heads, tokens)
    waves = -(-count // chunks.LIMITS.programs)
    whole = -(-heads // chunks.LIMITS.programs) * tokens  # without a cut
    assert waves * length <= whole
    if heads * tokens >= 264 * 2048:
        assert waves * length <= 1.35 * heads * tokens / chunks.LIMITS.programs


@pytest.mark.parametrize(
    ("heads", "tokens"), list(product([1, 32, 3072], [1, 600, 1025, 2047, 65_536, 4_194_304]))
)
def test_lengths_stay_within_their_limits(heads, tokens, kernel_module):
    chunks = kernel_module("chunks")
    length, _ = programs(chunks, heads, tokens)
    assert length <= chunks.LIMITS.longest
    assert length == tokens or (length >= chunks.LIMITS.shortest and length % 128 == 0)


def test_few_long_heads_keep_the_card_busy(kernel_module):
    chunks = kernel_module("chunks")
    assert programs(chunks, 1, 4_194_304)[1] >= 200
    assert programs(chunks, 48, 16_384)[1] >= 200
    assert programs(chunks, 3072, 197) == (197, 3072)
