"""The Triton passes of Neumann linear attention against the explicit formula, on a card or interpreted."""

import pytest
import torch

pytest.importorskip("triton")

from openclip_linattn.ops.layout import split_gradients
from openclip_linattn.ops.reference import neumann_linear_attention
from openclip_linattn.ops.triton_kernels import neumann

# The rows of a block after the last token are computed, and not written.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
TOLERANCE = {torch.float32: 3e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""Relative, by norm: a few roundings, float32 at gamma 0.99. The interpreter cuts bfloat16 off, unrounded."""
SHAPES = [  # (tokens, samples, heads, layout, widths)
    *[(1, 1, 1, "packed", (16, 16)), (15, 2, 3, "packed", (16, 16)), (16, 1, 2, "contiguous", (3, 1))],
    *[(17, 1, 1, "transposed", (24, 64)), (63, 1, 1, "packed", (64, 16)), (65, 2, 1, "packed", (64, 64))],
    *[(129, 1, 2, "transposed", (16, 16)), (300, 1, 2, "packed", (40, 24))],
]


def upstream(v, *, expanded=False):
    if expanded:
        return torch.ones((), device=v.device, dtype=v.dtype).expand(v.shape)
    return torch.randn(v.shape, generator=torch.Generator().manual_seed(1)).to(v.device, v.dtype)


def gamma_of(v, last=0.95):
    """One value per head, from small ones to the last."""
    heads = v.shape[1]
    return torch.linspace(0.0, last, heads + 1, device=v.device)[1:]


def by_autograd(q, k, v, do, gamma):
    leaves = [x.double().detach().requires_grad_() for x in (q, k, v, gamma)]
    o = neumann_linear_attention(*leaves[:3], gamma=leaves[3].reshape(-1, gamma.shape[-1], 1, 1))
    return o.detach(), *torch.autograd.grad(o, leaves, do.double())


def by_kernels(q, k, v, do, gamma):
    o, state = neumann.forward(q, k, v, gamma)
    assert state.shape == neumann.state_shape(q, v)
    gradients, of_gamma = neumann.backward(do, q, k, v, state, gamma)
    return o, *split_gradients(gradients, q.shape[1], q.shape[3]), of_gamma


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize(("tokens", "batch", "heads", "layout", "widths"), SHAPES, ids=str)
def test_equals_the_explicit_formula(tokens, batch, heads, layout, widths, tokens_of, device):
    q, k, v = tokens_of(layout, batch, heads, tokens, *widths, torch.float32, device)
    do = upstream(v, expanded=layout == "contiguous")
    inputs = q, k, v, do, gamma_of(v)
    got, expected = by_kernels(*inputs), by_autograd(*inputs)
    for name, a, b in zip(("o", "dq", "dk", "dv", "dgamma"), got, expected, strict=True):
        assert a.shape == b.shape
        # Of one token the norm cancels a change of the score, up to rounding.
        rounding = 1e-5 * do.norm() * v.norm() * (tokens == 1)
        assert (a - b).norm() <= TOLERANCE[q.dtype] * b.norm() + rounding, name


@pytest.mark.parametrize("gamma", [0.0, 0.5, 0.99])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_loses_a_few_roundings(dtype, gamma, tokens_of, relative_error, device):
    q, k, v = tokens_of("packed", 1, 2, 140, 64, 64, dtype, device)
    inputs = q, k, v, upstream(v), torch.full((2,), gamma, device=device)
    for a, b in zip(by_kernels(*inputs), by_autograd(*inputs), strict=True):
        assert relative_error(a, b) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_tokens_with_much_in_common(dtype, tokens_of, relative_error, device):
    """Scores near one, values with a mean: the series amplifies the mean by 1 / (1 - gamma)."""
    q, k, v = tokens_of("packed", 1, 2, 140, 64, 64, dtype, device)
    inputs = q + 2, k + 2, v + 1, upstream(v), torch.full((2,), 0.99, device=device)
    for a, b in zip(by_kernels(*inputs), by_autograd(*inputs), strict=True):
        assert relative_error(a, b) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_wide_heads(dtype, tokens_of, relative_error, device):
    q, k, v = tokens_of("packed", 1, 1, 40, 80, 128, dtype, device)
    inputs = q, k, v, upstream(v), gamma_of(v)
    for a, b in zip(by_kernels(*inputs), by_autograd(*inputs), strict=True):
        assert relative_error(a, b) <= TOLERANCE[dtype]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 1e-3)], ids=str)
def test_opposite_tokens_give_almost_nothing(dtype, tolerance, tokens_of, device):
    """A vanishes, and the floor of its norm keeps what rounding leaves of it small."""
    q, _, v = tokens_of("packed", 1, 2, 140, 64, 64, dtype, device)
    q = q[:, :, :1].expand_as(q)
    o, *gradients = by_kernels(q, -q, v, upstream(v), gamma_of(v, 0.99))
    assert o.norm() <= tolerance * v.norm()
    assert all(x.isfinite().all() for x in gradients)


@pytest.mark.parametrize("value", [0.0, 8.0])
def test_equal_tokens_stay_finite_in_float16(value, device):
    x = torch.full((1, 2, 140, 64), value, dtype=torch.float16, device=device)
    assert all(y.isfinite().all() for y in by_kernels(x, x, x + 1, upstream(x), gamma_of(x, 0.99)))


@pytest.mark.parametrize("per_sample", [False, True], ids=["per-head", "per-sample"])
def test_gamma_may_differ_between_samples(per_sample, tokens_of, relative_error, device):
    q, k, v = tokens_of("packed", 2, 2, 20, 16, 16, torch.float32, device)
    gamma = torch.stack([gamma_of(v), gamma_of(v, 0.5)]) if per_sample else gamma_of(v)
    inputs = q, k, v, upstream(v), gamma
    for a, b in zip(by_kernels(*inputs), by_autograd(*inputs), strict=True):
        assert relative_error(a, b) <= 1e-5


@pytest.mark.usefixtures("programs")
def test_two_runs_give_the_same_bits(tokens_of, device):
    q, k, v = tokens_of("packed", 1, 2, 300, 16, 16, torch.float32, device)
    for a, b in zip(*(by_kernels(q, k, v, upstream(v), gamma_of(v)) for _ in range(2)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.filterwarnings("ignore:Please use the new API:UserWarning")
@pytest.mark.parametrize("gamma", [0.95, 0.99])
def test_the_solve_does_not_amplify_what_tf32_rounds(gamma, tokens_of, relative_error, device):
    """With TF32 allowed, as in OpenCLIP's training, the passes round to 11 bits and the small systems do not."""
    q, k, v = tokens_of("packed", 1, 2, 77, 64, 64, torch.float32, device)
    q, k, v = q + 2, k + 2, v + 1
    gammas = torch.full((2,), gamma, device=device)
    do = upstream(v)
    o, state = neumann.forward(q, k, v, gammas)
    exact = neumann.backward(do, q, k, v, state, gammas)
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        x, state = neumann.forward(q, k, v, gammas)
        got = neumann.backward(do, q, k, v, state, gammas)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    for a, b in zip((x, *got), (o, *exact), strict=True):
        assert relative_error(a, b) <= 4e-3
