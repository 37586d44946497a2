"""The loops over tokens of the two affine kinds, from q^_i = q_i / |q_i| and k^_j = k_j / |k_j|.

Without DENOMINATOR  o_i = c (sum_j v_j + sum_j (q^_i.k^_j) v_j), with `scale` = c.
With DENOMINATOR     o_i = mean v + sum_j (q^_i.k^_j) (v_j - mean v) / sum_j (1 + q^_i.k^_j), with `scale` = 1 / N,
which is the weighted mean of the values, written so that rounding spares their common part.

The sums over the keys travel as the triple state = (V^T K^, sum v, sum k^) in float32, its gradient likewise. In
half precision the tensors themselves are the factors of the products, unrounded, and the lengths of q and k
multiply the float32 rows of the result; what is rounded is the state, and the unit rows that enter it.
"""

import torch
import triton
import triton.language as tl

from openclip_linattn.ops.inputs import vanishing_weight
from openclip_linattn.ops.triton_kernels.blocks import (
    as_factor,
    dot,
    fold,
    inverse_lengths,
    load_rows,
    load_vector,
    store_rows,
    store_vector,
    unit_gradients,
)
from openclip_linattn.ops.triton_kernels.chunks import numbers_of_head

_VANISHING = tl.constexpr(vanishing_weight(torch.float32))
# 1 / (mean weight) may reach 262,144. This brings it into the range of float16, which still resolves unit rows to
# 2^-18.
_HEADROOM = tl.constexpr(1 / 64)


@triton.jit
def sum_keys(k, v, start, end, B: tl.constexpr, DENOMINATOR: tl.constexpr):
    """The state of the tokens from start to end."""
    products = tl.zeros((B.block_dv, B.block_d), tl.float32)
    v_sums = tl.zeros((B.lanes, B.block_dv), tl.float32)
    k_sums = tl.zeros((B.lanes, B.block_d), tl.float32)
    for n in tl.range(start, end, B.block_n, num_stages=B.stages):
        k_rows = load_rows(k, n, end, B.d, B.block_n, B.block_d)
        v_rows = load_rows(v, n, end, B.dv, B.block_n, B.block_dv)
        unit = k_rows.to(tl.float32)
        unit *= inverse_lengths(unit)[:, None]
        products = dot(tl.trans(v_rows), unit.to(k_rows.dtype), products, B.precision)
        v_sums += fold(v_rows.to(tl.float32), B.lanes)
        if DENOMINATOR:
            k_sums += fold(unit, B.lanes)
    return products, tl.sum(v_sums, 0), tl.sum(k_sums, 0)


@triton.jit
def write_outputs(q, o, state, scale, start, end, B: tl.constexpr, DENOMINATOR: tl.constexpr):
    """The rows of o for the queries from start to end, from the state of all keys."""
    factor, size = as_factor(_centred(state, scale, DENOMINATOR), q[0].dtype.element_ty)
    common, k_mean = state[1] * scale, state[2] * scale
    for n in tl.range(start, end, B.block_n, num_stages=B.stages):
        q_rows = load_rows(q, n, end, B.d, B.block_n, B.block_d)
        wide = q_rows.to(tl.float32)
        inverse = inverse_lengths(wide)
        inverse_weights, present = _row_weights(wide, inverse, k_mean, DENOMINATOR)
        o_rows = dot(q_rows, tl.trans(factor), None, B.precision)
        o_rows *= (inverse * inverse_weights * (scale * size))[:, None]
        o_rows += common[None, :] * present[:, None]
        store_rows(o, n, end, o_rows, B.dv, B.block_n, B.block_dv)


@triton.jit
def query_gradients(do, q, dq, state, scale, start, end, B: tl.constexpr, DENOMINATOR: tl.constexpr):
    """Write dq of the queries from start to end; returns their part of the gradient of the state.

    With a denominator that is the gradient of the centred V^T K^, of sum v in the mean alone and of sum k^ in the
    weights alone: `key_gradients` completes the sum of the parts.
    """
    factor, size = as_factor(_centred(state, scale, DENOMINATOR), q[0].dtype.element_ty)
    k_mean = state[2] * scale
    products = tl.zeros((B.block_dv, B.block_d), tl.float32)
    do_sums = tl.zeros((B.lanes, B.block_dv), tl.float32)
    weight_sums = tl.zeros((B.block_n, B.block_d), tl.float32)
    for n in tl.range(start, end, B.block_n, num_stages=B.stages):
        q_rows = load_rows(q, n, end, B.d, B.block_n, B.block_d)
        do_rows = load_rows(do, n, end, B.dv, B.block_n, B.block_dv)
        wide = q_rows.to(tl.float32)
        inverse = inverse_lengths(wide)
        inverse_weights, present = _row_weights(wide, inverse, k_mean, DENOMINATOR)
        do_sums += fold(do_rows.to(tl.float32) * present[:, None], B.lanes)
        weighted = wide * (inverse * inverse_weights * _HEADROOM)[:, None]
        products = dot(tl.trans(do_rows), weighted.to(q_rows.dtype), products, B.precision)
        d_unit = dot(do_rows, factor, None, B.precision)
        weight_scale = inverse * inverse_weights * (scale * size)
        along = weight_scale * tl.sum(wide * d_unit, 1) * inverse_weights
        d_rows = d_unit * weight_scale[:, None] - wide * (inverse * along * inverse)[:, None]
        if DENOMINATOR:
            # along is -1 times the gradient of the mean weight of the row.
            d_rows -= k_mean[None, :] * (inverse * along)[:, None]
            weight_sums -= wide * (inverse * along)[:, None]
        store_rows(dq, n, end, d_rows, B.d, B.block_n, B.block_d)
    products *= scale / _HEADROOM
    return products, tl.sum(do_sums, 0) * scale, tl.sum(weight_sums, 0) * scale


