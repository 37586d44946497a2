"""The passes over the tokens of Neumann linear attention; what lies between them is in `ops.small_systems`.

With Phi = [1, Q^] and Psi = [1, K^], the forward pass adds up Phi^T Phi, Psi^T Psi, Psi^T Phi and Psi^T V and
later writes o = Phi x; the backward pass adds up dx = Phi^T dO and later writes the gradients of q, k and v. Axis
0 of every grid counts the heads, B * H; axis 1 the chunks of tokens.

In half precision the unit rows are rounded where they are factors of the sums, and there the rounded rows count
throughout: so A stays a matrix of rank D + 1 of known norm, and rounding cannot make the series diverge.
Elsewhere the tensors themselves are the factors, and the lengths multiply the float32 rows of the product.
"""

import triton
import triton.language as tl

from openclip_linattn.ops.triton_kernels.blocks import (
    as_factor,
    dot,
    fold,
    head_rows,
    inverse_lengths,
    load_rows,
    load_vector,
    store_rows,
    store_vector,
    unit_gradients,
)
from openclip_linattn.ops.triton_kernels.chunks import chunk_of_program, numbers_of_head

# TF32 keeps 11 bits of a float32 factor, and the system that follows may amplify what is lost a hundredfold.
_PRECISE = tl.constexpr("tf32x3")


@triton.jit
def sum_kernel(q, k, v, partial, heads, tokens, chunk, B: tl.constexpr):
    """The four sums of one chunk, side by side in partial (chunks, B * H, D + 1, 3 (D + 1) + Dv)."""
    start, end = chunk_of_program(tokens, chunk)
    width: tl.constexpr = B.d + 1
    line: tl.constexpr = 3 * width + B.dv
    sums = numbers_of_head(partial, tl.program_id(1), width * line)
    count = (end - start).to(tl.float32)
    q, k, v = head_rows(q, heads), head_rows(k, heads), head_rows(v, heads)
    gram, cross, q_sum, k_sum = _sum_queries(q, k, start, end, B)
    _store_bordered(sums, line, count, q_sum, q_sum, gram, B)
    _store_bordered(sums + 2 * width, line, count, q_sum, k_sum, cross, B)
    gram, products, v_sum = _sum_keys(k, v, start, end, B)
    _store_bordered(sums + width, line, count, k_sum, k_sum, gram, B)
    store_vector(sums + 3 * width, v_sum, B.dv, B.block_dv)
    store_rows((sums + 3 * width + line, line), 0, B.d, products, B.dv, B.block_d, B.block_dv)


@triton.jit
def output_kernel(q, o, x, heads, tokens, chunk, B: tl.constexpr):
    """o = [1, Q^] x of one chunk."""
    start, end = chunk_of_program(tokens, chunk)
    q, o = head_rows(q, heads), head_rows(o, heads)
    common, matrix = _load_outputs(x, B)
    factor, size = as_factor(matrix, q[0].dtype.element_ty)
    for n in tl.range(start, end, B.block_n, num_stages=B.stages):
        q_rows = load_rows(q, n, end, B.d, B.block_n, B.block_d)
        lengths = inverse_lengths(q_rows.to(tl.float32)) * size
        o_rows = dot(q_rows, factor, None, B.precision) * lengths[:, None] + common[None, :]
        store_rows(o, n, end, o_rows, B.dv, B.block_n, B.block_dv)


@triton.jit
def output_gradients_kernel(do, q, partial, heads, tokens, chunk, B: tl.constexpr):
    """dx = [1, Q^]^T dO of one chunk, to partial (chunks, B * H, D + 1, Dv)."""
    start, end = chunk_of_program(tokens, chunk)
    do, q = head_rows(do, heads), head_rows(q, heads)
    products = tl.zeros((B.block_d, B.block_dv), tl.float32)
    sums = tl.zeros((B.lanes, B.block_dv), tl.float32)
    for n in tl.range(start, end, B.block_n, num_stages=B.stages):
        unit = _unit_rows(q, n, end, B)
        do_rows = load_rows(do, n, end, B.dv, B.block_n, B.block_dv)
        products = dot(tl.trans(unit), do_rows, products, B.precision)
        sums += fold(do_rows.to(tl.float32), B.lanes)
    saved = numbers_of_head(partial, tl.program_id(1), (B.d + 1) * B.dv)
    store_vector(saved, tl.sum(sums, 0), B.dv, B.block_dv)
    store_rows((saved + B.dv, B.dv), 0, B.d, products, B.dv, B.block_d, B.block_dv)


