"""Normalised linear attention and linear attention as Triton kernels against their N x N formulas in float64."""

import pytest
import torch

from openclip_linattn.ops.layout import split_gradients
from openclip_linattn.ops.reference import linear_attention, normalized_linear_attention

# In float16 the interpreter warns of padded rows too, which are not written.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")

KINDS = ("normalized", "linear")
# The most tokens of a head that keeps no state, and how its tokens may be shared out among programs.
DESIGNS = {"recomputed": None, "saved": (1, 1), "split": (10**6, 64)}
SCALE = 0.02


def call(module, q, k, v, do):
    factors = (SCALE,) if module.__name__.endswith("normalized") else ()
    o, state = module.forward(q, k, v, *factors)
    assert state.shape == module.state_shape(q, v)
    gradients = module.backward(do, q, k, v, state, *factors)
    batch, heads, tokens, width = q.shape
    assert gradients.shape == (batch, tokens, heads * (2 * width + v.shape[-1]))
    assert gradients.dtype == q.dtype
    return o, *split_gradients(gradients, heads, width)


def formula(module, q, k, v, do):
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    if module.__name__.endswith("normalized"):
        o = normalized_linear_attention(q, k, v, scale=2 * SCALE)
    else:
        o = linear_attention(q, k, v)
    return o, *torch.autograd.grad(o, (q, k, v), do.double())


@pytest.fixture(params=KINDS)
def module(request, kernel_module):
    return kernel_module(request.param)


@pytest.fixture(params=DESIGNS)
def design(request, kernel_module, monkeypatch):
    affine, chunks = kernel_module("affine"), kernel_module("chunks")
    if DESIGNS[request.param] is not None:
        programs, shortest = DESIGNS[request.param]
        monkeypatch.setattr(affine, "RECOMPUTED_TOKENS", 0)
        limits = chunks.Limits(programs=programs, shortest=shortest, longest=10**9)
        monkeypatch.setattr(chunks, "LIMITS", limits)
    return request.param


@pytest.fixture
def inputs(device):
    """q, k and v as views of one packed projection (B, N, 2 H D + H Dv), and the gradient of the output."""

    def make(batch, heads, tokens, d, dv=None, dtype=torch.float32, seed=0):
        dv = dv or d
        generator = torch.Generator().manual_seed(seed)
        packed = torch.randn(batch, tokens, heads * (2 * d + dv), generator=generator).to(device, dtype)
        do = torch.randn(batch, tokens, heads, dv, generator=generator).to(device, dtype)
        return *split_gradients(packed, heads, d), do.transpose(1, 2)

    return make


@pytest.fixture
def check(tolerance):
    def compare(module, q, k, v, do, times=1):
        got, expected = call(module, q, k, v, do), formula(module, q, k, v, do)
        for name, x, y in zip(("o", "dq", "dk", "dv"), got, expected, strict=True):
            assert x.dtype == v.dtype
            # For a single token or a width of one the gradients of q and k are differences of equal numbers.
            terms = do.double().norm() * v.double().norm()
            size = y.norm() if y.norm() > 1e-9 * terms else terms
            assert (x.double() - y).norm() <= times * tolerance[v.dtype] * size, name

    return compare


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 63, 65, 128, 130])
def test_lengths(module, inputs, check, tokens):
    check(module, *inputs(1, 1, tokens, 16))


