"""What must hold for any tokens: symmetries, bounds and the degenerate inputs."""

import pytest
import torch

from openclip_linattn.ops import OPERATORS, normalized_linear_attention

CAUSAL_FORMS = [
    (kind, causal) for kind in OPERATORS for causal in (False, True) if (kind, causal) != ("lininfsa", True)
]


@pytest.mark.parametrize("kind", ["softmax", "linear", "linearelu", "normlinearmean", "lininfsa"])
def test_equal_keys_give_the_mean_of_the_values(kind, packed_tokens):
    q, k, v = packed_tokens(2, 3, 37, 16)
    k = k[:, :, :1].expand_as(k)
    factors = {}
    if kind == "lininfsa":
        q, factors = q.abs() * k.sign(), {"rho": 0.8}
    if kind == "normlinearmean":
        q = k
    expected = {"lininfsa": 0.8, "normlinearmean": 2.0}.get(kind, 1.0) * v.mean(-2, keepdim=True).expand_as(v)
    torch.testing.assert_close(OPERATORS[kind](q, k, v, **factors), expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kind", OPERATORS)
def test_duplicated_tokens_change_nothing_unless_the_sum_is_unscaled(kind, packed_tokens, relative_error):
    q, k, v = packed_tokens(1, 2, 37, 16)
    once = OPERATORS[kind](q, k, v)
    twice = OPERATORS[kind](*(torch.cat([x, x], 2) for x in (q, k, v)))
    expected = 2 * once if kind == "normlinear" else once
    assert relative_error(twice, torch.cat([expected, expected], 2)) <= 1e-12


@pytest.mark.parametrize("kind", OPERATORS)
def test_permuted_tokens_permute_the_output(kind, packed_tokens, relative_error):
    q, k, v = packed_tokens(2, 2, 65, 16)
    order = torch.randperm(65, generator=torch.Generator().manual_seed(0))
    permuted = OPERATORS[kind](q[:, :, order], k[:, :, order], v[:, :, order])
    assert relative_error(permuted, OPERATORS[kind](q, k, v)[:, :, order]) <= 1e-12


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("q_value", "k_value"), [(-8, -8), (-8, 8), (0, 0), (0, 8), (1e-20, 1e-20)])
@pytest.mark.parametrize(("kind", "causal"), CAUSAL_FORMS)
def test_degenerate_tokens_stay_finite(kind, causal, q_value, k_value, dtype, packed_tokens):
    *_, v = packed_tokens(1, 2, 77, 16, dtype)
    q, k = (torch.full_like(v, x).requires_grad_() for x in (q_value, k_value))
    o = OPERATORS[kind](q, k, v, causal=causal)
    gradients = torch.autograd.grad(o.sum(), (q, k, v))
    assert all(x.isfinite().all() for x in (o, *gradients))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tokens", [1, 77, 1025])
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_linear_gives_zero_where_q_is_opposite_to_every_key(tokens, causal, dtype, packed_tokens):
    direction, _, v = packed_tokens(2, 2, tokens, 64, dtype)
    k = direction[:, :, :1].expand_as(direction)
    q = (-k).detach().requires_grad_()
    o = OPERATORS["linear"](q, k, v, causal=causal)
    gradients = torch.autograd.grad(o.sum(), (q, direction, v))
    assert all(not x.any() for x in (o, *gradients))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
def test_lininfsa_gives_zero_where_no_score_is_positive(dtype, packed_tokens):
    q, k, v = packed_tokens(1, 2, 37, 16, dtype)
    q, k = q.abs(), -k.abs()
    o = OPERATORS["lininfsa"](q, k, v)
    assert not o.any()
    assert all(x.isfinite().all() for x in torch.autograd.grad(o.sum(), (q, k, v), allow_unused=True))


def test_lininfsa_gives_every_token_one_vector_without_storing_it_n_times(packed_tokens):
    o = OPERATORS["lininfsa"](*packed_tokens(1, 2, 37, 16, torch.bfloat16))
    assert o.stride(2) == 0


@pytest.mark.parametrize(("length_scale", "growth"), [("none", 1025 / 197), ("mean", 1.0), ("train", 1.0)])
def test_length_scale_keeps_the_output_at_another_resolution(length_scale, growth, packed_tokens):
    def size(tokens):
        q, k, v = packed_tokens(1, 4, tokens, 64)
        scaled = normalized_linear_attention(q, k, v + 3, length_scale=length_scale, train_tokens=197)
        return scaled.norm(dim=-1).mean().item()

    assert size(1025) / size(197) == pytest.approx(growth, rel=0.02)


def test_the_train_length_scale_is_the_plain_sum_at_the_training_length(packed_tokens):
    q, k, v = packed_tokens(1, 2, 37, 16)
    plain = normalized_linear_attention(q, k, v)
    torch.testing.assert_close(
        normalized_linear_attention(q, k, v, length_scale="train", train_tokens=37), plain
    )
    torch.testing.assert_close(
        normalized_linear_attention(q, k, v, scale=0.5, length_scale="mean"), plain / 37
    )


def test_scores_lie_between_zero_and_one(packed_tokens):
    q, k, _ = packed_tokens(1, 2, 37, 16)
    matrix = normalized_linear_attention(q, k, torch.eye(37, dtype=q.dtype).expand(1, 2, 37, 37))
    assert matrix.min() >= 0
    assert matrix.max() <= 1
