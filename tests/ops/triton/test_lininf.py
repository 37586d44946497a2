"""The Triton kernels of linear infinite attention against the explicit formula, on a card or interpreted."""

import pytest
import torch

pytest.importorskip("triton")

from openclip_linattn.ops.layout import split_gradients
from openclip_linattn.ops.reference import linear_inf_attention
from openclip_linattn.ops.triton_kernels import lininf

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Relative, by norm: one rounding of the result. The interpreter does not round to bfloat16 but cuts off."""
SHAPES = [  # (tokens, samples, heads, layout, widths)
    *[(1, 1, 1, "packed", (16, 16)), (15, 2, 3, "packed", (16, 16)), (16, 1, 2, "contiguous", (3, 1))],
    *[(17, 1, 1, "transposed", (24, 64)), (63, 1, 1, "packed", (64, 16)), (128, 1, 1, "packed", (128, 128))],
    *[(129, 1, 2, "transposed", (16, 16)), (300, 2, 1, "packed", (40, 24))],
]


def upstream(v, *, expanded=False):
    shape = (*v.shape[:2], 1, v.shape[-1])
    if expanded:
        return torch.ones((), device=v.device, dtype=v.dtype).expand(shape)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(v.device, v.dtype)


def by_autograd(q, k, v, do):
    leaves = [x.double().detach().requires_grad_() for x in (q, k, v)]
    o = linear_inf_attention(*leaves, rho=1.0)[:, :, :1]
    return o.detach(), *torch.autograd.grad(o, leaves, do.double())


def by_kernels(q, k, v, do):
    o, state = lininf.forward(q, k, v)
    assert state.shape == lininf.state_shape(q, v)
    return o, *split_gradients(lininf.backward(do, q, k, v, state), q.shape[1], q.shape[3])


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize(("tokens", "batch", "heads", "layout", "widths"), SHAPES, ids=str)
def test_equals_the_explicit_formula(tokens, batch, heads, layout, widths, tokens_of, device):
    q, k, v = tokens_of(layout, batch, heads, tokens, *widths, torch.float32, device)
    do = upstream(v, expanded=layout == "contiguous")
    got, expected = by_kernels(q, k, v, do), by_autograd(q, k, v, do)
    # Of one token, the weight is one whatever the score: the gradients of q and k are rounding.
    rounding = 1e-6 * do.norm() * v.norm()
    for name, a, b in zip(("o", "dq", "dk", "dv"), got, expected, strict=True):
        assert (a - b).norm() <= TOLERANCE[q.dtype] * b.norm() + rounding * (tokens == 1), name


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_loses_one_rounding(dtype, tokens_of, relative_error, device):
    q, k, v = tokens_of("packed", 1, 2, 300, 64, 64, dtype, device)
    do = upstream(v)
    for a, b in zip(by_kernels(q, k, v, do), by_autograd(q, k, v, do), strict=True):
        assert a.dtype == dtype
        assert relative_error(a, b) <= TOLERANCE[dtype]


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_without_a_positive_score_everything_is_zero(dtype, tokens_of, device):
    q, k, v = tokens_of("packed", 1, 2, 300, 16, 16, dtype, device)
    for queries, keys in ((q.abs(), -k.abs()), (torch.zeros_like(q), k)):
        assert not any(x.any() for x in by_kernels(queries, keys, v, upstream(v)))


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize(("q_size", "k_size"), [(1, 1), (1e-15, 1), (1, 1e-15)])
def test_zero_rows_and_sums_below_the_bound(q_size, k_size, tokens_of, relative_error, device):
    q, k, v = tokens_of("packed", 1, 2, 140, 16, 16, torch.float32, device)
    q[:, :, 3:7], k[:, :, 5:9] = 0, 0
    inputs = q_size * q, k_size * k, v, upstream(v)
    for a, b in zip(by_kernels(*inputs), by_autograd(*inputs), strict=True):
        assert relative_error(a, b) <= 1e-5


@pytest.mark.usefixtures("programs")
def test_equal_large_tokens_stay_exact_in_float16(device):
    x = torch.full((1, 2, 300, 64), 8.0, dtype=torch.float16, device=device)
    o, *gradients = by_kernels(x, x, x, upstream(x))
    assert torch.equal(o, torch.full_like(o, 8))
    assert all(y.isfinite().all() for y in gradients)


@pytest.mark.usefixtures("programs")
def test_two_runs_give_the_same_bits(tokens_of, device):
    q, k, v = tokens_of("packed", 2, 1, 300, 16, 16, torch.float32, device)
    for a, b in zip(*(by_kernels(q, k, v, upstream(v)) for _ in range(2)), strict=True):
        assert torch.equal(a, b)
