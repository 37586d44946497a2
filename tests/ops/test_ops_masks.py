"""Causal forms do not know the future, and padding leaves every sum."""

import pytest
import torch

from openclip_linattn.ops import OPERATORS

CAUSAL = [kind for kind in OPERATORS if kind != "lininfsa"]


@pytest.mark.parametrize("seen", [1, 77, 127, 128, 129, 255])
@pytest.mark.parametrize("kind", CAUSAL)
def test_later_tokens_do_not_reach_earlier_rows(kind, seen, packed_tokens, relative_error):
    q, k, v = packed_tokens(1, 2, 300, 8)
    changed = [torch.cat([x[:, :, :seen], 30 * x[:, :, seen:] + 1], 2) for x in (q, k, v)]
    o = OPERATORS[kind](q, k, v, causal=True)[:, :, :seen]
    assert relative_error(OPERATORS[kind](*changed, causal=True)[:, :, :seen], o) <= 1e-12
    for gradient in torch.autograd.grad(o.square().sum(), (q, k, v)):
        assert not gradient[:, :, seen:].any()


@pytest.mark.parametrize("kind", CAUSAL)
def test_a_causal_prefix_is_the_whole_of_a_shorter_text(kind, packed_tokens, relative_error):
    q, k, v = packed_tokens(1, 2, 200, 8)
    short = OPERATORS[kind](q[:, :, :150], k[:, :, :150], v[:, :, :150], causal=True)
    assert relative_error(OPERATORS[kind](q, k, v, causal=True)[:, :, :150], short) <= 1e-12


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("kind", OPERATORS)
def test_padded_tokens_leave_as_if_they_were_never_there(kind, causal, packed_tokens, relative_error):
    if causal and kind not in CAUSAL:
        pytest.skip("no causal form")
    q, k, v = packed_tokens(2, 2, 140, 8)
    mask = torch.rand(1, 140, generator=torch.Generator().manual_seed(0)) < 0.4
    kept = ~mask[0]
    o = OPERATORS[kind](q, k, v, causal=causal, key_padding_mask=mask.expand(2, -1))
    short = OPERATORS[kind](q[:, :, kept], k[:, :, kept], v[:, :, kept], causal=causal)
    assert relative_error(o[:, :, kept], short) <= 1e-12
    assert not o[:, :, ~kept].any()


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("kind", OPERATORS)
def test_rubbish_in_padding_does_not_spread(kind, causal, packed_tokens):
    if causal and kind not in CAUSAL:
        pytest.skip("no causal form")
    q, k, v = packed_tokens(3, 2, 12, 4)
    mask = torch.zeros(3, 12, dtype=torch.bool)
    mask[0, :5] = True  # on the left, so that the first causal rows have no key
    mask[1, 7:] = True
    mask[2] = True
    clean = OPERATORS[kind](q, k, v, causal=causal, key_padding_mask=mask)
    dirty = [
        x.detach().masked_fill(mask[:, None, :, None], rubbish).requires_grad_()
        for x, rubbish in zip((q, k, v), (torch.nan, torch.inf, -torch.inf), strict=True)
    ]
    o = OPERATORS[kind](*dirty, causal=causal, key_padding_mask=mask)
    torch.testing.assert_close(o, clean)
    assert not o[2].any()
    for gradient in torch.autograd.grad(o.square().sum(), dirty):
        assert gradient.isfinite().all()
        assert not gradient.masked_select(mask[:, None, :, None]).any()


def test_lininfsa_refuses_the_causal_form(packed_tokens):
    with pytest.raises(ValueError, match="lininfsa has no causal form"):
        OPERATORS["lininfsa"](*packed_tokens(1, 1, 4, 4), causal=True)
