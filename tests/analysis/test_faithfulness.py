"""Faithfulness of maps of whole models, and that it tells a map of what is looked at from any other."""

import pytest
import torch

from openclip_linattn.analysis import faithfulness as module
from openclip_linattn.analysis.deletion_picture import deletion_figure
from openclip_linattn.analysis.faithfulness import Faithfulness, FaithfulnessOptions, faithfulness
from openclip_linattn.analysis.images import open_pictures
from openclip_linattn.analysis.maps import TokenMaps
from openclip_linattn.analysis.models import trained_subjects
from openclip_linattn.analysis.targets import ZeroShot
from openclip_linattn.errors import UserError

CPU = torch.device("cpu")


@pytest.fixture
def loaded(runs):
    return trained_subjects([runs["neumannlinear"]], None)[0].load(CPU)


def test_a_random_tower_has_a_row_per_map_and_control_with_intervals(loaded, shapes):
    heard = []
    options = FaithfulnessOptions(methods=("class", "katz"), images=10, batch_size=4, steps=3)
    found = faithfulness(loaded, open_pictures(str(shapes)), options, heard.append)
    assert heard == [4, 4, 2]
    assert [row["map"] for row in found.rows] == ["class", "katz", "random", "centre"]
    for row in found.rows:
        assert row["images"] == row["images_with_boxes"] == 10
        for key in ("morf", "lerf", "gap", "roc_auc", "pr_auc"):
            low, high = row[f"{key}_interval"]
            assert low < row[key] < high
        assert row["gap"] == pytest.approx(row["morf"] - row["lerf"])
        assert 0 < row["box_area"] < 1
        assert len(found.morf[row["map"]]) == len(found.lerf[row["map"]]) == 4
    by_map = {row["map"]: row for row in found.rows}
    assert "above_random" not in by_map["random"]
    assert "above_centre" not in by_map["centre"]
    above = by_map["class"]["morf"] - by_map["random"]["morf"]
    assert by_map["class"]["above_random"] == pytest.approx(above)
    again = faithfulness(loaded, open_pictures(str(shapes)), options)
    assert again.rows == found.rows
    assert len(deletion_figure({"a": found, "b": found}).axes) == 4


def test_every_panel_of_the_picture_shows_its_curves_whole():
    """A model whose probabilities are low must not set the limits for one that is drawn after it."""
    names = ("class", "random", "centre")

    def curves(top):
        return Faithfulness([], *({name: [top, top / 2, 0.0] for name in names} for _ in range(2)))

    figure = deletion_figure({"low": curves(0.02), "high": curves(0.9)})
    for axes in figure.axes:
        low, high = axes.get_ylim()
        assert low == 0
        assert all(line.get_ydata().max() <= high for line in axes.lines)


def test_a_map_of_what_the_model_looks_at_beats_the_controls_and_its_boxes_are_found(
    loaded, shapes, monkeypatch
):
    """A stand-in that sees how much of the shape is left, and a map that is bright on the shape."""
    source = open_pictures(str(shapes))
    pictures = list(source.pictures(12))
    images = torch.stack([loaded.transform(each.image) for each in pictures])
    canvas = module.Canvas(loaded.transform)
    inside = torch.stack([canvas.inside(each) for each in pictures]).float()
    grid = inside.unflatten(1, (6, 8)).unflatten(3, (6, 8)).mean((2, 4))

    def maps(_visual, batch, methods, *, gamma):
        assert torch.equal(batch, images)
        return [
            TokenMaps(name, "none", (grid if name == "class" else -grid)[:, None, None]) for name in methods
        ]

    def of_targets(self, whole, _pictures, _target):
        def left(changed):
            same = (changed == whole).all(1)
            return (same * inside).sum((-2, -1)) / inside.sum((-2, -1)) * 0.9 + 0.01

        return left

    monkeypatch.setattr(module, "token_maps", maps)
    monkeypatch.setattr(ZeroShot, "of_targets", of_targets)
    options = FaithfulnessOptions(methods=("class", "received"), images=12, steps=12)
    rows = {row["map"]: row for row in faithfulness(loaded, source, options).rows}
    assert rows["class"]["morf"] > 0.8 > rows["random"]["morf"] > 0.4
    assert rows["class"]["above_random_interval"][0] > 0.1
    assert rows["class"]["above_centre_interval"][0] > 0
    assert rows["received"]["gap"] == pytest.approx(-rows["class"]["gap"], abs=0.05)
    assert rows["received"]["above_random_interval"][1] < 0
    assert rows["class"]["roc_auc"] > 0.95 > rows["centre"]["roc_auc"] > 0.6 > rows["random"]["roc_auc"] > 0.4
    assert rows["class"]["pr_auc"] > 0.9
    assert rows["random"]["pr_auc_interval"][1] < rows["class"]["pr_auc_interval"][0]


def test_the_class_that_is_followed_is_the_predicted_one_or_the_label(loaded, shapes):
    source = open_pictures(str(shapes), label_sets=["color"])
    pictures = list(source.pictures(6))
    images = torch.stack([loaded.transform(each.image) for each in pictures])
    judge = ZeroShot(loaded, source.label_sets[0])
    probabilities = judge.probabilities(images)
    assert probabilities.sum(-1).tolist() == pytest.approx([1] * 6, rel=1e-5)
    predicted = judge.of_targets(images, pictures, "predicted")(images)
    torch.testing.assert_close(predicted, probabilities.amax(-1))
    labelled = judge.of_targets(images, pictures, "label")(images)
    labels = [picture.labels[0] for picture in pictures]
    torch.testing.assert_close(labelled, probabilities[torch.arange(6), labels])


def test_the_most_unlikely_class_has_a_probability_that_can_be_divided_by(loaded, shapes):
    source = open_pictures(str(shapes))
    judge = ZeroShot(loaded, source.label_sets[0])
    images = torch.stack([loaded.transform(picture.image) for picture in source.pictures(2)])
    logits = judge.probabilities(images).log()
    judge._scale *= 200 / float(logits.amax() - logits.amin())
    least = judge.probabilities(images).min()
    assert 0 < float(least) < 1e-80


def test_images_without_boxes_have_no_box_scores(loaded, shapes, tmp_path):
    (tmp_path / "unrelated.xml").write_text("<annotation/>")
    source = open_pictures(str(shapes), boxes=tmp_path)
    options = FaithfulnessOptions(methods=("class",), images=2, steps=2)
    rows = faithfulness(loaded, source, options).rows
    assert all(row["images_with_boxes"] == 0 and "roc_auc" not in row for row in rows)


def test_what_cannot_be_measured_is_refused(loaded, shapes, tmp_path):
    for options, what in [
        ({"methods": ("gradcam",)}, "--map is 'gradcam'"),
        ({"unit": "token"}, "--unit is 'token'"),
        ({"fill": "noise"}, "--fill is 'noise'"),
        ({"aggregation": "sum"}, "--aggregation is 'sum'"),
        ({"target": "any"}, "--target is 'any'"),
        ({"steps": 0}, "--steps is 0"),
        ({"images": 0}, "--images is 0"),
    ]:
        with pytest.raises(UserError, match=what):
            FaithfulnessOptions(**options)
    next(open_pictures(str(shapes)).pictures(1)).image.save(tmp_path / "a.png")
    with pytest.raises(UserError, match="has no classes"):
        faithfulness(loaded, open_pictures(str(tmp_path)), FaithfulnessOptions(methods=("class",)))
