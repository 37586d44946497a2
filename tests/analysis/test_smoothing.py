"""Measures of rows of weights on weights that are known, and against the number of tokens."""

import math

import open_clip
import pytest
import torch

from openclip_linattn.analysis.models import Subject, random_subjects
from openclip_linattn.analysis.smoothing import measure_row, over_layers, smoothing_rows
from openclip_linattn.analysis.smoothing_picture import smoothing_figure
from openclip_linattn.analysis.token_counts import SmoothingOptions, smoothing_of
from openclip_linattn.errors import UserError
from openclip_linattn.ops import OPERATORS


def test_equal_weights_are_even_and_do_not_answer_to_the_query():
    found = measure_row(lambda query: torch.full((50,), 0.2) + 0 * query.sum(), torch.ones(4))
    assert found.entropy == pytest.approx(math.log(50), rel=1e-5)
    assert found.evenness == pytest.approx(1)
    assert found.contrast == pytest.approx(1)
    assert found.gradient == found.relative_gradient == 0


def test_known_weights_have_known_measures():
    """w = (2 a, a, a, 0) for a query (a, b): p = (1/2, 1/4, 1/4, 0)."""
    factors = torch.tensor([2.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    found = measure_row(lambda query: factors * query[0], torch.tensor([3.0, 4.0], dtype=torch.float64))
    assert found.entropy == pytest.approx(1.5 * math.log(2))
    assert found.evenness == pytest.approx(0.75)
    assert found.contrast == pytest.approx(2)
    assert found.gradient == pytest.approx(6**0.5)
    assert found.relative_gradient == pytest.approx(5 / 3)


def test_a_row_without_weight_has_a_gradient_only():
    found = measure_row(lambda query: torch.zeros(4) * query.sum(), torch.ones(2))
    assert math.isnan(found.contrast)
    assert math.isnan(found.entropy)
    assert found.gradient == 0


@pytest.mark.parametrize("kind", OPERATORS)
def test_every_kind_of_tower_is_measured_layer_by_layer(kind):
    torch.manual_seed(0)
    visual = open_clip.create_model(f"ViT-T32-8-{kind}").visual.eval()
    images = torch.randn(1, 3, 48, 48)
    layers = smoothing_rows(visual, images, rows=3)
    heads = visual.transformer.resblocks[0].attn.num_heads
    assert [row["layer"] for row in layers] == list(range(len(visual.transformer.resblocks)))
    for row in layers:
        assert (row["tokens"], row["rows"]) == (37, 3 * heads)
        assert 1 <= row["contrast"] <= 37
        assert 0 < row["evenness"] <= 1
        assert row["gradient"] > 0
    mean = over_layers(layers)
    assert mean["contrast"] == pytest.approx(sum(row["contrast"] for row in layers) / len(layers))
    assert smoothing_rows(visual, images, rows=3) == layers, "the queries are drawn from a seed"
    assert smoothing_rows(visual, images, rows=3, seed=1) != layers


def test_a_layer_without_weights_leaves_the_mean_to_the_others():
    layers = [
        {
            "tokens": 5,
            "empty": 1.0,
            **dict.fromkeys(("entropy", "evenness", "contrast", "relative_gradient")),
        },
        {"tokens": 5, "empty": 0.0, "entropy": 1, "evenness": 0.5, "contrast": 3, "relative_gradient": 2},
    ]
    mean = over_layers([{**row, "gradient": 1.0} for row in layers])
    assert (mean["contrast"], mean["empty"], mean["gradient"]) == (3, 0.5, 1)


def test_token_counts_come_from_the_image_size_and_images_are_drawn():
    (subject,) = random_subjects(["ViT-T32-8-linear"])
    heard = []
    found = smoothing_of(subject, None, SmoothingOptions([16, 64], rows=2), torch.device("cpu"), heard.append)
    assert [(row["tokens"], row["image_size"], row["trained"]) for row in found] == [
        (17, 32, False),
        (65, 64, False),
    ]
    assert heard == [1, 1]
    assert all(row["attention"] == "linear" and row["layers"][0]["layer"] == 0 for row in found)
    axes = smoothing_figure([{**row, "model": "m"} for row in found]).axes
    assert [list(line.get_xdata()) for line in axes[0].lines] == [[17, 65]]


def test_an_axis_is_logarithmic_where_its_measure_spans_more_than_a_factor_of_ten():
    measured = {"evenness": 0.5, "gradient": 1.0, "relative_gradient": 2.0}
    about = {"model": "m", "attention": "softmax", "trained": True}
    rows = [
        {**about, **measured, "tokens": 65, "contrast": 2.0},
        {**about, **measured, "tokens": 257, "contrast": 30},
    ]
    assert [axes.get_yscale() for axes in smoothing_figure(rows).axes] == ["log"] + ["linear"] * 3


def test_stock_models_have_their_patches_too():
    from openclip_linattn.analysis.token_counts import _pixels

    assert _pixels(Subject(random="ViT-B-32"), 49) == 224
    assert _pixels(Subject(random="ViT-S-16-normlinear"), 196) == 224


def test_numbers_that_are_no_squares_and_names_that_fit_nothing_are_refused():
    with pytest.raises(UserError, match="--tokens has 65"):
        SmoothingOptions([65])
    with pytest.raises(UserError, match="--rows is 0"):
        SmoothingOptions([64], rows=0)
    with pytest.raises(UserError, match="begins with 'ViT-T7'"):
        random_subjects(["ViT-T7*"])
    names = [subject.random for subject in random_subjects(["ViT-T32-8-n*", "ViT-T32-8-normlinear"])]
    assert sorted(names) == ["ViT-T32-8-neumannlinear", "ViT-T32-8-normlinear", "ViT-T32-8-normlinearmean"]
