"""The implied weights of every kind equal the N x N form, as matrices, as sampled rows and as derivatives."""

import pytest
import torch

from openclip_linattn.analysis.weights import matrices
from openclip_linattn.analysis.weights.implied import hop_of, implied_weights, pure_hop
from openclip_linattn.analysis.weights.rows import heads_of, jacobian, row_maker
from openclip_linattn.errors import UserError
from openclip_linattn.ops import OPERATORS

KINDS = list(OPERATORS)
BATCH, HEADS, TOKENS = 2, 3, 23  # of the layers
CLOSE = {"rtol": 1e-9, "atol": 1e-11}


@pytest.mark.parametrize("kind", KINDS)
def test_implied_weights_equal_the_explicit_form(kind, layer_of, dense):
    layer = layer_of(kind)
    weights, expected = implied_weights(layer), dense(layer)
    x = torch.randn(BATCH, HEADS, TOKENS, 4, dtype=torch.float64)
    torch.testing.assert_close(weights.times(x), expected @ x, **CLOSE)
    torch.testing.assert_close(weights.transposed_times(x), expected.mT @ x, **CLOSE)
    torch.testing.assert_close(weights.row(5), expected[:, :, 5], **CLOSE)
    torch.testing.assert_close(weights.row_sums().squeeze(-1), expected.sum(-1), **CLOSE)
    torch.testing.assert_close(weights.column_sums().squeeze(-1), expected.sum(-2), **CLOSE)
    squared = expected.square().sum((-2, -1), keepdim=True)
    torch.testing.assert_close(weights.squared_norm(), squared, **CLOSE)
    torch.testing.assert_close(weights.times(layer.v), layer.output(), **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_no_weight_is_negative(kind, dense, layer_of):
    assert float(dense(layer_of(kind)).min()) > -1e-12


@pytest.mark.parametrize("kind", ["softmax", "infsa"])
def test_quadratic_weights_are_the_same_block_by_block(kind, layer_of, monkeypatch):
    layer = layer_of(kind)
    held = implied_weights(layer)
    monkeypatch.setattr(matrices, "HELD", 0)
    monkeypatch.setattr(matrices, "_BLOCK", BATCH * HEADS * TOKENS * 5)
    blocks = implied_weights(layer)
    assert blocks._held is None
    assert len(list(blocks._blocks())) == 5
    torch.testing.assert_close(blocks.times(layer.v), held.times(layer.v), **CLOSE)
    torch.testing.assert_close(blocks.transposed_times(layer.v), held.transposed_times(layer.v), **CLOSE)
    torch.testing.assert_close(blocks.squared_norm(), held.squared_norm(), **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_hops_are_the_weights_up_to_a_factor_and_bounded(kind, layer_of, dense):
    layer = layer_of(kind)
    hop = hop_of(layer, gamma=0.8)
    matrix = hop.weights.times(torch.eye(TOKENS, dtype=torch.float64).expand(BATCH, HEADS, -1, -1))
    if kind == "neumannlinear":
        gamma = layer.options["gamma"].view(-1, 1, 1)
        inverse = torch.linalg.inv(torch.eye(TOKENS, dtype=torch.float64) - gamma * matrix)
        torch.testing.assert_close(inverse - torch.eye(TOKENS, dtype=torch.float64), dense(layer), **CLOSE)
    else:
        ratio = dense(layer).sum((-2, -1)) / matrix.sum((-2, -1))
        torch.testing.assert_close(ratio[..., None, None] * matrix, dense(layer), **CLOSE)
    if kind in ("softmax", "linear", "linearelu", "lininfsa"):
        torch.testing.assert_close(matrix.sum(-1), torch.ones_like(matrix[..., 0]), **CLOSE)
    else:
        norms = torch.linalg.matrix_norm(matrix)
        torch.testing.assert_close(norms, torch.ones_like(norms), **CLOSE)


def test_a_layer_without_a_discount_takes_the_one_given_and_others_keep_theirs(layer_of):
    assert float(hop_of(layer_of("softmax"), gamma=0.8).gamma) == 0.8
    assert hop_of(layer_of("lininfsa"), gamma=0.8).gamma.flatten().tolist() == [0.9, 0.7, 0.95]
    with pytest.raises(UserError, match=r"gamma is 1\.0; .* below 1"):
        hop_of(layer_of("softmax"), gamma=1.0)


def test_the_full_operator_of_infinite_attention_needs_no_layer_of_that_kind(layer_of):
    x = layer_of("softmax").v
    torch.testing.assert_close(
        pure_hop(layer_of("softmax")).times(x), hop_of(layer_of("infsa")).weights.times(x)
    )


def test_rows_without_any_weight_are_zero(layer_of, dense):
    opposite = layer_of("linear")
    opposite.k.copy_(-opposite.q[:, :, :1].expand_as(opposite.k))
    negative = layer_of("infsa")
    negative.q.abs_()
    negative.k.abs_().neg_()
    for layer, row in ((opposite, 0), (negative, 3)):
        assert not dense(layer)[:, :, row].any()
        assert not implied_weights(layer).row(row).any()
        assert not row_maker(heads_of(layer)[0])(row)(layer.q[0, 0, row]).any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_as_a_function_of_its_query_equals_the_explicit_form_with_its_derivative(kind, layer_of, dense):
    layer, token = layer_of(kind), 7
    heads = heads_of(layer)
    assert len(heads) == BATCH * HEADS
    image, head = 1, 2
    row = row_maker(heads[image * HEADS + head])(token)
    query = layer.q[image, head, token].clone()

    def explicit(own: torch.Tensor) -> torch.Tensor:
        q = layer.q.clone()
        q[image, head, token] = own
        changed = type(layer)(0, kind, q, layer.k, layer.v, layer.options)
        return dense(changed)[image, head, token]

    torch.testing.assert_close(row(query), explicit(query), **CLOSE)
    expected = torch.autograd.functional.jacobian(explicit, query)
    assert expected.any()
    torch.testing.assert_close(jacobian(row, query), expected, rtol=1e-7, atol=1e-10)


def test_an_unknown_kind_is_refused_by_name(layer_of):
    layer = type(layer_of("softmax"))(0, "hyena", *layer_of("softmax").q.expand(3, -1, -1, -1, -1))
    with pytest.raises(UserError, match="hyena"):
        implied_weights(layer)
    with pytest.raises(UserError, match="hyena"):
        row_maker(heads_of(layer)[0])
