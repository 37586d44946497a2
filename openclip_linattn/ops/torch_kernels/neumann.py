"""Neumann linear attention by blocks of tokens, with its gradient by hand.

With phi_i = [1, q^_i], psi_j = [1, k^_j] and x solving the system of `small_systems`, o_i = phi_i x. The state
holds what `solve_backward` needs, x among it, and the inverse norms of the rows of q and k.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from openclip_linattn.ops.layout import compute_dtype, empty_gradients, empty_output, split_gradients
from openclip_linattn.ops.small_systems import (
    SystemGradients,
    saved_shape,
    solution,
    solve_backward,
    solve_forward,
)
from openclip_linattn.ops.torch_kernels.blocks import Blocks, row_products


def forward(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
    """Return o = [(I - gamma A^)^-1 - I] V, A^ = A / max(|A|_F, 0.05 N), and the state for `backward`.

    Shapes: q, k (B, H, N, D), v (B, H, N, Dv), gamma (B or 1, H); returns (B, H, N, Dv) and a tensor of
    `state_shape(q, v)`. A = (1 + Q^ K^^T) / 2.
    """
    blocks = Blocks(q, v, scratch=3)
    o = empty_output(q, v)
    state = q.new_empty(state_shape(q, v), dtype=compute_dtype(q))
    gammas = gamma.to(state.dtype).expand(q.shape[:2])[..., None, None]
    for q_group, k_group, v_group, o_group, group_gamma, *parts in blocks.groups(
        q, k, v, o, gammas, *_split(state, q, v)
    ):
        saved, q_norms, k_norms = parts
        sums = _sum_tokens(blocks, q_group, k_group, v_group, q_norms, k_norms)
        x, kept = (y.flatten(0, 1) for y in solve_forward(*sums, q.shape[-2], group_gamma))
        saved.copy_(kept)
        for q_chunk, o_chunk, norms in blocks.chunks(q_group, o_group, q_norms):
            read = torch.bmm(blocks.read(q_chunk, 0), x[:, 1:], out=blocks.empty(o_chunk, 1))
            blocks.write(o_chunk, x[:, :1], read, norms)
    return o, state


def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, state: Tensor, gamma: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of q, k and v in one buffer of `layout.empty_gradients`, and that of gamma."""
    blocks = Blocks(q, v, scratch=4)
    gradients = empty_gradients(q, v)
    views = split_gradients(gradients, *q.shape[1::2])
    of_gamma = state.new_empty(*q.shape[:2], 1, 1)
    for do_group, q_group, group_of_gamma, *tensors in blocks.groups(
        do, q, of_gamma, k, v, *views, *_split(state, q, v)
    ):
        *tokens, saved, q_norms, k_norms = tensors
        saved = saved.view(*q_group.shape[:2], *saved.shape[1:])
        x = solution(saved, v.shape[-1]).flatten(0, 1)
        d_x = torch.zeros_like(x)
        for do_chunk, q_chunk, norms in blocks.chunks(do_group, q_group, q_norms):
            queries, of_output = blocks.scaled(q_chunk, norms, 0), blocks.read(do_chunk, 1)
            d_x[:, 1:].baddbmm_(queries.mT, of_output)
            d_x[:, :1] += of_output.sum(-2, keepdim=True)
        system = solve_backward(d_x.view(*q_group.shape[:2], *d_x.shape[1:]), saved)
        group_of_gamma.copy_(system.gamma)
        chunks = blocks.chunks(do_group, q_group, *tokens, q_norms, k_norms)
        _token_gradients(blocks, chunks, x, system)
    of_gamma = of_gamma.view(q.shape[:2]).sum_to_size(gamma.shape)
    return gradients, of_gamma.to(gamma.dtype)


def state_shape(q: Tensor, v: Tensor) -> tuple[int, ...]:
    """The shape (B, H, S) of the state: about 3 D^2 + D Dv + 2 N numbers per head."""
    batch, heads, tokens, width = q.shape
    rows, columns = saved_shape(width, v.shape[-1])
    return batch, heads, rows * columns + 2 * tokens


