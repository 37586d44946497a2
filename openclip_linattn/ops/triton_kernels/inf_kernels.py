"""The kernels of pure infinite attention, o_i = sum_j A_ij v_j / F_i, A = ReLU(Q K^T), F a Frobenius norm.

A program takes a block of rows (or of keys, for their gradients) and walks over the other tokens; a block of A
never leaves the registers. Programs of one head follow each other, so that its keys stay in the cache. CAUSAL
makes A lower triangular. The norms enter as their inverses, and `slope` is what a score's own value adds to its
gradient through the norms; both are one number per head, or with CAUSAL one per row.
"""

import triton
import triton.language as tl

from openclip_linattn.ops.triton_kernels.blocks import dot, load_rows, rows_of_head, store_rows


@triton.jit
def forward_kernel(q, k, v, total, squares, heads, tokens, B: tl.constexpr, CAUSAL: tl.constexpr):
    """The rows A V of a block to total, float32, and the sums of squares of the rows of A to squares (B H, N)."""
    head, start = _place(tokens, B.rows)
    k, v = rows_of_head(k, heads, head), rows_of_head(v, heads, head)
    q_rows = load_rows(rows_of_head(q, heads, head), start, tokens, B.d, B.rows, B.block_d)
    row = start + tl.arange(0, B.rows)
    sums = tl.zeros((B.rows, B.block_dv), tl.float32)
    row_squares = tl.zeros((B.rows,), tl.float32)
    end = tl.minimum(start + B.rows, tokens) if CAUSAL else tokens
    for n in tl.range(0, end, B.keys, num_stages=B.stages):
        k_keys = load_rows(k, n, end, B.d, B.keys, B.block_d)
        v_keys = load_rows(v, n, end, B.dv, B.keys, B.block_dv)
        key = n + tl.arange(0, B.keys)
        scores = _scores(q_rows, k_keys, row[:, None], key[None, :], B, CAUSAL)
        row_squares += tl.sum(scores * scores, 1)
        sums = _add_product(sums, scores, v_keys, B)
    store_rows(rows_of_head(total, heads, head), start, tokens, sums, B.dv, B.rows, B.block_dv)
    tl.store(squares + head.to(tl.int64) * tokens + row, row_squares, mask=row < tokens)


@triton.jit
def aligned_kernel(do, o, aligned, heads, tokens, B: tl.constexpr):
    """do_i.o_i of the rows of a block, to aligned (B H, N)."""
    head, start = _place(tokens, B.rows)
    do_rows = load_rows(rows_of_head(do, heads, head), start, tokens, B.dv, B.rows, B.block_dv)
    o_rows = load_rows(rows_of_head(o, heads, head), start, tokens, B.dv, B.rows, B.block_dv)
    row = start + tl.arange(0, B.rows)
    products = tl.sum(do_rows.to(tl.float32) * o_rows.to(tl.float32), 1)
    tl.store(aligned + head.to(tl.int64) * tokens + row, products, mask=row < tokens)


@triton.jit
def query_gradients_kernel(
    do, q, k, v, inverse, slope, dq, heads, tokens, B: tl.constexpr, CAUSAL: tl.constexpr
):
    """dq of a block of rows."""
    head, start = _place(tokens, B.rows)
    k, v = rows_of_head(k, heads, head), rows_of_head(v, heads, head)
    q_rows = load_rows(rows_of_head(q, heads, head), start, tokens, B.d, B.rows, B.block_d)
    do_rows = load_rows(rows_of_head(do, heads, head), start, tokens, B.dv, B.rows, B.block_dv)
    row = start + tl.arange(0, B.rows)
    inverses = _per_row(inverse, head, row, tokens, CAUSAL)[:, None]
    slopes = _per_row(slope, head, row, tokens, CAUSAL)[:, None]
    sums = tl.zeros((B.rows, B.block_d), tl.float32)
    end = tl.minimum(start + B.rows, tokens) if CAUSAL else tokens
    for n in tl.range(0, end, B.keys, num_stages=B.stages):
        k_keys = load_rows(k, n, end, B.d, B.keys, B.block_d)
        v_keys = load_rows(v, n, end, B.dv, B.keys, B.block_dv)
        key = n + tl.arange(0, B.keys)
        scores = _scores(q_rows, k_keys, row[:, None], key[None, :], B, CAUSAL)
        upstream = dot(do_rows, tl.trans(v_keys), None, B.precision)
        sums = _add_product(sums, _score_gradients(scores, upstream, inverses, slopes), k_keys, B)
    store_rows(rows_of_head(dq, heads, head), start, tokens, sums, B.d, B.rows, B.block_d)


