"""Keeps the size of an attention branch when its operator changes: the weights of kinds have different sums."""

import torch
from torch import Tensor, nn

from openclip_linattn.attention import HeadOperator
from openclip_linattn.conversion.timm_models import TimmAttention

MOST_TOKENS = 256
DRAWS = 16


def typical_sum(attention: HeadOperator, head_width: int, *, causal: bool) -> Tensor:
    """The mean sum of a row's weights for queries and keys without relation, one number per head (H,), float64.

    1 for softmax, linear and normlinearmean, N_train / 2 for normlinear (every score is 1/2 on average), rho for
    lininfsa; for infsa and neumannlinear, whose sums depend on how the scores spread, their mean over random tokens.
    """
    tokens = 2 * ((min(attention.train_tokens, MOST_TOKENS) + 1) // 2)
    generator = torch.Generator().manual_seed(0)
    q, half = torch.randn(
        2, DRAWS, attention.num_heads, tokens, head_width, generator=generator, dtype=torch.float64
    ).unbind(0)
    half = half[:, :, : tokens // 2]
    # Every second key is the one before it turned round: in the rows that see both, cosines are zero on average.
    k = torch.stack((half, -half), dim=3).flatten(2, 3)
    arguments = {
        name: value.detach().cpu().double() if isinstance(value, Tensor) else value
        for name, value in attention.operator_arguments().items()
    }
    sums = attention.operator(q, k, torch.ones_like(k[..., :1]), causal=causal, **arguments)
    return sums[:, :, 1::2, 0].mean((0, 2))


def keep_branch_size(before: HeadOperator, after: HeadOperator, *, causal: bool) -> None:
    """Folds the ratio of the typical sums of weights into the output projection's weight of `after`, in place.

    The projection's bias stays: it does not go through the attention. Where timm norms the output in between, its size
    is settled already.
    """
    projection, norm = _projection(after)
    if isinstance(norm, nn.Identity):
        width = projection.in_features // after.num_heads
        factor = typical_sum(before, width, causal=causal) / typical_sum(after, width, causal=causal)
        columns = factor.repeat_interleave(width).to(projection.weight)
        with torch.no_grad():
            projection.weight.mul_(columns)


def _projection(attention: HeadOperator) -> tuple[nn.Linear, nn.Module]:
    """The output projection, and the norm before it."""
    if isinstance(attention, TimmAttention):
        return attention.proj, attention.norm
    projection = attention.get_submodule("out_proj")
    assert isinstance(projection, nn.Linear)
    return projection, nn.Identity()
