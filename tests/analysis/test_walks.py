"""Perron vectors, visits and Katz centrality against dense linear algebra and a simulated walk."""

import numpy as np
import pytest
import torch

from openclip_linattn.analysis.walks import absorption, arrivals, expected_visits, katz, perron, series
from openclip_linattn.analysis.weights.implied import Hop, hop_of
from openclip_linattn.analysis.weights.matrices import LowRank
from openclip_linattn.errors import UserError
from openclip_linattn.ops.reference import REFERENCES

KINDS = list(REFERENCES)
BATCH, HEADS, TOKENS = 2, 3, 23  # of the layers


def matrix_of(weights):
    return weights.times(torch.eye(weights.tokens, dtype=torch.float64).expand(*weights.shape[:2], -1, -1))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", KINDS)
def test_power_iteration_finds_the_dense_perron_vector(kind, side, layer_of):
    weights = hop_of(layer_of(kind)).weights
    found = perron(weights, side=side)
    assert found.converged.all()
    dense = matrix_of(weights)
    values, vectors = torch.linalg.eig(dense.mT if side == "left" else dense)
    best = values.abs().argmax(-1)
    torch.testing.assert_close(found.radius, values.abs().amax(-1), rtol=1e-7, atol=1e-9)
    expected = vectors.gather(-1, best[..., None, None].expand(-1, -1, TOKENS, 1)).squeeze(-1).real
    expected = expected * expected.sum(-1, keepdim=True).sign()
    torch.testing.assert_close(found.vector, expected, rtol=1e-5, atol=1e-6)
    assert float(found.vector.min()) > -1e-9


def test_a_matrix_that_swaps_tokens_has_its_uniform_perron_vector_all_the_same():
    swap = torch.eye(4, dtype=torch.float64)[[1, 0, 3, 2]][None, None]
    uneven = torch.diag(torch.tensor([1.0, 4.0, 1.0, 4.0], dtype=torch.float64)) @ swap
    found = perron(LowRank(uneven, torch.eye(4, dtype=torch.float64)[None, None]), side="right")
    assert found.converged
    assert float(found.radius) == pytest.approx(2)
    assert found.vector.flatten().tolist() == pytest.approx(
        [10**-0.5, 0.4**0.5, 10**-0.5, 0.4**0.5], abs=1e-6
    )


def test_a_matrix_without_cycles_has_no_perron_vector():
    upper = torch.ones(5, 5, dtype=torch.float64).triu(1)[None, None]
    for matrix in (upper, torch.zeros_like(upper)):
        found = perron(
            LowRank(matrix, torch.eye(5, dtype=torch.float64)[None, None]), side="left", most_steps=200
        )
        assert found.vector.isnan().all()
        assert not found.converged.any()


def test_an_iteration_that_was_cut_short_says_so(layer_of):
    found = perron(hop_of(layer_of("infsa")).weights, side="left", most_steps=2)
    assert not found.converged.any()
    assert found.vector.isnan().all()
    assert found.steps == 2
    assert float(found.residual.max()) > 1e-9


@pytest.mark.parametrize("kind", KINDS)
def test_visits_and_centralities_equal_the_dense_inverse(kind, layer_of):
    hop = hop_of(layer_of(kind), gamma=0.85)
    identity = torch.eye(TOKENS, dtype=torch.float64)
    inverse = torch.linalg.inv(identity - hop.gamma * matrix_of(hop.weights))
    start = torch.rand(BATCH, HEADS, TOKENS, 1, dtype=torch.float64)
    torch.testing.assert_close(expected_visits(hop, start), inverse.mT @ start, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(katz(hop), inverse.sum(-1) - 1, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(arrivals(hop), (inverse.sum(-2) - 1) / TOKENS, rtol=1e-9, atol=1e-10)


def test_the_katz_index_is_what_neumannlinear_makes_of_ones(layer_of):
    layer = layer_of("neumannlinear")
    ones = torch.ones(BATCH, HEADS, TOKENS, 1, dtype=torch.float64)
    expected = REFERENCES["neumannlinear"](layer.q, layer.k, ones, **layer.options).squeeze(-1)
    torch.testing.assert_close(katz(hop_of(layer)), expected, rtol=1e-9, atol=1e-10)


def simulated_visits(matrix, start, walks, rng):
    """Visits of walks that carry a weight: hops are drawn with each row's shares, and its sum multiplies the weight.

    A row that sums to at most one ends the walk with what is missing instead.
    """
    sums = matrix.sum(1)
    cumulative = np.cumsum(matrix, 1) / sums[:, None]
    visits = np.zeros((walks // 1000, len(matrix)))
    for batch in visits:
        token, weight = np.full(1000, start), np.ones(1000)
        while len(token):
            np.add.at(batch, token, weight / 1000)
            going = rng.random(len(token)) < np.minimum(sums[token], 0.98)
            token, weight = token[going], weight[going]
            weight = weight * sums[token] / np.minimum(sums[token], 0.98)
            token = (rng.random((len(token), 1)) < cumulative[token]).argmax(1)
    return visits


@pytest.mark.parametrize(("kind", "above"), [("infsa", True), ("neumannlinear", False), ("softmax", False)])
def test_expected_visits_are_those_of_simulated_walks(kind, above, layer_of):
    hop = hop_of(layer_of(kind, tokens=12), gamma=0.8)
    matrix = (hop.gamma * matrix_of(hop.weights))[0, 0].numpy()
    assert (float(absorption(hop)[0, 0].min()) < 0) == above, "rows above one are part of the test"
    start = torch.zeros(BATCH, HEADS, 12, 1, dtype=torch.float64)
    start[:, :, 3] = 1
    expected = expected_visits(hop, start)[0, 0].flatten().numpy()
    visits = simulated_visits(matrix, 3, 60_000, np.random.default_rng(0))
    error = visits.std(0, ddof=1) / len(visits) ** 0.5
    assert (abs(visits.mean(0) - expected) < 5 * error).all()
    assert (error < 0.1 * expected).all(), "the simulation could not tell a wrong value"


def test_absorption_is_what_the_rows_leave(layer_of):
    hop = hop_of(layer_of("linear"), gamma=0.8)
    torch.testing.assert_close(absorption(hop), torch.full((BATCH, HEADS, TOKENS), 0.2, dtype=torch.float64))


def test_walks_that_do_not_die_out_are_refused():
    ones = torch.ones(1, 1, 3, 1, dtype=torch.float64)
    hop = Hop(LowRank(ones, ones), torch.tensor(0.5, dtype=torch.float64))
    with pytest.raises(UserError, match="do not die out"):
        katz(hop)
    assert float(series(lambda x: x / 2, torch.tensor(0.5), torch.ones(1, 1, 1, 1))) == pytest.approx(4 / 3)
