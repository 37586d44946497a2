"""Linear attention with a denominator (arXiv 2510.21956) by blocks of tokens, with its gradient by hand.

With M = K^^T V, m = sum_j v_j and s = sum_j k^_j the output is o_i = w_i (m + q^_i M), where
w_i = 1 / (N + q^_i.s) or, for a row without weight, zero. The state holds m, M, s, the inverse norms r of the rows
of q and k, and q^_i.s. As in `normalized`, unit rows are never made.
"""

import torch
from torch import Tensor

from openclip_linattn.ops.inputs import TINY, vanishing_weight
from openclip_linattn.ops.layout import compute_dtype, empty_gradients, empty_output, split_gradients
from openclip_linattn.ops.torch_kernels.blocks import Blocks, row_products


def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return o_i = sum_j (1 + q^_i.k^_j) v_j / sum_j (1 + q^_i.k^_j) and the state for `backward`.

    Shapes: q, k (B, H, N, D), v (B, H, N, Dv); returns (B, H, N, Dv) and a tensor of `state_shape(q, v)`. Rows
    that are left without weight give zero: see `vanishing_weight`.
    """
    blocks = Blocks(q, v, scratch=2)
    o = empty_output(q, v)
    state = q.new_zeros(state_shape(q, v), dtype=compute_dtype(q))
    for q_group, k_group, v_group, o_group, *saved in blocks.groups(q, k, v, o, *_split(state, q, v)):
        total, product, key_sum, q_norms, k_norms, sums = saved
        for k_chunk, v_chunk, norms in blocks.chunks(k_group, v_group, k_norms):
            keys = blocks.read(k_chunk, 0)
            blocks.inverse_norms(keys, norms)
            # Sums, not products with a row: those add up one token after the other, which costs two digits.
            key_sum += torch.mul(keys, norms, out=blocks.empty(k_chunk, 1)).sum(-2, keepdim=True)
            product.baddbmm_(keys.mT, blocks.scaled(v_chunk, norms, 1))
            total += blocks.sum(v_chunk)
        for q_chunk, o_chunk, norms, row_sums in blocks.chunks(q_group, o_group, q_norms, sums):
            queries = blocks.read(q_chunk, 0)
            blocks.inverse_norms(queries, norms)
            row_sums.copy_(row_products(queries, key_sum, blocks.empty(q_chunk, 1)).mul_(norms))
            inverse = _inverse_weights(row_sums, q.shape[-2])
            read = torch.bmm(queries, product, out=blocks.empty(o_chunk, 1)).mul_(inverse * norms)
            blocks.write(o_chunk, read, total, inverse)
    return o, state


def backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, state: Tensor) -> Tensor:
    """Return the gradients of q, k and v in one buffer of `layout.empty_gradients`.

    With g_i = w_i do_i and h_i = -w_i g_i.(m + q^_i M), the gradients of numerator and denominator, and
    dM = sum_i q^_i^T g_i, dm = sum_i g_i, ds = sum_i h_i q^_i: dq^_i = g_i M^T + h_i s,
    dk^_j = v_j dM^T + ds and dv_j = dm + k^_j dM. A row x with x^ = r x has dx = y - r^2 (x.y) x, y = r dx^.
    """
    blocks = Blocks(q, v, scratch=3)
    gradients = empty_gradients(q, v)
    views = split_gradients(gradients, *q.shape[1::2])
    groups = blocks.groups(do, q, k, v, *views, *_split(state, q, v))
    for do_group, q_group, k_group, v_group, dq_group, dk_group, dv_group, *saved in groups:
        total, product, key_sum, q_norms, k_norms, sums = saved
        d_total, d_product, d_key_sum = (torch.zeros_like(x) for x in (total, product, key_sum))
        for do_chunk, q_chunk, dq_chunk, norms, row_sums in blocks.chunks(
            do_group, q_group, dq_group, q_norms, sums
        ):
            inverse = _inverse_weights(row_sums, q.shape[-2])
            queries, of_values = blocks.read(q_chunk, 0), blocks.scaled(do_chunk, inverse, 1)
            d_total += of_values.sum(-2, keepdim=True)
            of_weights = row_products(of_values, total, blocks.empty(do_chunk, 2))
            of_values *= norms
            d_product.baddbmm_(queries.mT, of_values)
            d_queries = torch.bmm(of_values, product.mT, out=blocks.empty(q_chunk, 2))
            along = row_products(queries, d_queries, blocks.empty(q_chunk, 1))
            of_weights = of_weights.add_(along).mul_(inverse).neg_()
            through_weights = of_weights * norms
            d_key_sum += torch.mul(queries, through_weights, out=blocks.empty(q_chunk, 1)).sum(
                -2, keepdim=True
            )
            d_queries.addcmul_(through_weights, key_sum)
            along.addcmul_(of_weights, row_sums).mul_(norms).mul_(norms)
            blocks.write(dq_chunk, d_queries, queries, along, -1)
        for k_chunk, v_chunk, dk_chunk, dv_chunk, norms in blocks.chunks(
            k_group, v_group, dk_group, dv_group, k_norms
        ):
            keys = blocks.read(k_chunk, 0)
            d_values = torch.bmm(keys, d_product, out=blocks.empty(v_chunk, 1))
            blocks.write(dv_chunk, d_total, d_values, norms)
            d_keys = torch.mul(norms, d_key_sum, out=blocks.empty(k_chunk, 2))
            d_keys.baddbmm_(blocks.scaled(v_chunk, norms, 1), d_product.mT)
            along = row_products(keys, d_keys, blocks.empty(k_chunk, 1)).mul_(norms).mul_(norms)
            blocks.write(dk_chunk, d_keys, keys, along, -1)
    return gradients


def state_shape(q: Tensor, v: Tensor) -> tuple[int, ...]:
    """The shape (B, H, S) of the state: Dv + D Dv + D + 3 N numbers per head."""
    batch, heads, tokens, width = q.shape
    return batch, heads, (width + 1) * v.shape[-1] + width + 3 * tokens


def _split(state: Tensor, q: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """m (B H, 1, Dv), M (B H, D, Dv), s (B H, 1, D); inverse norms of q and k, and q^_i.s (B H, N, 1)."""
    tokens, width, value_width = *q.shape[-2:], v.shape[-1]
    sizes = (value_width, width * value_width, width, tokens, tokens, tokens)
    total, product, key_sum, *rows = state.flatten(0, 1).split_with_sizes(sizes, -1)
    return (
        total.unsqueeze(1),
        product.view(-1, width, value_width),
        key_sum.unsqueeze(1),
        *(x.unsqueeze(-1) for x in rows),
    )


def _inverse_weights(row_sums: Tensor, tokens: int) -> Tensor:
    """w (G, L, 1) from q^_i.s; zero for a row without weight."""
    weights = row_sums + tokens
    present = weights > tokens * vanishing_weight(weights.dtype)
    return present / weights.clamp_min_(TINY)
