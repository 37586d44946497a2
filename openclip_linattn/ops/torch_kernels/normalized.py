"""Normalised linear attention (arXiv 2604.10064, Eq. 7) by blocks of tokens, with its gradient by hand.

With M = K^^T V and m = sum_j v_j the output is o_i = scale (m + q^_i M). The state holds m, M and the inverse
norms r of the rows of q and k. Unit rows are never made: r multiplies what a row is multiplied with, or the
product, so that each pass over a block does one thing more.
"""

import torch
from torch import Tensor

from openclip_linattn.ops.layout import compute_dtype, empty_gradients, empty_output, split_gradients
from openclip_linattn.ops.torch_kernels.blocks import Blocks, row_products


def forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return o_i = scale sum_j (1 + q^_i.k^_j) v_j and the state for `backward`.

    Shapes: q, k (B, H, N, D), v (B, H, N, Dv); returns (B, H, N, Dv) and a tensor of `state_shape(q, v)`.
    """
    blocks = Blocks(q, v, scratch=2)
    o = empty_output(q, v)
    state = q.new_zeros(state_shape(q, v), dtype=compute_dtype(q))
    for q_group, k_group, v_group, o_group, *saved in blocks.groups(q, k, v, o, *_split(state, q, v)):
        total, product, q_norms, k_norms = saved
        for k_chunk, v_chunk, norms in blocks.chunks(k_group, v_group, k_norms):
            keys = blocks.read(k_chunk, 0)
            values = blocks.scaled(v_chunk, blocks.inverse_norms(keys, norms), 1)
            product.baddbmm_(keys.mT, values)
            total += blocks.sum(v_chunk)
        total, product = scale * total, scale * product
        for q_chunk, o_chunk, norms in blocks.chunks(q_group, o_group, q_norms):
            queries = blocks.read(q_chunk, 0)
            read = torch.bmm(queries, product, out=blocks.empty(o_chunk, 1))
            blocks.write(o_chunk, total, read, blocks.inverse_norms(queries, norms))
    return o, state


def backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, state: Tensor, scale: float) -> Tensor:
    """Return the gradients of q, k and v in one buffer of `layout.empty_gradients`.

    With dM = sum_i q^_i^T do_i and dm = sum_i do_i: dq^_i = do_i M^T, dk^_j = v_j dM^T and
    dv_j = dm + k^_j dM, all times scale. A row x with x^ = r x has dx = y - r^2 (x.y) x, y = r dx^.
    """
    blocks = Blocks(q, v, scratch=3)
    gradients = empty_gradients(q, v)
    views = split_gradients(gradients, *q.shape[1::2])
    groups = blocks.groups(do, q, k, v, *views, *_split(state, q, v))
    for do_group, q_group, k_group, v_group, dq_group, dk_group, dv_group, *saved in groups:
        total, product, q_norms, k_norms = saved
        d_total, d_product = torch.zeros_like(total), torch.zeros_like(product)
        product = scale * product
        for do_chunk, q_chunk, dq_chunk, norms in blocks.chunks(do_group, q_group, dq_group, q_norms):
            queries, of_output = blocks.read(q_chunk, 0), blocks.scaled(do_chunk, norms, 1)
            d_product.baddbmm_(queries.mT, of_output)
            d_total += blocks.sum(do_chunk)
            d_queries = torch.bmm(of_output, product.mT, out=blocks.empty(q_chunk, 2))
            along = row_products(queries, d_queries, blocks.empty(q_chunk, 1)).mul_(norms).mul_(norms)
            blocks.write(dq_chunk, d_queries, queries, along, -1)
        d_total *= scale
        d_product *= scale
        for k_chunk, v_chunk, dk_chunk, dv_chunk, norms in blocks.chunks(
            k_group, v_group, dk_group, dv_group, k_norms
        ):
            keys = blocks.read(k_chunk, 0)
            d_values = torch.bmm(keys, d_product, out=blocks.empty(v_chunk, 1))
            blocks.write(dv_chunk, d_total, d_values, norms)
            values = blocks.scaled(v_chunk, norms, 1)
            d_keys = torch.bmm(values, d_product.mT, out=blocks.empty(k_chunk, 2))
            along = row_products(keys, d_keys, blocks.empty(k_chunk, 1)).mul_(norms).mul_(norms)
            blocks.write(dk_chunk, d_keys, keys, along, -1)
    return gradients


def state_shape(q: Tensor, v: Tensor) -> tuple[int, ...]:
    """The shape (B, H, S) of the state: Dv + D Dv + 2 N numbers per head."""
    batch, heads, tokens, width = q.shape
    return batch, heads, (width + 1) * v.shape[-1] + 2 * tokens


def _split(state: Tensor, q: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """The parts of a state: m (B H, 1, Dv), M (B H, D, Dv), the inverse norms of q and of k (B H, N, 1)."""
    tokens, width, value_width = *q.shape[-2:], v.shape[-1]
    sizes = (value_width, width * value_width, tokens, tokens)
    total, product, q_norms, k_norms = state.flatten(0, 1).split_with_sizes(sizes, -1)
    return (
        total.unsqueeze(1),
        product.view(-1, width, value_width),
        q_norms.unsqueeze(-1),
        k_norms.unsqueeze(-1),
    )