@triton.jit
def input_gradients_kernel(
    do, q, k, v, x, of_gram_q, of_gram_k, of_cross, of_summed, dq, dk, dv, heads, tokens, chunk,
    B: tl.constexpr,
):  # fmt: skip
    """dq, dk and dv of one chunk, from x and the gradients of the four sums."""
    start, end = chunk_of_program(tokens, chunk)
    q, k = head_rows(q, heads), head_rows(k, heads)
    do, v = head_rows(do, heads), head_rows(v, heads)
    row, column, cross = _load_bordered(of_cross, B)
    border, _, gram = _load_bordered(of_gram_q, B)
    _, matrix = _load_outputs(x, B)
    factors = gram, cross, matrix
    _query_gradients(do, q, k, head_rows(dq, heads), 2 * border + row, factors, start, end, B)
    border, _, gram = _load_bordered(of_gram_k, B)
    v_row, matrix = _load_outputs(of_summed, B)
    factors = gram, cross, matrix
    dk, dv = head_rows(dk, heads), head_rows(dv, heads)
    _key_gradients(q, k, v, dk, dv, 2 * border + column, v_row, factors, start, end, B)


@triton.jit
def _sum_queries(q, k, start, end, B: tl.constexpr):
    """Q^^T Q^, K^^T Q^ and the sums of the rows of Q^ and K^."""
    gram = tl.zeros((B.block_d, B.block_d), tl.float32)
    cross = tl.zeros((B.block_d, B.block_d), tl.float32)
    q_sums = tl.zeros((B.lanes, B.block_d), tl.float32)
    k_sums = tl.zeros((B.lanes, B.block_d), tl.float32)
    for n in tl.range(start, end, B.block_n, num_stages=B.stages):
        q_unit, k_unit = _unit_rows(q, n, end, B), _unit_rows(k, n, end, B)
        gram = dot(tl.trans(q_unit), q_unit, gram, _PRECISE)
        cross = dot(tl.trans(k_unit), q_unit, cross, _PRECISE)
        q_sums += fold(q_unit.to(tl.float32), B.lanes)
        k_sums += fold(k_unit.to(tl.float32), B.lanes)
    return gram, cross, tl.sum(q_sums, 0), tl.sum(k_sums, 0)


@triton.jit
def _sum_keys(k, v, start, end, B: tl.constexpr):
    """K^^T K^, K^^T V and the sum of the rows of V."""
    gram = tl.zeros((B.block_d, B.block_d), tl.float32)
    products = tl.zeros((B.block_d, B.block_dv), tl.float32)
    v_sums = tl.zeros((B.lanes, B.block_dv), tl.float32)
    for n in tl.range(start, end, B.block_n, num_stages=B.stages):
        k_unit = _unit_rows(k, n, end, B)
        v_rows = load_rows(v, n, end, B.dv, B.block_n, B.block_dv)
        gram = dot(tl.trans(k_unit), k_unit, gram, _PRECISE)
        products = dot(tl.trans(k_unit), v_rows, products, _PRECISE)
        v_sums += fold(v_rows.to(tl.float32), B.lanes)
    return gram, products, tl.sum(v_sums, 0)


@triton.jit
def _query_gradients(do, q, k, dq, border, factors, start, end, B: tl.constexpr):
    """Write dq of the tokens from start to end: of Phi^T Phi, Psi^T Phi and Phi x."""
    gram, gram_size = as_factor(factors[0], q[0].dtype.element_ty)
    cross, cross_size = as_factor(factors[1], q[0].dtype.element_ty)
    matrix, matrix_size = as_factor(factors[2], q[0].dtype.element_ty)
    for n in tl.range(start, end, B.block_n, num_stages=B.stages):
        q_rows = load_rows(q, n, end, B.d, B.block_n, B.block_d)
        k_rows = load_rows(k, n, end, B.d, B.block_n, B.block_d)
        do_rows = load_rows(do, n, end, B.dv, B.block_n, B.block_dv)
        wide = q_rows.to(tl.float32)
        inverse, k_inverse = inverse_lengths(wide), inverse_lengths(k_rows.to(tl.float32))
        d_unit = dot(q_rows, gram, None, B.precision) * (inverse * (2 * gram_size))[:, None]
        d_unit += dot(k_rows, cross, None, B.precision) * (k_inverse * cross_size)[:, None]
        d_unit += dot(do_rows, tl.trans(matrix), None, B.precision) * matrix_size + border[None, :]
        store_rows(dq, n, end, unit_gradients(wide, inverse, d_unit), B.d, B.block_n, B.block_d)


