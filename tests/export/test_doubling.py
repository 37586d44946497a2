"""Systems solved by products alone are those that a factorisation solves."""

import pytest
import torch

from openclip_linattn.ops import OPERATORS, neumann
from openclip_linattn.ops.doubling import solve_by_doubling


def largest_error(y, expected):
    return ((y.double() - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("radius", [0.5, 0.95, 0.99])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 5e-5)])
def test_doubling_solves_up_to_the_largest_gamma(radius, dtype, bound):
    torch.manual_seed(0)
    x = torch.rand(2, 3, 33, 33, dtype=torch.float64)
    x *= radius / torch.linalg.eigvals(x).abs().amax(-1)[..., None, None]
    b = torch.randn(2, 3, 33, 5, dtype=torch.float64)
    expected = torch.linalg.solve(torch.eye(33) - x, b)
    assert largest_error(solve_by_doubling(x.to(dtype), b.to(dtype)), expected) <= bound


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tokens", ["random", "identical"])
@pytest.mark.parametrize("gamma", [0.95, 0.99])
def test_the_exported_form_is_as_exact_as_the_other(causal, tokens, gamma, monkeypatch):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 2, 200, 16)
    if tokens == "identical":
        q = k = q[..., :1, :].expand_as(q)
    operator = OPERATORS["neumannlinear"]
    expected = operator(q.double(), k.double(), v.double(), causal=causal, gamma=gamma)
    bound = 3 * largest_error(operator(q, k, v, causal=causal, gamma=gamma), expected) + 1e-6
    monkeypatch.setattr(neumann, "is_exporting", lambda: True)
    monkeypatch.setattr(neumann, "fits", lambda *_: False)
    calls = []
    monkeypatch.setattr(neumann, "solve_by_doubling", lambda *a: calls.append(a) or solve_by_doubling(*a))
    assert largest_error(operator(q, k, v, causal=causal, gamma=gamma), expected) <= bound
    assert calls