@triton.jit
def key_gradients_kernel(
    do, q, k, v, inverse, slope, dk, dv, heads, tokens, B: tl.constexpr, CAUSAL: tl.constexpr
):
    """dk and dv of a block of keys."""
    head, start = _place(tokens, B.keys)
    q, do = rows_of_head(q, heads, head), rows_of_head(do, heads, head)
    k_keys = load_rows(rows_of_head(k, heads, head), start, tokens, B.d, B.keys, B.block_d)
    v_keys = load_rows(rows_of_head(v, heads, head), start, tokens, B.dv, B.keys, B.block_dv)
    key = start + tl.arange(0, B.keys)
    k_sums = tl.zeros((B.keys, B.block_d), tl.float32)
    v_sums = tl.zeros((B.keys, B.block_dv), tl.float32)
    for n in tl.range(start if CAUSAL else 0, tokens, B.rows, num_stages=B.stages):
        q_rows = load_rows(q, n, tokens, B.d, B.rows, B.block_d)
        do_rows = load_rows(do, n, tokens, B.dv, B.rows, B.block_dv)
        row = n + tl.arange(0, B.rows)
        inverses = _per_row(inverse, head, row, tokens, CAUSAL)[None, :]
        slopes = _per_row(slope, head, row, tokens, CAUSAL)[None, :]
        # Transposed, keys by rows, so that the products below take them as they lie in the registers.
        scores = _scores(k_keys, q_rows, row[None, :], key[:, None], B, CAUSAL)
        upstream = dot(v_keys, tl.trans(do_rows), None, B.precision)
        v_sums = _add_product(v_sums, scores * inverses, do_rows, B)
        k_sums = _add_product(k_sums, _score_gradients(scores, upstream, inverses, slopes), q_rows, B)
    store_rows(rows_of_head(dk, heads, head), start, tokens, k_sums, B.d, B.keys, B.block_d)
    store_rows(rows_of_head(dv, heads, head), start, tokens, v_sums, B.dv, B.keys, B.block_dv)


@triton.jit
def _place(tokens, SIZE: tl.constexpr):
    """The head of this program, and the first token of its block."""
    blocks = tl.cdiv(tokens, SIZE)
    head = tl.program_id(0) // blocks
    return head, (tl.program_id(0) % blocks) * SIZE


@triton.jit
def _per_row(x, head, row, tokens, CAUSAL: tl.constexpr):
    """The numbers of some rows in x (B H, N), or with the same number for all of them in x (B H, 1)."""
    if CAUSAL:
        return tl.load(x + head.to(tl.int64) * tokens + row, mask=row < tokens, other=0.0)
    else:  # noqa: RET505 (Triton wants the branches of a constexpr condition apart)
        return tl.full(row.shape, tl.load(x + head), tl.float32)


@triton.jit
def _scores(a, b, row, key, B: tl.constexpr, CAUSAL: tl.constexpr):
    """ReLU(a b^T), zero where the key comes after the row; of NaN NaN, as in PyTorch."""
    scores = dot(a, tl.trans(b), None, B.precision)
    scores = tl.maximum(scores, 0.0, propagate_nan=tl.PropagateNan.ALL)
    if CAUSAL:
        scores = tl.where(row >= key, scores, 0.0)
    return scores


@triton.jit
def _score_gradients(scores, upstream, inverses, slopes):
    """The gradient of Q K^T, from upstream = do.v."""
    return tl.where(scores > 0, upstream * inverses + scores * slopes, 0.0)


@triton.jit
def _add_product(sums, scores, rows, B: tl.constexpr):
    """sums + scores rows, with the scores rounded to the dtype of the rows."""
    if rows.dtype == tl.float16:
        # Scores and their gradients leave the range of float16: it gets them with numbers up to one.
        largest = tl.max(tl.max(tl.abs(scores), 1), 0)
        size = tl.where(largest > 0, largest, 1.0)
        return sums + dot((scores / size).to(tl.float16), rows, None, B.precision) * size
    else:  # noqa: RET505
        return dot(scores.to(rows.dtype), rows, sums, B.precision)
