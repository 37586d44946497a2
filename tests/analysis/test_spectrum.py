"""The sum across layers against dense products, and the measures of a layer's spectrum."""

import math

import open_clip
import pytest
import torch

from openclip_linattn.analysis.cross_layer import layer_sum
from openclip_linattn.analysis.layers import Layer
from openclip_linattn.analysis.spectrum import (
    by_layer,
    centred,
    cosine,
    perron_measures,
    spectra,
    token_share,
)
from openclip_linattn.analysis.weights.implied import hop_of
from openclip_linattn.ops import OPERATORS


def dense_sum(matrices, x, gamma):
    """sum_t gamma^t A(t)...A(1) x, from the products of the matrices themselves."""
    product, total = torch.eye(x.shape[-2], dtype=x.dtype), torch.zeros_like(x)
    for power, matrix in enumerate(matrices, start=1):
        product = matrix @ product
        total = total + gamma**power * (product @ x)
    return total


@pytest.mark.parametrize("kind", ["softmax", "infsa", "normlinear"])
def test_the_sum_over_layers_equals_the_dense_products_and_the_dense_inverse(kind, layer_of):
    layers = [layer_of(kind, seed) for seed in range(4)]
    operators = [hop_of(layer).weights for layer in layers]
    identity = torch.eye(23, dtype=torch.float64)
    matrices = [weights.times(identity.expand(2, 3, -1, -1)).mean(1) for weights in operators]
    x = torch.randn(2, 23, 5, dtype=torch.float64)
    layered, mean = dense_sum(matrices, x, 0.9), torch.stack(matrices).mean(0)
    closed = torch.linalg.inv(identity - 0.9 * mean) @ x - x
    truncated = dense_sum([mean] * 4, x, 0.9)
    found = layer_sum(operators, x, 0.9)

    def mean_ratio(a, b):
        return float((a.flatten(1).norm(dim=1) / b.flatten(1).norm(dim=1)).mean())

    assert found.layers == 4
    assert found.norm_ratio == pytest.approx(mean_ratio(layered, closed), rel=1e-8)
    assert found.difference == pytest.approx(mean_ratio(layered - closed, closed), rel=1e-8)
    assert found.difference_truncated == pytest.approx(mean_ratio(layered - truncated, closed), rel=1e-8)
    assert found.tail == pytest.approx(mean_ratio(truncated - closed, closed), rel=1e-8)
    expected = torch.cosine_similarity(layered.flatten(1), closed.flatten(1)).mean()
    assert found.cosine == pytest.approx(float(expected), rel=1e-8)
    own = closed - closed.mean(1, keepdim=True)
    assert found.share_closed == pytest.approx(mean_ratio(own, closed), rel=1e-8)


def test_many_equal_layers_reach_the_closed_form(layer_of):
    operators = [hop_of(layer_of("linear")).weights] * 120
    found = layer_sum(operators, torch.randn(2, 23, 5, dtype=torch.float64), 0.8)
    assert found.difference < 1e-9
    assert found.cosine == pytest.approx(1)


def test_the_share_of_tokens_is_that_of_known_outputs():
    common = torch.ones(1, 1, 4, 2)
    own = torch.tensor([1.0, -1, 1, -1])[None, None, :, None].expand(1, 1, 4, 2)
    assert float(token_share(common)) == 0
    assert float(token_share(own)) == pytest.approx(1)
    assert float(token_share(3 * common + 4 * own)) == pytest.approx(0.8)


@pytest.fixture
def random_tokens():
    """Queries, keys and values (1, 2, 197, 64) of normal numbers."""
    draw = torch.Generator().manual_seed(1)
    return torch.randn(3, 1, 2, 197, 64, generator=draw, dtype=torch.float64)


