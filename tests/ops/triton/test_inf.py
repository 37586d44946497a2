"""The Triton kernels of pure infinite attention against the explicit formula, on a card or interpreted."""

import pytest
import torch

pytest.importorskip("triton")

from openclip_linattn.ops.layout import split_gradients
from openclip_linattn.ops.reference import inf_attention
from openclip_linattn.ops.triton_kernels import inf

CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 2e-2}
"""Relative, by norm: a few roundings. The interpreter does not round to bfloat16 but cuts off."""


def upstream(v, *, expanded=False):
    if expanded:
        return torch.ones((), device=v.device, dtype=v.dtype).expand(v.shape)
    return torch.randn(v.shape, generator=torch.Generator().manual_seed(1)).to(v.device, v.dtype)


def by_autograd(q, k, v, do, causal):
    leaves = [x.double().detach().requires_grad_() for x in (q, k, v)]
    o = inf_attention(*leaves, causal=causal, rho=1.0)
    return o.detach(), *torch.autograd.grad(o, leaves, do.double())


def by_kernels(q, k, v, do, causal):
    o, norm = inf.forward(q, k, v, causal)
    assert norm.shape == inf.state_shape(q, v, causal)
    gradients = inf.backward(do, q, k, v, o, norm, causal)
    return o, *split_gradients(gradients, q.shape[1], q.shape[3])


SHAPES = [  # (tokens, samples, heads, layout, widths)
    *[(1, 1, 1, "packed", (16, 16)), (15, 2, 3, "packed", (16, 16)), (16, 1, 2, "contiguous", (3, 1))],
    *[(17, 1, 1, "transposed", (24, 64)), (63, 1, 1, "packed", (64, 16)), (64, 1, 1, "packed", (16, 16))],
    *[(65, 1, 2, "transposed", (16, 16)), (128, 1, 1, "packed", (16, 16)), (130, 1, 1, "packed", (40, 24))],
]


@CAUSAL
@pytest.mark.parametrize(("tokens", "batch", "heads", "layout", "widths"), SHAPES, ids=str)
def test_equals_the_explicit_formula(tokens, batch, heads, layout, widths, causal, tokens_of, device):
    q, k, v = tokens_of(layout, batch, heads, tokens, *widths, torch.float32, device)
    do = upstream(v, expanded=layout == "contiguous")
    got, expected = by_kernels(q, k, v, do, causal), by_autograd(q, k, v, do, causal)
    # Of one token the score and its norm cancel: the gradients of q and k are rounding.
    rounding = 1e-6 * do.norm() * v.norm()
    for name, a, b in zip(("o", "dq", "dk", "dv"), got, expected, strict=True):
        assert (a - b).norm() <= TOLERANCE[q.dtype] * b.norm() + rounding * (tokens == 1), name


@CAUSAL
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_loses_a_few_roundings(dtype, width, causal, relative_error, tokens_of, device):
    q, k, v = tokens_of("packed", 1, 1, 90, width, width, dtype, device)
    do = upstream(v)
    for a, b in zip(by_kernels(q, k, v, do, causal), by_autograd(q, k, v, do, causal), strict=True):
        assert a.dtype == dtype
        assert relative_error(a, b) <= TOLERANCE[dtype]


@CAUSAL
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_without_a_positive_score_the_output_and_all_gradients_are_zero(dtype, causal, tokens_of, device):
    q, k, v = tokens_of("packed", 1, 2, 37, 16, 16, dtype, device)
    for queries, keys in ((q.abs(), -k.abs()), (torch.zeros_like(q), k)):
        assert not any(x.any() for x in by_kernels(queries, keys, v, upstream(v), causal))


@CAUSAL
def test_a_norm_below_the_bound_is_constant(causal, relative_error, tokens_of, device):
    q, k, v = tokens_of("packed", 1, 2, 5, 16, 16, torch.float32, device)
    inputs = 1e-15 * q, k, v, upstream(v), causal
    for a, b in zip(by_kernels(*inputs), by_autograd(*inputs), strict=True):
        assert relative_error(a, b) <= 1e-5


@CAUSAL
@pytest.mark.parametrize("size", [8, 200])
def test_scores_beyond_the_range_of_float16_stay_exact(size, causal, relative_error, tokens_of, device):
    q, k, v = tokens_of("packed", 1, 1, 140, 64, 64, torch.float16, device)
    inputs = size * q, size * k, v, upstream(v), causal
    for a, b in zip(by_kernels(*inputs), by_autograd(*inputs), strict=True):
        assert relative_error(a, b) <= 2e-3


@pytest.mark.parametrize("changed", [1, 63, 128])
def test_causal_rows_know_nothing_of_later_tokens(changed, tokens_of, device):
    q, k, v = tokens_of("packed", 1, 1, 140, 16, 16, torch.float32, device)
    o, _ = inf.forward(q, k, v, True)
    later = [torch.cat([x[:, :, :changed], 5 - x[:, :, changed:]], 2) for x in (q, k, v)]
    o_later, _ = inf.forward(*later, True)
    assert torch.equal(o_later[:, :, :changed], o[:, :, :changed])
    assert not torch.allclose(o_later[:, :, changed:], o[:, :, changed:])


@CAUSAL
def test_nan_is_not_hidden(causal, tokens_of, device):
    q, k, v = tokens_of("packed", 1, 1, 20, 16, 16, torch.float32, device)
    q[:, :, 3] = torch.nan
    o, *_ = by_kernels(q, k, v, upstream(v), causal)
    assert o[:, :, 3:].isnan().all()


@CAUSAL
def test_two_runs_give_the_same_bits(causal, tokens_of, device):
    q, k, v = tokens_of("packed", 1, 2, 65, 16, 16, torch.float32, device)
    for a, b in zip(*(by_kernels(q, k, v, upstream(v), causal) for _ in range(2)), strict=True):
        assert torch.equal(a, b)
