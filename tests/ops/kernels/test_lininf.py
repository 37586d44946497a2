"""Linear infinite attention in chunks of tokens against its explicit formula."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from openclip_linattn.ops.layout import split_gradients
from openclip_linattn.ops.reference import linear_inf_attention
from openclip_linattn.ops.torch_kernels import lininf


def upstream(v, *, expanded=False):
    if expanded:
        return torch.ones((), dtype=v.dtype).expand(*v.shape[:2], 1, v.shape[-1])
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*v.shape[:2], 1, v.shape[-1], generator=generator, dtype=torch.float64).to(v.dtype)


def by_autograd(q, k, v, do):
    leaves = [x.double().detach().requires_grad_() for x in (q, k, v)]
    o = linear_inf_attention(*leaves, rho=1.0)[:, :, :1]
    return o.detach(), *torch.autograd.grad(o, leaves, do.double())


def by_chunks(q, k, v, do):
    o, state = lininf.forward(q, k, v)
    return o, *split_gradients(lininf.backward(do, q, k, v, state), q.shape[1], q.shape[3])


def compare(got, expected, relative_error, tolerance):
    # Of one token, the weight is one whatever the score: the gradients of q and k are rounding.
    rounding = expected[3].norm() * tolerance
    for name, a, b in zip(("o", "dq", "dk", "dv"), got, expected, strict=True):
        assert relative_error(a, b) <= tolerance or (a - b).norm() <= rounding, name


@pytest.mark.parametrize("expanded", [False, True], ids=["do", "expanded-do"])
@pytest.mark.parametrize(
    ("layout", "heads", "widths"),
    [("contiguous", 1, (1, 1)), ("packed", 3, (16, 16)), ("transposed", 1, (33, 7)), ("packed", 1, (33, 64))],
    ids=str,
)
@pytest.mark.parametrize("tokens", [1, 5, 63, 64, 65, 128, 300])
def test_equals_the_explicit_formula(
    tokens, layout, heads, widths, expanded, monkeypatch, relative_error, tokens_of
):
    monkeypatch.setattr(lininf, "TOKENS", 64)
    q, k, v = tokens_of(layout, 2, heads, tokens, *widths)
    do = upstream(v, expanded=expanded)
    compare(by_chunks(q, k, v, do), by_autograd(q, k, v, do), relative_error, 1e-10)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float16, 1e-3), (torch.bfloat16, 8e-3)], ids=str
)
def test_loses_one_rounding_in_a_lower_precision(dtype, tolerance, relative_error, tokens_of):
    q, k, v = tokens_of("packed", 2, 3, 1030, 64, 64, dtype)
    do = upstream(v)
    got = by_chunks(q, k, v, do)
    assert {x.dtype for x in got} == {dtype}
    compare(got, by_autograd(q, k, v, do), relative_error, tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_without_a_positive_score_everything_is_zero(dtype, tokens_of):
    q, k, v = tokens_of("packed", 1, 2, 37, 16, 16, dtype)
    for queries, keys in ((q.abs(), -k.abs()), (torch.zeros_like(q), k)):
        assert not any(x.any() for x in by_chunks(queries, keys, v, upstream(v)))


def test_zero_rows_have_the_gradients_of_the_formula(relative_error, tokens_of):
    q, k, v = tokens_of("packed", 1, 2, 37, 16, 16)
    q[:, :, 3:7], k[:, :, 5:9] = 0, 0
    compare(by_chunks(q, k, v, upstream(v)), by_autograd(q, k, v, upstream(v)), relative_error, 1e-10)


@pytest.mark.parametrize(("q_size", "k_size"), [(1e-14, 1), (1e-3, 1e-13), (1e-14, 1e-3)])
def test_a_sum_below_the_bound_is_constant(q_size, k_size, relative_error, tokens_of):
    q, k, v = tokens_of("packed", 1, 2, 5, 4, 4)
    inputs = q_size * q, k_size * k, v, upstream(v)
    got, expected = by_chunks(*inputs), by_autograd(*inputs)
    for a, b in zip(got, expected, strict=True):
        assert relative_error(a, b) <= 1e-10


def test_equal_large_tokens_stay_finite_in_float16():
    x = torch.full((1, 2, 1030, 64), 8.0, dtype=torch.float16)
    o, *gradients = by_chunks(x, x, x, upstream(x))
    assert torch.equal(o, torch.full_like(o, 8))
    assert all(y.isfinite().all() for y in gradients)


def test_every_number_of_the_gradients_is_written(monkeypatch, tokens_of):
    original = lininf.empty_gradients
    monkeypatch.setattr(lininf, "empty_gradients", lambda *inputs: original(*inputs).fill_(torch.nan))
    q, k, v = tokens_of("packed", 2, 3, 530, 16, 7)
    assert all(x.isfinite().all() for x in by_chunks(q, k, v, upstream(v)))


class Wide(TorchDispatchMode):
    """Records the biggest number of float32 elements that an operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.dtype == torch.float32:
                self.elements = max(self.elements, x.numel())
        return out


def test_half_precision_is_never_widened_as_a_whole(tokens_of):
    q, k, v = tokens_of("packed", 2, 2, 2048, 16, 16, torch.bfloat16)
    do = upstream(v)
    with Wide() as recorded:
        by_chunks(q, k, v, do)
    assert 0 < recorded.elements <= 2 * lininf.TOKENS * 16


def test_the_shape_of_the_state_is_known_beforehand(tokens_of):
    q, k, v = tokens_of("packed", 2, 3, 5, 16, 7)
    assert lininf.forward(q, k, v)[1].shape == lininf.state_shape(q, v)