def test_random_tokens_have_the_shares_that_are_known_of_each_kind(random_tokens):
    shares = {kind: float(token_share(Layer(0, kind, *random_tokens).output()).mean()) for kind in OPERATORS}
    assert shares["normlinear"] == pytest.approx(0.13, abs=0.03)
    assert shares["linear"] == pytest.approx(0.13, abs=0.03)
    assert shares["neumannlinear"] == pytest.approx(0.012, abs=0.006)
    assert 0.7 < shares["softmax"] < 0.95
    assert shares["lininfsa"] < 1e-6


def test_on_random_tokens_a_constant_vector_is_near_the_perron_vector_too(random_tokens):
    measured = {
        name: float(value.mean())
        for name, value in perron_measures(Layer(0, "infsa", *random_tokens)).items()
    }
    assert 0.97 < measured["constant_left"] < 1
    assert 0.97 < measured["constant_right"] < 1
    assert measured["cosine_left"] < measured["constant_left"]
    assert abs(measured["correlation_right"]) < 0.3


def test_cosines_of_zero_vectors_do_not_exist():
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    assert cosine(x, torch.tensor([[4.0, 3.0], [1.0, 1.0]])).tolist() == pytest.approx(
        [0.96, math.nan], nan_ok=True
    )
    assert centred(x).tolist() == [[-0.5, 0.5], [0, 0]]


def test_a_head_without_a_positive_score_has_no_comparison(layer_of):
    layer = layer_of("infsa")
    layer.q[:, 0].abs_()
    layer.k[:, 0].abs_().neg_()
    compared = perron_measures(layer)["compared_left"]
    assert compared.tolist() == [[0, 1, 1]] * 2
    measured = perron_measures(layer)
    for name in ("cosine_left", "constant_right", "correlation_left"):
        assert measured[name][:, 0].isnan().all(), name
        assert not measured[name][:, 1:].isnan().any()


@pytest.mark.parametrize("kind", ["softmax", "infsa", "lininfsa", "neumannlinear"])
def test_a_tower_has_a_row_per_layer_and_head_that_fit_its_kind(kind):
    torch.manual_seed(0)
    visual = open_clip.create_model(f"ViT-T32-8-{kind}").visual.eval()
    images = torch.randn(2, 3, 48, 48)
    rows, across = spectra(visual, images)
    layers = len(visual.transformer.resblocks)
    heads = visual.transformer.resblocks[0].attn.num_heads
    assert [(row["layer"], row["head"]) for row in rows] == [
        (i, j) for i in range(layers) for j in range(heads)
    ]
    assert across.layers == layers
    for row in rows:
        assert all(math.isfinite(value) for value in row.values() if isinstance(value, float))
        assert row["converged"] == row["compared_left"] == row["compared_right"] == 1
        assert (row["token_share"] < 1e-6) == (kind == "lininfsa")
        if kind in ("softmax", "lininfsa"):
            assert row["radius"] == pytest.approx(1, abs=1e-6)
            assert row["absorption_min"] == pytest.approx(0.05, abs=1e-4)
            assert row["rows_above_one"] == 0
        else:
            assert 0 < row["radius"] < 1
        assert -1 <= row["correlation_left"] <= 1
        assert 0 < row["constant_left"] <= 1
    assert [row["layer"] for row in by_layer(rows)] == list(range(layers))
    alone = [spectra(visual, image.unsqueeze(0))[0] for image in images]
    for row, *each in zip(rows, *alone, strict=True):
        assert row["row_sum_max"] == pytest.approx(max(one["row_sum_max"] for one in each))
        assert row["absorption_min"] == pytest.approx(min(one["absorption_min"] for one in each))
        assert row["radius"] == pytest.approx(sum(one["radius"] for one in each) / 2)
    mean = sum(row["radius"] for row in rows if row["layer"] == 1) / heads
    assert by_layer(rows)[1]["radius"] == pytest.approx(mean)
    assert by_layer(rows)[1]["row_sum_max"] == max(row["row_sum_max"] for row in rows if row["layer"] == 1)
