"""The Neumann series in closed form: its limits, its partial sums and its degenerate cases."""

import pytest
import torch

from openclip_linattn.ops import neumann_linear_attention, normalized_linear_attention


def normalised_scores(q, k):
    identity = torch.eye(q.shape[2], dtype=q.dtype).expand(*q.shape[:2], -1, -1)
    scores = normalized_linear_attention(q, k, identity)
    return scores / torch.linalg.matrix_norm(scores, keepdim=True)


@pytest.mark.parametrize("gamma", [0.1, 0.5, 0.95, 0.99])
@pytest.mark.parametrize(("tokens", "width"), [(5, 16), (197, 16), (197, 64)])
def test_equals_the_dense_inverse(gamma, tokens, width, packed_tokens, relative_error):
    q, k, v = packed_tokens(1, 2, tokens, width)
    identity = torch.eye(tokens, dtype=q.dtype)
    dense = (torch.linalg.inv(identity - gamma * normalised_scores(q, k)) - identity) @ v
    assert relative_error(neumann_linear_attention(q, k, v, gamma=gamma), dense) <= 1e-8


@pytest.mark.parametrize("gamma", [1e-3, 1e-6, 1e-9])
def test_small_gamma_leaves_one_hop(gamma, packed_tokens, relative_error):
    q, k, v = packed_tokens(1, 2, 37, 16)
    one_hop = gamma * normalised_scores(q, k) @ v
    assert relative_error(neumann_linear_attention(q, k, v, gamma=gamma), one_hop) <= 20 * gamma


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_gamma_zero_gives_zero(causal, packed_tokens):
    assert not neumann_linear_attention(*packed_tokens(1, 2, 37, 16), causal=causal, gamma=0.0).any()


def test_truncated_series_converges_to_it(packed_tokens, relative_error):
    q, k, v = packed_tokens(1, 2, 37, 16)
    step = 0.8 * normalised_scores(q, k)
    whole, hop, partial, errors = neumann_linear_attention(q, k, v, gamma=0.8), v, torch.zeros_like(v), []
    for _ in range(120):
        hop = step @ hop
        partial = partial + hop
        errors.append(relative_error(partial, whole))
    assert errors[0] > 0.5
    assert errors[20] < 0.1 * errors[0]
    assert errors[-1] <= 1e-10


@pytest.mark.parametrize("gamma", [0.5, 0.95, 0.99])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 3e-5)], ids=str)
def test_identical_tokens_amplify_the_mean(gamma, dtype, tolerance, packed_tokens, relative_error):
    q, _, v = packed_tokens(1, 2, 577, 64, dtype)
    same = q[:, :, :1].expand_as(q)
    expected = gamma / (1 - gamma) * v.double().mean(-2, keepdim=True).expand_as(v)
    assert relative_error(neumann_linear_attention(same, same, v, gamma=gamma), expected) <= tolerance


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [1, 197, 1025])
def test_antipodal_tokens_stay_near_zero(tokens, dtype, causal, packed_tokens):
    q, _, v = packed_tokens(1, 2, tokens, 64, dtype)
    same = q[:, :, :1].expand_as(q)
    o = neumann_linear_attention(same, -same, v, causal=causal, gamma=0.99)
    assert o.double().norm() <= 1e-3 * v.double().norm()


def test_causal_rows_of_identical_tokens_follow_the_recurrence():
    """A is all ones below the diagonal: n_i^2 = i (i + 1) / 2, y_i = v_i + gamma / n_i sum_{j<=i} y_j."""
    tokens, gamma = 140, 0.9
    q = torch.ones(1, 1, tokens, 4, dtype=torch.float64) * 50
    v = torch.linspace(-1, 2, tokens, dtype=torch.float64)
    total, expected = 0.0, []
    for i in range(1, tokens + 1):
        step = gamma / (i * (i + 1) / 2) ** 0.5
        y = (v[i - 1].item() + step * total) / (1 - step)
        total += y
        expected.append(y - v[i - 1].item())
    o = neumann_linear_attention(q, q, v[None, None, :, None], causal=True, gamma=gamma)
    torch.testing.assert_close(o.flatten(), torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=0)


@pytest.mark.parametrize("gamma", [1.0, 1.5, -0.1, float("nan"), float("inf")])
def test_gamma_without_a_convergent_series_is_refused(gamma, packed_tokens):
    with pytest.raises(ValueError, match="gamma must be at least 0 and below 1"):
        neumann_linear_attention(*packed_tokens(1, 1, 4, 4), gamma=gamma)
