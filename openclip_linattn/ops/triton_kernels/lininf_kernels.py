"""The kernels of linear infinite attention, o = sum_j s_j v_j / sum s, s_j = ReLU(qbar.k_j).

qbar = sum_i |q_i| q_i / sum |q|. Axis 0 of every grid counts the heads, B * H; axis 1, where there is one, the
chunks of tokens. All arithmetic is float32: the kernels wait for memory, not for products. The state of a head
is qbar, o, sum |q| and sum s, side by side, the sums clamped to 1e-12 from below.
"""

import triton
import triton.language as tl

from openclip_linattn.ops.inputs import TINY
from openclip_linattn.ops.triton_kernels.blocks import (
    fold,
    head_rows,
    load_rows,
    load_vector,
    store_rows,
    store_vector,
)
from openclip_linattn.ops.triton_kernels.chunks import chunk_of_program, numbers_of_head

_TINY = tl.constexpr(TINY)


@triton.jit
def forward_kernel(q, k, v, o, state, heads, tokens, B: tl.constexpr):
    """One head, all of it."""
    query, energy = _sum_queries(head_rows(q, heads), 0, tokens, B)
    energy = tl.maximum(energy, _TINY)
    query /= energy
    output, score = _sum_values(head_rows(k, heads), head_rows(v, heads), query, 0, tokens, B)
    score = tl.maximum(score, _TINY)
    output /= score
    saved = numbers_of_head(state, 0, B.d + B.dv + 2)
    store_vector(saved, query, B.d, B.block_d)
    store_vector(saved + B.d, output, B.dv, B.block_dv)
    tl.store(saved + B.d + B.dv, energy)
    tl.store(saved + B.d + B.dv + 1, score)
    store_vector(numbers_of_head(o, 0, B.dv), output.to(o.dtype.element_ty), B.dv, B.block_dv)


@triton.jit
def sum_queries_kernel(q, partial, heads, tokens, chunk, B: tl.constexpr):
    """sum |q| q and sum |q| of one chunk of one head, to partial (chunks, B * H, D + 1)."""
    start, end = chunk_of_program(tokens, chunk)
    query, energy = _sum_queries(head_rows(q, heads), start, end, B)
    sums = numbers_of_head(partial, tl.program_id(1), B.d + 1)
    store_vector(sums, query, B.d, B.block_d)
    tl.store(sums + B.d, energy)


@triton.jit
def sum_values_kernel(k, v, queries, partial, heads, tokens, chunk, B: tl.constexpr):
    """sum s v and sum s of one chunk of one head, to partial (chunks, B * H, Dv + 1)."""
    start, end = chunk_of_program(tokens, chunk)
    query = load_vector(numbers_of_head(queries, 0, B.d), B.d, B.block_d)
    output, score = _sum_values(head_rows(k, heads), head_rows(v, heads), query, start, end, B)
    sums = numbers_of_head(partial, tl.program_id(1), B.dv + 1)
    store_vector(sums, output, B.dv, B.block_dv)
    tl.store(sums + B.dv, score)


@triton.jit
def backward_kernel(do, q, k, v, state, dq, dk, dv, heads, tokens, B: tl.constexpr):
    """The gradients of one head, all of them."""
    d_query = _key_gradients(do, k, v, state, dk, dv, heads, 0, tokens, B)
    _query_gradients(d_query, q, state, dq, heads, 0, tokens, B)


@triton.jit
def key_gradients_kernel(do, k, v, state, dk, dv, partial, heads, tokens, chunk, B: tl.constexpr):
    """dk and dv of one chunk of one head, and its part of the gradient of qbar, to (chunks, B * H, D)."""
    start, end = chunk_of_program(tokens, chunk)
    d_query = _key_gradients(do, k, v, state, dk, dv, heads, start, end, B)
    store_vector(numbers_of_head(partial, tl.program_id(1), B.d), d_query, B.d, B.block_d)


@triton.jit
def query_gradients_kernel(d_queries, q, state, dq, heads, tokens, chunk, B: tl.constexpr):
    """dq of one chunk of one head, from the gradients of qbar (B * H, D)."""
    start, end = chunk_of_program(tokens, chunk)
    d_query = load_vector(numbers_of_head(d_queries, 0, B.d), B.d, B.block_d)
    _query_gradients(d_query, q, state, dq, heads, start, end, B)


