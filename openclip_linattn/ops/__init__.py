"""The attention operators: pure functions (q, k, v, *, ...) -> o on tensors of shape (B, H, N, D).

Each kind is a fast function in a module of this package and an explicit N x N formula in `reference`. Called
without further factors, `OPERATORS[kind](q, k, v)` is the formula of that kind.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from openclip_linattn.ops.infinite import inf_attention, linear_inf_attention
from openclip_linattn.ops.linear import linear_attention
from openclip_linattn.ops.neumann import neumann_linear_attention
from openclip_linattn.ops.normalized import normalized_linear_attention
from openclip_linattn.ops.softmax import softmax_attention

Operator = Callable[..., Tensor]
"""(q, k, v, *, causal=False, key_padding_mask=None, and the kind's own factors) -> o."""

OPERATORS: dict[str, Operator] = {
    "softmax": softmax_attention,
    "linear": linear_attention,
    "linearelu": partial(linear_attention, feature_map="elu"),
    "normlinear": normalized_linear_attention,
    "normlinearmean": partial(normalized_linear_attention, length_scale="mean"),
    "infsa": inf_attention,
    "lininfsa": linear_inf_attention,
    "neumannlinear": neumann_linear_attention,
}
"""The function of every attention kind; the kinds are the suffixes of the model names."""

__all__ = [
    "OPERATORS",
    "Operator",
    "inf_attention",
    "linear_attention",
    "linear_inf_attention",
    "neumann_linear_attention",
    "normalized_linear_attention",
    "softmax_attention",
]
