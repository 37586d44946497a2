"""Pure infinite attention in blocks against its explicit formula, and in memory linear in the tokens."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from openclip_linattn.ops.layout import split_gradients
from openclip_linattn.ops.reference import inf_attention
from openclip_linattn.ops.torch_kernels import inf

CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
BLOCK_EDGES = [(1, 1), (2, 3), (5, 3), (15, 16), (16, 16), (17, 31), (300, 512)]
"""(rows, keys) of a block for 5 to 37 tokens: one, several, ragged and longer than all tokens."""


def by_autograd(q, k, v, do, causal):
    leaves = [x.double().detach().requires_grad_() for x in (q, k, v)]
    o = inf_attention(*leaves, causal=causal, rho=1.0)
    return o.detach(), torch.autograd.grad(o, leaves, do.double())


def by_blocks(q, k, v, do, causal):
    o, norm = inf.forward(q, k, v, causal)
    gradients = inf.backward(do, q, k, v, o, norm, causal)
    return o, split_gradients(gradients, q.shape[1], q.shape[3])


def upstream(v, layout="contiguous"):
    if layout == "expanded":
        return torch.ones((), dtype=v.dtype).expand(v.shape)
    return torch.randn(v.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(v.dtype)


@pytest.fixture
def blocks_of(monkeypatch):
    def choose(rows, keys):
        monkeypatch.setattr(inf, "ROWS", rows)
        monkeypatch.setattr(inf, "KEYS", keys)

    return choose


@CAUSAL
@pytest.mark.parametrize("do_layout", ["contiguous", "expanded"])
@pytest.mark.parametrize(
    ("layout", "heads", "widths"),
    [("contiguous", 1, (1, 1)), ("packed", 3, (16, 16)), ("transposed", 1, (33, 7)), ("packed", 1, (33, 64))],
    ids=str,
)
@pytest.mark.parametrize("tokens", [1, 5, 127, 128, 129, 300])
def test_equals_the_explicit_formula(
    tokens, layout, heads, widths, do_layout, causal, relative_error, tokens_of
):
    q, k, v = tokens_of(layout, 2, heads, tokens, *widths)
    do = upstream(v, do_layout)
    o, got = by_blocks(q, k, v, do, causal)
    expected_o, expected = by_autograd(q, k, v, do, causal)
    assert relative_error(o, expected_o) <= 1e-12
    # Of one token the score and its norm cancel: the gradients of q and k are rounding.
    rounding = 1e-12 * do.norm() * v.norm()
    for a, b in zip(got, expected, strict=True):
        assert (a - b).norm() <= 1e-10 * b.norm() + rounding


@CAUSAL
@pytest.mark.parametrize("tokens", [5, 37])
@pytest.mark.parametrize(("rows", "keys"), BLOCK_EDGES)
@pytest.mark.parametrize("scores", [1, 2000], ids=["one-head-at-a-time", "two-heads-at-a-time"])
def test_does_not_depend_on_the_blocks(
    scores, rows, keys, tokens, causal, blocks_of, monkeypatch, relative_error, tokens_of
):
    blocks_of(rows, keys)
    monkeypatch.setattr(inf, "SCORES", scores)
    q, k, v = tokens_of("packed", 1, 3, tokens, 16, 7)
    o, got = by_blocks(q, k, v, upstream(v), causal)
    expected_o, expected = by_autograd(q, k, v, upstream(v), causal)
    for a, b in zip((o, *got), (expected_o, *expected), strict=True):
        assert relative_error(a, b) <= 1e-10


@CAUSAL
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float16, 1e-3), (torch.bfloat16, 8e-3)], ids=str
)
def test_loses_one_rounding_in_a_lower_precision(dtype, tolerance, causal, relative_error, tokens_of):
    q, k, v = tokens_of("packed", 2, 3, 300, 64, 64, dtype)
    do = upstream(v)
    o, got = by_blocks(q, k, v, do, causal)
    expected_o, expected = by_autograd(q, k, v, do, causal)
    assert {x.dtype for x in (o, *got)} == {dtype}
    for a, b in zip((o, *got), (expected_o, *expected), strict=True):
        assert relative_error(a, b) <= tolerance


@CAUSAL
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_without_a_positive_score_the_output_and_all_gradients_are_zero(dtype, causal, tokens_of):
    q, k, v = tokens_of("packed", 1, 2, 37, 16, 16, dtype)
    for queries, keys in ((q.abs(), -k.abs()), (torch.zeros_like(q), k)):
        o, gradients = by_blocks(queries, keys, v, upstream(v), causal)
        assert not any(x.any() for x in (o, *gradients))


def test_a_norm_below_the_bound_is_constant(relative_error, tokens_of):
    """Scores of 1e-13: o = A V / 1e-12, and no gradient passes through the norm."""
    q, k, v = tokens_of("packed", 1, 2, 5, 4, 4)
    q = 1e-14 * q
    for causal in (False, True):
        o, got = by_blocks(q, k, v, upstream(v), causal)
        expected_o, expected = by_autograd(q, k, v, upstream(v), causal)
        for a, b in zip((o, *got), (expected_o, *expected), strict=True):
            assert relative_error(a, b) <= 1e-10


def test_large_scores_stay_finite_in_float16():
    x = torch.full((1, 2, 300, 64), 8.0, dtype=torch.float16)
    for causal in (False, True):
        o, gradients = by_blocks(x, x, x, upstream(x), causal)
        assert all(y.isfinite().all() for y in (o, *gradients))


@pytest.mark.parametrize("changed", [1, 63, 127, 128, 299])
def test_causal_rows_know_nothing_of_later_tokens(changed, tokens_of):
    q, k, v = tokens_of("packed", 1, 2, 300, 16, 16)
    o, _ = inf.forward(q, k, v, True)
    later = [torch.cat([x[:, :, :changed], 5 - x[:, :, changed:]], 2) for x in (q, k, v)]
    o_later, _ = inf.forward(*later, True)
    torch.testing.assert_close(o_later[:, :, :changed], o[:, :, :changed], rtol=1e-12, atol=0)
    assert not torch.allclose(o_later[:, :, changed:], o[:, :, changed:])


@CAUSAL
def test_every_number_of_the_results_is_written(causal, monkeypatch, relative_error, tokens_of):
    for name in ("empty_output", "empty_gradients"):
        original = getattr(inf, name)
        monkeypatch.setattr(inf, name, lambda *inputs, make=original: make(*inputs).fill_(torch.nan))
    q, k, v = tokens_of("packed", 2, 3, 129, 16, 7)
    o, gradients = by_blocks(q, k, v, upstream(v), causal)
    assert all(x.isfinite().all() for x in (o, *gradients))


class Storage(TorchDispatchMode):
    """Records the bytes of the biggest storage that an operation returns."""

    biggest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [x.untyped_storage().nbytes() for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        self.biggest = max(self.biggest, *sizes, 0)
        return out


@CAUSAL
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_never_holds_a_matrix_of_all_pairs(dtype, causal, blocks_of, tokens_of):
    blocks_of(32, 64)
    tokens = 1024
    q, k, v = tokens_of("packed", 1, 1, tokens, 16, 16, dtype)
    do = upstream(v)
    with Storage() as recorded:
        by_blocks(q, k, v, do, causal)
    # The inputs and the gradients, of 48 numbers per token, are the biggest tensors.
    assert recorded.biggest <= 48 * tokens * dtype.itemsize


@CAUSAL
def test_two_runs_give_the_same_bits(causal, tokens_of):
    q, k, v = tokens_of("packed", 2, 3, 300, 16, 16, torch.float32)
    first, second = (by_blocks(q, k, v, upstream(v), causal) for _ in range(2))
    for a, b in zip((first[0], *first[1]), (second[0], *second[1]), strict=True):
        assert torch.equal(a, b)


@CAUSAL
def test_the_shape_of_the_state_is_known_beforehand(causal, tokens_of):
    q, k, v = tokens_of("packed", 2, 3, 5, 16, 7)
    assert inf.forward(q, k, v, causal)[1].shape == inf.state_shape(q, v, causal)
