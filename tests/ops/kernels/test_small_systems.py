"""The small systems of Neumann linear attention and their gradients by hand."""

import pytest
import torch

from openclip_linattn.ops.small_systems import (
    NORM_FLOOR,
    saved_shape,
    solution,
    solve_backward,
    solve_forward,
)

NAMES = ("gram_q", "gram_k", "cross", "summed", "gamma")


def sums_over_tokens(tokens, width, value_width, dtype=torch.float64, *, antipodal_head=False):
    """The four matrices of two samples of three heads, from unit rows; on request head 1 has K = -Q."""
    generator = torch.Generator().manual_seed(tokens + width)
    q, k = torch.randn(2, 2, 3, tokens, width, generator=generator, dtype=torch.float64)
    v = torch.randn(2, 3, tokens, value_width, generator=generator, dtype=torch.float64)
    if antipodal_head:
        q[:, 1] = q[:, 1, :1]
        k[:, 1] = -q[:, 1]
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    q, k = (torch.cat([torch.ones_like(x[..., :1]), x], -1) for x in (q, k))
    return [x.to(dtype) for x in (q.mT @ q, k.mT @ k, k.mT @ q, k.mT @ v)]


def plain(gram_q, gram_k, cross, summed, gamma, counts):
    squared_norm = (gram_q * gram_k).sum((-2, -1), keepdim=True) / 4
    step = gamma / 2 / squared_norm.clamp_min((NORM_FLOOR * counts) ** 2).sqrt()
    return step * torch.linalg.solve(torch.eye(cross.shape[-1]).to(cross) - step * cross, summed)


def by_autograd(sums, gamma, counts, dx):
    leaves = [x.detach().requires_grad_() for x in (*sums, gamma)]
    x = plain(*leaves, counts)
    return x.detach(), torch.autograd.grad(x, leaves, dx)


GAMMAS = {
    "per-head": torch.tensor([0.0, 0.5, 0.99]).view(1, 3, 1, 1),
    "zero": torch.zeros(1, 3, 1, 1),
    "per-sample": torch.tensor([[0.2, 0.95, 0.0], [0.9, 0.3, 0.7]]).view(2, 3, 1, 1),
}


@pytest.mark.parametrize("counts_as", ["number", "tensor"])
@pytest.mark.parametrize("antipodal_head", [False, True], ids=["random", "floored-head"])
@pytest.mark.parametrize("gamma", GAMMAS.values(), ids=GAMMAS)
@pytest.mark.parametrize(("tokens", "width", "value_width"), [(1, 1, 1), (5, 16, 7), (197, 64, 64)])
def test_equals_the_plain_formula_and_its_gradient(
    tokens, width, value_width, gamma, antipodal_head, counts_as, relative_error
):
    sums = sums_over_tokens(tokens, width, value_width, antipodal_head=antipodal_head)
    counts = float(tokens) if counts_as == "number" else torch.full((2, 1, 1, 1), float(tokens)).double()
    dx = torch.randn(sums[3].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected_x, expected = by_autograd(sums, gamma.double(), counts, dx)
    x, saved = solve_forward(*sums, counts, gamma.double())
    assert saved.shape == (2, 3, *saved_shape(width, value_width))
    assert relative_error(x, expected_x) <= 1e-11
    assert torch.equal(solution(saved, value_width), x)
    got = solve_backward(dx, saved)
    # The gradient of a broadcast gamma is its sum over the samples.
    got = got._replace(gamma=got.gamma.sum_to_size(gamma.shape))
    for name, a, b in zip(NAMES, got, expected, strict=True):
        assert relative_error(a, b) <= 1e-10, name


def test_a_floored_head_sends_nothing_to_its_norm():
    sums = sums_over_tokens(37, 16, 16, antipodal_head=True)
    x, saved = solve_forward(*sums, 37, GAMMAS["per-sample"].double())
    gradients = solve_backward(torch.ones_like(x), saved)
    assert not gradients.gram_q[:, 1].any()
    assert not gradients.gram_k[:, 1].any()
    assert gradients.gram_q[0, 0].any()


@pytest.mark.parametrize(("gamma", "tolerance"), [(0.95, 1e-5), (0.99, 5e-5)])
def test_identical_tokens_in_float32(gamma, tolerance, relative_error):
    """The worst case: the system is singular at gamma = 1."""
    row = torch.nn.functional.normalize(torch.randn(64, generator=torch.Generator().manual_seed(0)), dim=0)
    row = torch.cat([torch.ones(1), row]).double()
    gram = (577 * row[:, None] * row).expand(2, 3, -1, -1)
    summed = sums_over_tokens(577, 64, 64)[3]
    factor = torch.full((1, 3, 1, 1), gamma)
    dx = torch.randn(summed.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected_x, expected = by_autograd((gram, gram, gram, summed), factor.double(), 577, dx)
    x, saved = solve_forward(gram.float(), gram.float(), gram.float(), summed.float(), 577, factor)
    assert x.dtype == saved.dtype == torch.float32
    assert relative_error(x, expected_x) <= tolerance
    got = solve_backward(dx.float(), saved)
    for name, a, b in zip(NAMES, (*got[:4], got.gamma.sum(0, keepdim=True)), expected, strict=True):
        assert relative_error(a, b) <= 10 * tolerance, name


def test_float64_gradients_agree_with_finite_differences():
    sums = [x.requires_grad_() for x in sums_over_tokens(5, 2, 3)]
    gamma = GAMMAS["per-head"].double().requires_grad_()

    class Solve(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            x, saved = solve_forward(*inputs[:4], 5, inputs[4])
            ctx.save_for_backward(saved)
            return x

        @staticmethod
        def backward(ctx, dx):
            *of_sums, of_gamma = solve_backward(dx, *ctx.saved_tensors)
            return *of_sums, of_gamma.sum(0, keepdim=True)

    assert torch.autograd.gradcheck(Solve.apply, (*sums, gamma))
