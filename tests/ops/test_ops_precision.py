"""Half precision, autocast and hostile magnitudes, all measured against float64."""

from contextlib import nullcontext
from math import isfinite

import pytest
import torch

from openclip_linattn.ops import OPERATORS
from openclip_linattn.ops.reference import REFERENCES

FORMS = [
    pytest.param(kind, causal, id=f"{kind}-causal" if causal else kind)
    for kind in OPERATORS
    for causal in (False, True)
    if (kind, causal) != ("lininfsa", True)
]
HALVES = [torch.float16, torch.bfloat16]


def with_gradients(function, q, k, v, context=None, **options):
    """The output and the gradients of its scaled sum of squares, in float64."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    with context or nullcontext():
        o = function(*leaves, **options)
    size = max(1.0, o.detach().double().norm().item())
    # Divided by N and by the size of the output, so that the gradient itself fits into float16.
    gradients = torch.autograd.grad(o, leaves, o.detach() / size / o.shape[2])
    return [x.detach().double() for x in (o, *gradients)]


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize(("tokens", "width"), [(77, 64), (197, 16)])
@pytest.mark.parametrize(("kind", "causal"), FORMS)
def test_is_as_precise_as_the_formula_in_the_same_dtype(
    kind, causal, tokens, width, dtype, packed_tokens, relative_error
):
    inputs = packed_tokens(2, 2, tokens, width, dtype)
    exact = with_gradients(REFERENCES[kind], *(x.double() for x in inputs), causal=causal)
    fast = with_gradients(OPERATORS[kind], *inputs, causal=causal)
    plain = with_gradients(REFERENCES[kind], *inputs, causal=causal)
    # Where the formula is exact to rounding, or NaN (1e-12 is zero in float16), rounding is the bound.
    rounding = (32 if dtype == torch.float32 else 4) * torch.finfo(dtype).eps
    for name, factor, a, b, c in zip(("o", "dq", "dk", "dv"), (2, 3, 3, 3), fast, plain, exact, strict=True):
        allowed = factor * relative_error(b, c)
        assert relative_error(a, c) <= (max(allowed, rounding) if isfinite(allowed) else rounding), name


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("backward_inside", [False, True], ids=["backward-outside", "backward-inside"])
@pytest.mark.parametrize(("kind", "causal"), FORMS)
def test_autocast_does_not_touch_float32_inputs(
    kind, causal, backward_inside, dtype, packed_tokens, relative_error
):
    q, k, v = packed_tokens(2, 2, 77, 16, torch.float32)
    expected_o = OPERATORS[kind](q, k, v, causal=causal)
    expected = torch.autograd.grad(expected_o.square().sum(), (q, k, v))
    with torch.autocast("cpu", dtype=dtype):
        o = OPERATORS[kind](q, k, v, causal=causal)
        if backward_inside:
            gradients = torch.autograd.grad(o.square().sum(), (q, k, v))
    if not backward_inside:
        gradients = torch.autograd.grad(o.square().sum(), (q, k, v))
    assert o.dtype == torch.float32
    for a, b in zip((o, *gradients), (expected_o, *expected), strict=True):
        assert relative_error(a, b) <= 1e-6


def hostile_tokens(name, tokens, dtype):
    generator = torch.Generator().manual_seed(tokens)
    q, k, v = torch.randn(3, 1, 2, tokens, 64, generator=generator, dtype=torch.float64)
    if name == "x30":
        return (30 * q).to(dtype), (30 * k).to(dtype), (v + 1).to(dtype)
    return torch.full_like(q, 8, dtype=dtype), torch.full_like(k, 8, dtype=dtype), (v + 1).to(dtype)


def centred(x):
    return x - x.mean(-2, keepdim=True)


@pytest.mark.parametrize("context", ["plain", "autocast"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("tokens", [197, 577, 1025])
@pytest.mark.parametrize("name", ["q=k=8", "x30"])
@pytest.mark.parametrize("kind", OPERATORS)
def test_large_tokens_in_half_precision(kind, name, tokens, dtype, context, relative_error):
    """Outputs within 1e-2 by norm, and the token-centred part no worse than rounding the exact output.

    At 1025 random tokens and values of mean 1, that rounding alone takes half of the centred part of linear
    attention in bfloat16 and 6 % in float16 (1 % and 0.2 % for values of mean 0; for the Neumann series 20 %
    and 3 %). Of identical tokens the centred part is zero, and what is left is the rounding of the mean.
    """
    q, k, v = hostile_tokens(name, tokens, dtype)
    autocast = torch.autocast("cpu", dtype=dtype) if context == "autocast" else None
    fast = with_gradients(OPERATORS[kind], q, k, v, autocast)
    exact = with_gradients(OPERATORS[kind], q.double(), k.double(), v.double())
    assert all(x.isfinite().all() for x in fast)
    assert relative_error(fast[0], exact[0]) <= 1e-2
    rounding = (centred(exact[0].to(dtype).double()) - centred(exact[0])).norm()
    added = (centred(fast[0]) - centred(exact[0])).norm()
    # infsa rounds twice: its factor rho is applied to the rounded hop. Independent errors add by squares.
    roundings = 2**0.5 if kind == "infsa" else 1
    assert added <= 1.2 * roundings * rounding + 1e-6 * exact[0].norm()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("kind", [kind for kind in OPERATORS if kind != "lininfsa"])
def test_large_tokens_in_half_precision_causal(kind, dtype, relative_error):
    q, k, v = hostile_tokens("q=k=8", 577, dtype)
    fast = with_gradients(OPERATORS[kind], q, k, v, causal=True)
    exact = with_gradients(OPERATORS[kind], q.double(), k.double(), v.double(), causal=True)
    assert all(x.isfinite().all() for x in fast)
    assert relative_error(fast[0], exact[0]) <= 1e-2


def test_the_length_scale_is_applied_before_the_cast_to_float16():
    """1025 values of 100 sum to more than float16 holds; scaled by 197 / 1025 they fit."""
    x = torch.full((1, 1, 1025, 8), 100.0, dtype=torch.float16)
    o = OPERATORS["normlinear"](x, x, x, length_scale="train", train_tokens=197)
    torch.testing.assert_close(o, torch.full_like(o, 19700.0), rtol=1e-3, atol=0)


@pytest.mark.parametrize("kind", ["linear", "linearelu", "normlinearmean", "neumannlinear", "lininfsa"])
def test_long_sums_of_identical_tokens_keep_float32_precision(kind, relative_error):
    generator = torch.Generator().manual_seed(0)
    token = torch.randn(1, 1, 1, 16, generator=generator).expand(-1, -1, 65_537, -1)
    v = torch.randn(1, 1, 65_537, 2, generator=generator) + 1
    exact = OPERATORS[kind](token.double(), token.double(), v.double())
    assert relative_error(OPERATORS[kind](token, token, v), exact) <= 1e-5
