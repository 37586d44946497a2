"""Softmax attention, the baseline."""

import torch
import torch.nn.functional as F
from torch import Tensor

from openclip_linattn.ops.inputs import full_precision, read_tokens, write_output
from openclip_linattn.ops.kernels import selectable


@selectable
def softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, key_padding_mask: Tensor | None = None
) -> Tensor:
    """Softmax attention, o_i = sum_j softmax_j(q_i.k_j / sqrt D) v_j (Vaswani et al. 2017, Eq. 1).

    Shapes: q, k (B, H, N, D), v (B, H, N, Dv), any strides; returns (B, H, N, Dv) in the dtype of v, which is
    the dtype of the computation too (PyTorch's fused kernels accumulate in float32).
    causal: row i attends to the keys up to i. key_padding_mask: bool (B, N), True = padding; padded keys get
    no weight and padded queries give zero. Raises UserError for inputs of another form.
    """
    tokens = read_tokens(q, k, v, key_padding_mask, keep_dtype=True)
    allowed = None if tokens.padding is None else _allowed(tokens.padding, causal=causal)
    with full_precision(v):
        o = F.scaled_dot_product_attention(
            tokens.q, tokens.k, tokens.v, attn_mask=allowed, is_causal=causal and allowed is None
        )
    return write_output(o, tokens)


def _allowed(padding: Tensor, *, causal: bool) -> Tensor:
    """The keys of each row, (B, 1, N, N); a row never stays without any, for its softmax would be 0/0."""
    tokens = padding.shape[-2]
    itself = torch.eye(tokens, dtype=torch.bool, device=padding.device)
    allowed = ~padding.mT | itself
    return allowed.tril() if causal else allowed
