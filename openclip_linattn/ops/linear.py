"""Linear attention with a denominator."""

import torch
from torch import Tensor

from openclip_linattn.errors import UserError
from openclip_linattn.ops.inputs import (
    TINY,
    Tokens,
    check_heads,
    full_precision,
    key_counts,
    read_tokens,
    vanishing_weight,
    write_output,
)
from openclip_linattn.ops.kernels import fits, selectable
from openclip_linattn.ops.library import Definition, define
from openclip_linattn.ops.sums import summed_weights, unit, weighted_values


@selectable
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    feature_map: str = "affine",
) -> Tensor:
    """Linear attention, o_i = sum_j w_ij v_j / sum_j w_ij, in O(N D^2).

    feature_map "affine": w_ij = 1 + q^_i.k^_j with q^, k^ of length one (arXiv 2510.21956, 2604.10064);
    "elu": w_ij = phi(q_i).phi(k_j) with phi(x) = elu(x) + 1 (Katharopoulos et al. 2020, Eq. 7).

    Shapes: q, k (B, H, N, D), v (B, H, N, Dv), any strides; returns (B, H, N, Dv) in the dtype of v. Sums
    over tokens are taken in float32 (float64 for float64 inputs), under autocast too.
    causal: row i attends to the keys up to i. key_padding_mask: bool (B, N), True = padding; padded keys get
    no weight and padded queries give zero. A row whose affine weights all vanish (q opposite to every key)
    gives zero with zero gradient: see `vanishing_weight`. Raises UserError for inputs of another form.
    """
    check_feature_map(feature_map)
    check_heads(q, k, v)
    if feature_map == "affine" and not causal and key_padding_mask is None and fits(q, k, v):
        return _bidirectional(q, k, v)[0]
    with full_precision(v):
        return _plain(read_tokens(q, k, v, key_padding_mask), causal=causal, feature_map=feature_map)


def check_feature_map(feature_map: str) -> None:
    """Raise UserError unless the name is one of the feature maps of linear attention."""
    if feature_map not in ("affine", "elu"):
        raise UserError(f"feature_map must be 'affine' or 'elu', got {feature_map!r}")


def elu_feature(x: Tensor) -> Tensor:
    """The feature map elu(x) + 1, that is x + 1 for x > 0 and exp(x) otherwise."""
    # elu(x) + 1 as written loses every digit of exp(x) from x = -17 (float32) on; the clamp keeps the unused
    # branch from overflowing, which would turn its zero gradient into NaN.
    return torch.where(x > 0, x + 1, x.clamp_max(0).exp())


def _plain(tokens: Tokens, *, causal: bool, feature_map: str) -> Tensor:
    if feature_map == "affine":
        phi_q, phi_k, offset = unit(tokens.q), unit(tokens.k), 1.0
        smallest = vanishing_weight(phi_q.dtype) * key_counts(tokens, causal=causal)
    else:
        phi_q, phi_k, offset = elu_feature(tokens.q), elu_feature(tokens.k), 0.0
        phi_k = phi_k if tokens.padding is None else phi_k.masked_fill(tokens.padding, 0)
        smallest = phi_q.new_zeros(())
    if causal:
        # The sum of the weights is one more column of values, so that the scores are made once.
        ones = tokens.present.expand(*phi_k.shape[:2], -1, 1)
        sums = weighted_values(phi_q, phi_k, torch.cat([tokens.v, ones], -1), offset=offset, causal=True)
        o, total = sums[..., :-1], sums[..., -1:]
    else:
        o = weighted_values(phi_q, phi_k, tokens.v, offset=offset, causal=False)
        total = summed_weights(phi_q, phi_k, tokens.present, offset=offset)
    return write_output(o * ((total > smallest).to(total.dtype) / total.clamp_min(TINY)), tokens)


_bidirectional = define(
    Definition(
        name="linear",
        plain=lambda q, k, v: _plain(read_tokens(q, k, v, None), causal=False, feature_map="affine"),
        # The sums of weights (N D) are matrix-vector products.
        forward_macs=lambda tokens, width, value_width: 2 * tokens * width * value_width,
        backward_macs=lambda tokens, width, value_width: 4 * tokens * width * value_width,
    )
)
