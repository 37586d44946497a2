"""N x N masks are read as causal order and padding, or refused."""

import pytest
import torch

from openclip_linattn.conversion.masks import read_mask
from openclip_linattn.errors import UserError

N = 7
PADDING = torch.zeros(2, N, dtype=torch.bool)
PADDING[0, 5:] = True
PADDING[1, :2] = True


def visible(*, causal: bool, padded: bool) -> torch.Tensor:
    mask = torch.ones(2, 1, N, N, dtype=torch.bool)
    if padded:
        mask = mask & ~PADDING[:, None, None, :]
    return mask.tril() if causal else mask


def as_bias(mask: torch.Tensor, hidden: float) -> torch.Tensor:
    return torch.zeros(mask.shape).masked_fill(~mask, hidden)


@pytest.mark.parametrize("hidden", [None, -torch.inf, torch.finfo(torch.float16).min])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_causal_order_and_padding_are_found(causal, padded, hidden):
    mask = visible(causal=causal, padded=padded)
    for heads in (1, 3):
        given = mask.expand(2, heads, N, N)
        given = given if hidden is None else as_bias(given, hidden)
        order, padding = read_mask(given, 2)
        assert order is causal
        assert (padding is None) == (not padded)
        if padded:
            assert torch.equal(padding, PADDING)


def test_one_mask_serves_a_batch():
    assert read_mask(torch.ones(N, N).tril().log(), 4) == (True, None)
    mask = visible(causal=False, padded=True)[:1]
    assert torch.equal(read_mask(mask, 4)[1], PADDING[:1].expand(4, N))


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(N, N, dtype=torch.bool).triu(),
        torch.ones(N, N, dtype=torch.bool).tril().triu(-2),
        torch.zeros(N, N).fill_diagonal_(-torch.inf),
        torch.zeros(N, N).fill_diagonal_(-3.0),
        torch.zeros(N, N).fill_diagonal_(torch.nan),
        torch.ones(N, N, dtype=torch.long),
        torch.zeros(N, N - 1),
        torch.zeros(2, N),
        visible(causal=False, padded=True) | PADDING[:, None, :, None],
        torch.cat((visible(causal=True, padded=False), visible(causal=False, padded=False)), 1),
        "causal",
    ],
    ids=range(11),
)
def test_other_masks_are_refused(mask):
    with pytest.raises(UserError, match="mask"):
        read_mask(mask, 2)