@triton.jit
def _key_gradients(q, k, v, dk, dv, border, v_row, factors, start, end, B: tl.constexpr):
    """Write dk and dv of the tokens from start to end: of Psi^T Psi, Psi^T Phi and Psi^T V."""
    gram, gram_size = as_factor(factors[0], q[0].dtype.element_ty)
    cross, cross_size = as_factor(factors[1], q[0].dtype.element_ty)
    matrix, matrix_size = as_factor(factors[2], q[0].dtype.element_ty)
    for n in tl.range(start, end, B.block_n, num_stages=B.stages):
        q_rows = load_rows(q, n, end, B.d, B.block_n, B.block_d)
        k_rows = load_rows(k, n, end, B.d, B.block_n, B.block_d)
        v_rows = load_rows(v, n, end, B.dv, B.block_n, B.block_dv)
        wide = k_rows.to(tl.float32)
        inverse, q_inverse = inverse_lengths(wide), inverse_lengths(q_rows.to(tl.float32))
        d_unit = dot(k_rows, gram, None, B.precision) * (inverse * (2 * gram_size))[:, None]
        d_unit += dot(q_rows, tl.trans(cross), None, B.precision) * (q_inverse * cross_size)[:, None]
        d_unit += dot(v_rows, tl.trans(matrix), None, B.precision) * matrix_size + border[None, :]
        d_rows = dot(k_rows, matrix, None, B.precision) * (inverse * matrix_size)[:, None] + v_row[None, :]
        store_rows(dk, n, end, unit_gradients(wide, inverse, d_unit), B.d, B.block_n, B.block_d)
        store_rows(dv, n, end, d_rows, B.dv, B.block_n, B.block_dv)


@triton.jit
def _unit_rows(x, n, end, B: tl.constexpr):
    """A block of unit rows of width D, in the dtype of the tensor."""
    x_rows = load_rows(x, n, end, B.d, B.block_n, B.block_d)
    unit = x_rows.to(tl.float32)
    return (unit * inverse_lengths(unit)[:, None]).to(x_rows.dtype)


@triton.jit
def _load_outputs(pointer, B: tl.constexpr):
    """Row 0 and the other rows of this head's matrix in x (B * H, D + 1, Dv)."""
    matrix = numbers_of_head(pointer, 0, (B.d + 1) * B.dv)
    row = load_vector(matrix, B.dv, B.block_dv)
    return row, load_rows((matrix + B.dv, B.dv), 0, B.d, B.dv, B.block_d, B.block_dv)


@triton.jit
def _load_bordered(pointer, B: tl.constexpr):
    """Row 0, column 0 and the rest of this head's matrix in x (B * H, D + 1, D + 1), without the corner."""
    line: tl.constexpr = B.d + 1
    matrix = numbers_of_head(pointer, 0, line * line)
    d = tl.arange(0, B.block_d)
    column = tl.load(matrix + (1 + d) * line, mask=d < B.d, other=0.0)
    rest = load_rows((matrix + line + 1, line), 0, B.d, B.d, B.block_d, B.block_d)
    return load_vector(matrix + 1, B.d, B.block_d), column, rest


@triton.jit
def _store_bordered(pointer, line, corner, row, column, rest, B: tl.constexpr):
    """Write the matrix [[corner, row], [column, rest]], whose rows lie `line` numbers apart."""
    d = tl.arange(0, B.block_d)
    tl.store(pointer, corner)
    store_vector(pointer + 1, row, B.d, B.block_d)
    tl.store(pointer + (1 + d) * line, column, mask=d < B.d)
    store_rows((pointer + line + 1, line), 0, B.d, rest, B.d, B.block_d, B.block_d)