@triton.jit
def _sum_queries(q, start, end, B: tl.constexpr):
    sums = tl.zeros((B.lanes, B.block_d), tl.float32)
    energies = tl.zeros((B.block_n,), tl.float32)
    for n in tl.range(start, end, B.block_n, num_stages=B.stages):
        q_rows = load_rows(q, n, end, B.d, B.block_n, B.block_d).to(tl.float32)
        energy = tl.sqrt(tl.sum(q_rows * q_rows, 1))
        sums += fold(q_rows * energy[:, None], B.lanes)
        energies += energy
    return tl.sum(sums, 0), tl.sum(energies, 0)


@triton.jit
def _sum_values(k, v, query, start, end, B: tl.constexpr):
    sums = tl.zeros((B.lanes, B.block_dv), tl.float32)
    scores = tl.zeros((B.block_n,), tl.float32)
    for n in tl.range(start, end, B.block_n, num_stages=B.stages):
        k_rows = load_rows(k, n, end, B.d, B.block_n, B.block_d).to(tl.float32)
        v_rows = load_rows(v, n, end, B.dv, B.block_n, B.block_dv).to(tl.float32)
        score = tl.maximum(tl.sum(k_rows * query[None, :], 1), 0.0)
        sums += fold(v_rows * score[:, None], B.lanes)
        scores += score
    return tl.sum(sums, 0), tl.sum(scores, 0)


@triton.jit
def _key_gradients(do, k, v, state, dk, dv, heads, start, end, B: tl.constexpr):
    """Write dk and dv of the tokens from start to end; returns their part of the gradient of qbar."""
    k, v, dk, dv = head_rows(k, heads), head_rows(v, heads), head_rows(dk, heads), head_rows(dv, heads)
    saved = numbers_of_head(state, 0, B.d + B.dv + 2)
    query = load_vector(saved, B.d, B.block_d)
    output = load_vector(saved + B.d, B.dv, B.block_dv)
    total = tl.load(saved + B.d + B.dv + 1)
    upstream = load_vector(head_rows(do, heads)[0], B.dv, B.block_dv).to(tl.float32)
    # A clamped sum is constant.
    through_sum = tl.where(total > _TINY, tl.sum(upstream * output, 0), 0.0)
    sums = tl.zeros((B.lanes, B.block_d), tl.float32)
    for n in tl.range(start, end, B.block_n, num_stages=B.stages):
        k_rows = load_rows(k, n, end, B.d, B.block_n, B.block_d).to(tl.float32)
        v_rows = load_rows(v, n, end, B.dv, B.block_n, B.block_dv).to(tl.float32)
        score = tl.maximum(tl.sum(k_rows * query[None, :], 1), 0.0)
        d_score = (tl.sum(v_rows * upstream[None, :], 1) - through_sum) / total
        d_score = tl.where(score > 0, d_score, 0.0)
        sums += fold(k_rows * d_score[:, None], B.lanes)
        store_rows(dk, n, end, d_score[:, None] * query[None, :], B.d, B.block_n, B.block_d)
        store_rows(dv, n, end, (score / total)[:, None] * upstream[None, :], B.dv, B.block_n, B.block_dv)
    return tl.sum(sums, 0)


@triton.jit
def _query_gradients(d_query, q, state, dq, heads, start, end, B: tl.constexpr):
    """Write dq of the tokens from start to end: of sum |q| q, and through |q| of both sums."""
    q, dq = head_rows(q, heads), head_rows(dq, heads)
    saved = numbers_of_head(state, 0, B.d + B.dv + 2)
    total = tl.load(saved + B.d + B.dv)
    along = d_query / total
    through_sum = tl.sum(along * load_vector(saved, B.d, B.block_d), 0)
    through_sum = tl.where(total > _TINY, through_sum, 0.0)
    for n in tl.range(start, end, B.block_n, num_stages=B.stages):
        q_rows = load_rows(q, n, end, B.d, B.block_n, B.block_d).to(tl.float32)
        energy = tl.sqrt(tl.sum(q_rows * q_rows, 1))
        of_energy = tl.sum(q_rows * along[None, :], 1) - through_sum
        # Of a zero vector |q| q is zero in any case, and so is its gradient.
        of_energy /= tl.where(energy > 0, energy, 1.0)
        d_rows = energy[:, None] * along[None, :] + of_energy[:, None] * q_rows
        store_rows(dq, n, end, d_rows, B.d, B.block_n, B.block_d)