# The programs of a split head take 128 tokens each, the last one what is left.
@pytest.mark.parametrize("tokens", [1, 127, 129, 256, 300])
def test_designs(module, design, inputs, check, tokens):
    check(module, *inputs(1, 2, tokens, 16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_designs_in_half_precision(module, design, inputs, check, dtype):
    check(module, *inputs(1, 2, 133, 64, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("d", "dv"), [(1, 1), (8, 8), (24, 24), (64, 64), (80, 80), (128, 128), (24, 40), (65, 7)]
)
def test_widths(module, inputs, check, d, dv, dtype):
    check(module, *inputs(1, 1, 37, d, dv, dtype))


def copied(x):
    return x.contiguous()


def columns_apart(x):
    return x.contiguous().mT.contiguous().mT


def one_number(x):
    return x[:1, :1, :1, :1].expand_as(x)


def one_row(x):
    return x[:, :, :1].expand_as(x)


@pytest.mark.parametrize("arrange", [copied, columns_apart, one_row, one_number])
def test_strides(module, inputs, check, arrange):
    q, k, v, do = inputs(2, 3, 20, 16)
    check(module, q, k, v, arrange(do))
    if arrange in (copied, columns_apart):
        check(module, *(arrange(x) for x in (q, k, v, do)))


def test_output_layout(module, inputs):
    q, k, v, do = inputs(2, 3, 5, 16, 24)
    o = call(module, q, k, v, do)[0]
    assert o.shape == (2, 3, 5, 24)
    assert o.transpose(1, 2).is_contiguous()


def test_same_bits_twice(module, design, inputs):
    tensors = inputs(1, 1, 300, 16, dtype=torch.bfloat16)
    for first, second in zip(call(module, *tensors), call(module, *tensors), strict=True):
        assert torch.equal(first, second)


def test_rows_of_zeros(module, inputs, check):
    q, k, v, do = inputs(1, 2, 40, 16)
    for x in (q, k, v):
        x[:, :, 3] = 0
        x[:, 1] = 0
    check(module, q, k, v, do)


def test_neighbours_in_memory_do_not_matter(module, inputs):
    """Tokens and columns outside of the tensor are not read, not even with a weight of zero."""
    q, k, v, do = inputs(1, 1, 20, 24)
    wide = [torch.full((1, 1, 50, 40), torch.nan).to(x) for x in (q, k, v, do)]
    inner = [x[:, :, 10:30, 8:32].copy_(y) for x, y in zip(wide, (q, k, v, do), strict=True)]
    for got, expected in zip(call(module, *inner), call(module, q, k, v, do), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rows_without_weight(kernel_module, inputs, relative_error, tolerance, dtype):
    """Queries opposite to every key give zero and zero gradients, and leave the other rows alone."""
    linear = kernel_module("linear")
    q, k, v, do = inputs(1, 2, 150, 16, dtype=dtype)
    k.copy_(k[:, :, :1].clone())
    q[:, :, ::2] = -2 * k[:, :, ::2]
    o, dq, dk, dv = call(linear, q, k, v, do)
    assert not o[:, :, ::2].any()
    assert not dq[:, :, ::2].any()
    expected = formula(linear, q, k, v, do)
    assert relative_error(o, expected[0]) <= tolerance[dtype]
    assert relative_error(dv, expected[3]) <= tolerance[dtype]
    # With equal keys these two are differences of equal numbers; what is left is rounding.
    assert (dq.double() - expected[1]).abs().max() <= tolerance[dtype] * do.double().abs().max()
    assert (dk.double() - expected[2]).abs().max() <= tolerance[dtype] * do.double().abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_equal_large_tokens(module, inputs, relative_error, dtype):
    q, k, v, do = inputs(1, 1, 1025, 64, dtype=dtype)
    q.fill_(8)
    k.fill_(8)
    o, *gradients = call(module, q, k, v, do)
    assert relative_error(o, formula(module, q, k, v, do)[0]) <= 1e-2
    assert all(x.isfinite().all() for x in gradients)


def test_sums_beyond_the_range_of_float16(module, inputs, check):
    q, k, v, do = inputs(1, 1, 300, 16, dtype=torch.float16)
    v = 400 * v.abs() + 1200
    assert v.double().sum(-2).min() > torch.finfo(torch.float16).max
    check(module, q, k.abs(), v, do, times=4)


def test_gradients_below_the_range_of_float16(module, inputs, relative_error):
    q, k, v, do = inputs(1, 1, 300, 16, dtype=torch.float16)
    do = (do * 1e-4).clamp(-2e-4, 2e-4)
    for x, y in zip(
        call(module, q, k, 100 * v, do)[1:3], formula(module, q, k, 100 * v, do)[1:3], strict=True
    ):
        assert relative_error(x, y) <= 1e-2


def test_values_with_a_large_mean(kernel_module, inputs, check):
    """The common part of the values, where the keys have one too, does not drown the gradients of q and k."""
    q, k, v, do = inputs(1, 1, 130, 32, dtype=torch.float16)
    check(kernel_module("linear"), q, k + 1, v + 30, do, times=20)


def test_long_heads_save_their_state(kernel_module):
    affine = kernel_module("affine")
    long_heads = torch.empty(4, 12, 16384, 64, device="meta")
    assert affine.state_shape(long_heads, long_heads, denominator=True) == (4, 12, 64 * 64 + 64 + 64)
    assert affine.state_shape(long_heads[:, :, :197], long_heads[..., :8], denominator=False) == (0,)


@pytest.mark.parametrize(
    ("strides", "copied"),
    [
        ((640, 64, 64, 1), False),
        ((0, 0, 0, 0), True),
        ((1, 1, 1 << 24, 1), False),
        ((1, 1, 1 << 25, 1), True),
    ],
    ids=str,
)
def test_only_rows_with_gaps_or_far_apart_are_copied(strides, copied, kernel_module):
    """Within a block the kernels count in 32 bits: 127 tokens of 2^25 numbers each are beyond that."""
    x = torch.empty_strided((1, 1, 10, 64), strides, device="meta")
    taken, *steps = kernel_module("launch").rows(x)
    assert (taken is not x) == copied
    assert tuple(steps) == taken.stride()[:3]
    assert steps[2] <= 1 << 24