@triton.jit
def key_gradients(
    k, v, dk, dv, state, d_state, scale, start, end, B: tl.constexpr, DENOMINATOR: tl.constexpr
):
    """Write dk and dv of the keys from start to end, from the state and the sum of its gradient's parts."""
    factor, size = as_factor(d_state[0], k[0].dtype.element_ty)
    d_v, d_k = d_state[1], d_state[2]
    if DENOMINATOR:
        # From the factor as it is rounded, so that its error meets centred values in dk too.
        wide_factor = factor.to(tl.float32) * size
        d_v -= tl.sum(wide_factor * (state[2] * scale)[None, :], 1)
        d_k -= tl.sum(wide_factor * (state[1] * scale)[:, None], 0)
    for n in tl.range(start, end, B.block_n, num_stages=B.stages):
        k_rows = load_rows(k, n, end, B.d, B.block_n, B.block_d)
        v_rows = load_rows(v, n, end, B.dv, B.block_n, B.block_dv)
        wide = k_rows.to(tl.float32)
        inverse = inverse_lengths(wide)
        dv_rows = dot(k_rows, tl.trans(factor), None, B.precision) * (inverse * size)[:, None]
        store_rows(dv, n, end, dv_rows + d_v[None, :], B.dv, B.block_n, B.block_dv)
        d_unit = dot(v_rows, factor, None, B.precision) * size + d_k[None, :]
        store_rows(dk, n, end, unit_gradients(wide, inverse, d_unit), B.d, B.block_n, B.block_d)


@triton.jit
def _centred(state, scale, DENOMINATOR: tl.constexpr):
    """V^T K^, of values less their mean with a denominator."""
    products = state[0]
    if DENOMINATOR:
        products -= (state[1] * scale)[:, None] * state[2][None, :]
    return products


@triton.jit
def _row_weights(q, inverse, k_mean, DENOMINATOR: tl.constexpr):
    """1 / (mean weight) of the rows and one; zero and zero where it vanishes; 1 and 1 without a denominator."""
    if DENOMINATOR:
        # In float32 throughout: the vanishing weight lies far below the rounding of half precision.
        weights = 1 + inverse * tl.sum(q * k_mean[None, :], 1)
        present = (weights > _VANISHING).to(tl.float32)
        inverse_weights = tl.where(weights > _VANISHING, 1 / weights, 0.0)
    else:
        present = tl.full(inverse.shape, 1.0, tl.float32)
        inverse_weights = present
    return inverse_weights, present


@triton.jit
def load_state(states, B: tl.constexpr, DENOMINATOR: tl.constexpr):
    """The state of this program's head: Dv rows V^T K^, then sum v, then with a denominator sum k^."""
    place = _place(states, 0, B, DENOMINATOR)
    products = load_rows((place, B.d), 0, B.dv, B.d, B.block_dv, B.block_d)
    v_sum = load_vector(place + B.d * B.dv, B.dv, B.block_dv)
    k_sum = tl.zeros((B.block_d,), tl.float32)
    if DENOMINATOR:
        k_sum = load_vector(place + (B.d + 1) * B.dv, B.d, B.block_d)
    return products, v_sum, k_sum


@triton.jit
def store_state(states, chunk, state, B: tl.constexpr, DENOMINATOR: tl.constexpr):
    """Write the state of a chunk of this program's head, or its gradient, as `load_state` reads it."""
    place = _place(states, chunk, B, DENOMINATOR)
    store_rows((place, B.d), 0, B.dv, state[0], B.d, B.block_dv, B.block_d)
    store_vector(place + B.d * B.dv, state[1], B.dv, B.block_dv)
    if DENOMINATOR:
        store_vector(place + (B.d + 1) * B.dv, state[2], B.d, B.block_d)


@triton.jit
def _place(states, chunk, B: tl.constexpr, DENOMINATOR: tl.constexpr):
    numbers: tl.constexpr = B.d * B.dv + B.dv + (B.d if DENOMINATOR else 0)
    return numbers_of_head(states, chunk, numbers)
