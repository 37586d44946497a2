"""One hop of pure infinite self-attention in blocks of rows and keys: quadratic time, linear memory.

A block of scores is made, used and overwritten while it is in the cache; the backward pass makes it again.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from openclip_linattn.ops.inputs import TINY
from openclip_linattn.ops.layout import compute_dtype, empty_gradients, empty_output, split_gradients

ROWS = 128
"""Rows of a block."""
KEYS = 512
"""Keys of a block."""
SCORES = 160 * 1024
"""Scores made at a time: as many heads are taken together as fit, so that few tokens need few calls."""


def state_shape(q: Tensor, v: Tensor, causal: bool) -> tuple[int, ...]:  # noqa: ARG001
    """The shape of the norms: one per row if causal, else one per head."""
    return (*q.shape[:2], q.shape[2] if causal else 1, 1)


def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Return o_i = sum_j A_ij v_j / F and F = max(|A|_F, 1e-12), A = ReLU(Q K^T) (arXiv 2603.00175).

    Shapes: q, k (B, H, N, D), v (B, H, N, Dv), any strides; o (B, H, N, Dv), F (B, H, 1, 1).
    causal: A is lower triangular and F_i the norm of its leading i x i block, (B, H, N, 1).
    """
    o = empty_output(q, v)
    norm = torch.empty(state_shape(q, v, causal), dtype=compute_dtype(q), device=q.device)
    for heads in _head_groups(q):
        _forward(q[heads], k[heads], v[heads], o[heads], norm[heads], causal)
    return o, norm


def backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, norm: Tensor, causal: bool) -> Tensor:
    """Return the gradients of q, k and v, in the buffer of `empty_gradients`, for the gradient do of o.

    The gradient of the norm reaches A_rj as A_rj sum_i dF_i / F_i, over the rows i whose norm contains row r,
    and F_i dF_i = -do_i.o_i needs no scores.
    """
    gradients = empty_gradients(q, v)
    dq, dk, dv = split_gradients(gradients, q.shape[1], q.shape[3])
    for heads in _head_groups(q):
        slope = _slope_of_norm(do[heads], o[heads], norm[heads], causal)
        out = dq[heads], dk[heads], dv[heads]
        _backward(do[heads], q[heads], k[heads], v[heads], norm[heads], slope, out, causal)
    return gradients


def _forward(q: Tensor, k: Tensor, v: Tensor, o: Tensor, norm: Tensor, causal: bool) -> None:
    heads, tokens, _ = q.shape
    total = norm.new_zeros(heads, tokens, v.shape[-1])
    squares = norm.new_zeros(heads, tokens, 1)
    buffer = _score_buffer(q, norm.dtype)
    for rows in _blocks(tokens, ROWS):
        q_rows = q[:, rows].to(norm.dtype)
        for keys in _visible_keys(rows, tokens, causal):
            scores = _scores(q_rows, k[:, keys].to(norm.dtype), rows, keys, causal, out=buffer)
            total[:, rows].baddbmm_(scores, v[:, keys].to(norm.dtype))
            squares[:, rows] += torch.linalg.vector_norm(scores, dim=-1, keepdim=True).square_()
    squares = squares.cumsum(1) if causal else squares.sum(1, keepdim=True)
    norm.copy_(squares.sqrt_().clamp_min_(TINY))
    o.copy_(total.div_(norm))


def _backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    norm: Tensor,
    slope: Tensor,
    out: tuple[Tensor, Tensor, Tensor],
    causal: bool,
) -> None:
    dtype, tokens = norm.dtype, q.shape[1]
    dq, dk, dv = out
    dk_sum, dv_sum = (norm.new_zeros(x.shape) for x in (k, v))
    buffer, d_buffer = _score_buffer(q, dtype), _score_buffer(q, dtype)
    for rows in _blocks(tokens, ROWS):
        q_rows = q[:, rows].to(dtype)
        d_total = do[:, rows].to(dtype) / (norm[:, rows] if causal else norm)
        dq_rows = torch.zeros_like(q_rows, memory_format=torch.contiguous_format)
        for keys in _visible_keys(rows, tokens, causal):
            k_keys, v_keys = k[:, keys].to(dtype), v[:, keys].to(dtype)
            scores = _scores(q_rows, k_keys, rows, keys, causal, out=buffer)
            dv_sum[:, keys].baddbmm_(scores.mT, d_total)
            d_scores = torch.bmm(d_total, v_keys.mT, out=d_buffer[: scores.numel()].view_as(scores))
            d_scores.addcmul_(scores, slope[:, rows] if causal else slope)
            torch.ops.aten.threshold_backward.grad_input(d_scores, scores, 0, grad_input=d_scores)
            dq_rows.baddbmm_(d_scores, k_keys)
            dk_sum[:, keys].baddbmm_(d_scores.mT, q_rows)
        dq[:, rows] = dq_rows
    dk.copy_(dk_sum)
    dv.copy_(dv_sum)


def _slope_of_norm(do: Tensor, o: Tensor, norm: Tensor, causal: bool) -> Tensor:
    """What a score's own value is multiplied with in its gradient, (heads, 1 or N, 1)."""
    aligned = norm.new_empty(*o.shape[:2], 1)
    for rows in _blocks(o.shape[1], ROWS):
        aligned[:, rows] = (do[:, rows].to(norm.dtype) * o[:, rows]).sum(-1, keepdim=True)
    aligned = aligned if causal else aligned.sum(1, keepdim=True)
    # A clamped norm is constant.
    slope = torch.where(norm > TINY, -aligned / norm / norm, 0)
    return slope.flip(1).cumsum(1).flip(1) if causal else slope


def _scores(q_rows: Tensor, k_keys: Tensor, rows: slice, keys: slice, causal: bool, *, out: Tensor) -> Tensor:
    """The block of A for some rows and keys, written into the buffer `out`."""
    shape = (*q_rows.shape[:2], k_keys.shape[1])
    scores = torch.bmm(q_rows, k_keys.mT, out=out[: shape[0] * shape[1] * shape[2]].view(shape)).relu_()
    if causal and keys.stop > rows.start + 1:
        scores.tril_(rows.start - keys.start)
    return scores


def _score_buffer(q: Tensor, dtype: torch.dtype) -> Tensor:
    heads, tokens, _ = q.shape
    return torch.empty(heads * min(ROWS, tokens) * min(KEYS, tokens), dtype=dtype, device=q.device)


def _head_groups(q: Tensor) -> Iterator[tuple[int, slice]]:
    """Indices of (B, H, ...) that take heads of one sample whose blocks of scores fit into one buffer."""
    batch, heads, tokens, _ = q.shape
    together = max(1, SCORES // (min(ROWS, tokens) * min(KEYS, tokens)))
    for sample in range(batch):
        for group in _blocks(heads, together):
            yield sample, group


def _blocks(length: int, most: int) -> Iterator[slice]:
    """Even pieces: a short last one would cost as many calls as a full one."""
    size = -(-length // -(-length // most))
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


def _visible_keys(rows: slice, tokens: int, causal: bool) -> Iterator[slice]:
    """The blocks of keys that some of the rows may attend to."""
    yield from _blocks(rows.stop if causal else tokens, KEYS)