def _split(state: Tensor, q: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """What `solve_backward` needs, and the inverse norms of the rows of q and of k (B H, N, 1)."""
    tokens, width = q.shape[-2:]
    saved = saved_shape(width, v.shape[-1])
    kept, q_norms, k_norms = state.flatten(0, 1).split_with_sizes((saved[0] * saved[1], tokens, tokens), -1)
    return kept.view(-1, *saved), q_norms.unsqueeze(-1), k_norms.unsqueeze(-1)


def _sum_tokens(
    blocks: Blocks, q: Tensor, k: Tensor, v: Tensor, q_norms: Tensor, k_norms: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Phi^T Phi, Psi^T Psi, Psi^T Phi and Psi^T V (B', H, D + 1, ...) of a group; fills in the norms."""
    batch, heads, tokens, width = q.shape
    gram_q, gram_k, cross = q_norms.new_zeros(3, batch * heads, width + 1, width + 1)
    summed = q_norms.new_zeros(batch * heads, width + 1, v.shape[-1])
    for q_chunk, k_chunk, v_chunk, norms_of_q, norms_of_k in blocks.chunks(q, k, v, q_norms, k_norms):
        queries, keys = (
            blocks.scaled(chunk, blocks.inverse_norms(blocks.read(chunk, buffer), norms), buffer)
            for chunk, norms, buffer in ((q_chunk, norms_of_q, 0), (k_chunk, norms_of_k, 1))
        )
        values = blocks.read(v_chunk, 2)
        gram_q[:, 1:, 1:].baddbmm_(queries.mT, queries)
        gram_k[:, 1:, 1:].baddbmm_(keys.mT, keys)
        cross[:, 1:, 1:].baddbmm_(keys.mT, queries)
        summed[:, 1:].baddbmm_(keys.mT, values)
        cross[:, :1, 1:] += queries.sum(-2, keepdim=True)
        cross[:, 1:, 0] += keys.sum(-2)
        summed[:, :1] += values.sum(-2, keepdim=True)
    for gram, row in ((gram_q, cross[:, 0]), (gram_k, cross[:, :, 0])):
        gram[:, 0] = row
        gram[:, :, 0] = row
    for matrix in (gram_q, gram_k, cross):
        matrix[:, 0, 0] = tokens
    gram_q, gram_k, cross, summed = (
        x.view(batch, heads, *x.shape[1:]) for x in (gram_q, gram_k, cross, summed)
    )
    return gram_q, gram_k, cross, summed


def _token_gradients(
    blocks: Blocks, chunks: Iterator[tuple[Tensor, ...]], x: Tensor, system: SystemGradients
) -> None:
    """Write dq, dk and dv of a group.

    d phi_i = x do_i + 2 d_gram_q phi_i + d_cross^T psi_i, d psi_i = d_summed v_i + 2 d_gram_k psi_i + d_cross phi_i
    and dv_i = psi_i d_summed, of which the part of the constant 1 in phi and psi is dropped.
    """
    gram_q, gram_k, cross, summed = (y.flatten(0, 1) for y in system[:4])
    gram_q, gram_k = 2 * gram_q, 2 * gram_k
    q_row = gram_q[:, :1, 1:] + cross[:, :1, 1:]
    k_row = gram_k[:, :1, 1:] + cross[:, 1:, :1].mT
    for do, q, k, v, dq, dk, dv, q_norms, k_norms in chunks:
        queries, keys = blocks.scaled(q, q_norms, 0), blocks.scaled(k, k_norms, 1)
        d_queries = torch.baddbmm(q_row, blocks.read(do, 2), x[:, 1:].mT, out=blocks.empty(q, 3))
        d_queries.baddbmm_(queries, gram_q[:, 1:, 1:]).baddbmm_(keys, cross[:, 1:, 1:])
        along = row_products(queries, d_queries, blocks.empty(q, 2)).mul_(q_norms)
        blocks.write(dq, d_queries.mul_(q_norms), queries, along, -1)
        d_keys = torch.baddbmm(k_row, blocks.read(v, 2), summed[:, 1:].mT, out=blocks.empty(k, 3))
        d_keys.baddbmm_(keys, gram_k[:, 1:, 1:]).baddbmm_(queries, cross[:, 1:, 1:].mT)
        along = row_products(keys, d_keys, blocks.empty(k, 2)).mul_(k_norms)
        blocks.write(dk, d_keys.mul_(k_norms), keys, along, -1)
        dv.copy_(torch.baddbmm(summed[:, :1], keys, summed[:, 1:], out=blocks.empty(v, 2)).view(dv.shape))
