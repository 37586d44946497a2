"""The kernels of the two affine kinds: see `affine_blocks` for the formula and `affine` for their launches.

Axis 0 of every grid counts the heads, B * H; axis 1, where there is one, the chunks of tokens.
"""

import triton
import triton.language as tl

from openclip_linattn.ops.triton_kernels.affine_blocks import (
    key_gradients,
    load_state,
    query_gradients,
    store_state,
    sum_keys,
    write_outputs,
)
from openclip_linattn.ops.triton_kernels.blocks import head_rows
from openclip_linattn.ops.triton_kernels.chunks import chunk_of_program


@triton.jit
def forward_kernel(
    q, k, v, o, state, heads, tokens, scale, B: tl.constexpr, DENOMINATOR: tl.constexpr, SAVE: tl.constexpr
):
    """One head, all of it; SAVE writes its state."""
    sums = sum_keys(head_rows(k, heads), head_rows(v, heads), 0, tokens, B, DENOMINATOR)
    if SAVE:
        store_state(state, 0, sums, B, DENOMINATOR)
    write_outputs(head_rows(q, heads), head_rows(o, heads), sums, scale, 0, tokens, B, DENOMINATOR)


@triton.jit
def backward_kernel(
    do, q, k, v, state, dq, dk, dv, heads, tokens, scale,
    B: tl.constexpr, DENOMINATOR: tl.constexpr, SAVED: tl.constexpr,
):  # fmt: skip
    """The gradients of one head, from its saved state or from all of its keys and values."""
    k_rows, v_rows = head_rows(k, heads), head_rows(v, heads)
    sums = load_state(state, B, DENOMINATOR) if SAVED else sum_keys(k_rows, v_rows, 0, tokens, B, DENOMINATOR)
    do_rows, q_rows, dq_rows = head_rows(do, heads), head_rows(q, heads), head_rows(dq, heads)
    d_sums = query_gradients(do_rows, q_rows, dq_rows, sums, scale, 0, tokens, B, DENOMINATOR)
    dk_rows, dv_rows = head_rows(dk, heads), head_rows(dv, heads)
    key_gradients(k_rows, v_rows, dk_rows, dv_rows, sums, d_sums, scale, 0, tokens, B, DENOMINATOR)


@triton.jit
def sum_keys_kernel(k, v, partial, heads, tokens, chunk, B: tl.constexpr, DENOMINATOR: tl.constexpr):
    """The state of one chunk of one head."""
    start, end = chunk_of_program(tokens, chunk)
    sums = sum_keys(head_rows(k, heads), head_rows(v, heads), start, end, B, DENOMINATOR)
    store_state(partial, tl.program_id(1), sums, B, DENOMINATOR)


@triton.jit
def write_outputs_kernel(
    q, o, state, heads, tokens, chunk, scale, B: tl.constexpr, DENOMINATOR: tl.constexpr
):
    """The outputs of one chunk of one head."""
    start, end = chunk_of_program(tokens, chunk)
    sums = load_state(state, B, DENOMINATOR)
    write_outputs(head_rows(q, heads), head_rows(o, heads), sums, scale, start, end, B, DENOMINATOR)


@triton.jit
def query_gradients_kernel(
    do, q, dq, state, partial, heads, tokens, chunk, scale, B: tl.constexpr, DENOMINATOR: tl.constexpr
):
    """dq of one chunk of one head, and the chunk's part of the gradient of the state."""
    start, end = chunk_of_program(tokens, chunk)
    sums = load_state(state, B, DENOMINATOR)
    do_rows, q_rows, dq_rows = head_rows(do, heads), head_rows(q, heads), head_rows(dq, heads)
    d_sums = query_gradients(do_rows, q_rows, dq_rows, sums, scale, start, end, B, DENOMINATOR)
    store_state(partial, tl.program_id(1), d_sums, B, DENOMINATOR)


@triton.jit
def key_gradients_kernel(
    k, v, dk, dv, state, d_state, heads, tokens, chunk, scale, B: tl.constexpr, DENOMINATOR: tl.constexpr
):
    """dk and dv of one chunk of one head."""
    start, end = chunk_of_program(tokens, chunk)
    sums = load_state(state, B, DENOMINATOR)
    d_sums = load_state(d_state, B, DENOMINATOR)
    k_rows, v_rows = head_rows(k, heads), head_rows(v, heads)
    dk_rows, dv_rows = head_rows(dk, heads), head_rows(dv, heads)
    key_gradients(k_rows, v_rows, dk_rows, dv_rows, sums, d_sums, scale, start, end, B, DENOMINATOR)
