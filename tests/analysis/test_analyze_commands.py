"""The screens of `openclip-linattn analyze` in their smoke forms, and how they end for wrong input."""

import json
import re

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from openclip_linattn.analysis.gallery import ModelMaps, write_gallery
from openclip_linattn.analysis.maps import TokenMaps
from openclip_linattn.analysis.models import trained_subjects
from openclip_linattn.cli import app
from openclip_linattn.cli.analyze.options import with_interval
from openclip_linattn.cli.analyze.spectrum import _show_undefined
from openclip_linattn.errors import UserError

RUNNER = CliRunner()


def run(*words):
    result = RUNNER.invoke(app, ["analyze", *map(str, words)])
    assert result.exit_code == 0, result.output
    return result


def test_spectrum_prints_a_table_per_checkpoint_and_keeps_every_head(runs, shapes, tmp_path):
    out = tmp_path / "spectrum.json"
    result = run("spectrum", *runs.values(), "--data", shapes, "--tiny", "--out", out)
    for words in ("ViT-T32-8-softmax", "ViT-T32-8-neumannlinear", "radius", "correlation", "own layers"):
        assert words in result.stdout
    found = json.loads(out.read_text())
    assert [each["attention"] for each in found] == ["softmax", "neumannlinear"]
    assert all(each["images"] == 2 and each["sum_over_layers"]["layers"] > 1 for each in found)
    printed = run("spectrum", runs["softmax"], "--data", shapes, "--tiny", "--json")
    assert json.loads(printed.stdout) == found[:1]


def test_smoothing_measures_random_and_trained_towers_and_draws_them(runs, tmp_path):
    picture = tmp_path / "smoothing.png"
    words = (
        "smoothing",
        runs["softmax"],
        "--random",
        "ViT-T32-8-lin*",
        "--tiny",
        "--picture",
        picture,
        "--json",
    )
    rows = json.loads(run(*words).stdout)
    about = {(row["model"], row["attention"], row["trained"], row["tokens"]) for row in rows}
    kinds = ("linear", "linearelu", "lininfsa")
    names = {("ViT-T32-8-softmax", "softmax", True)} | {(f"ViT-T32-8-{kind}", kind, False) for kind in kinds}
    assert {each[:3] for each in about} == names
    assert {each[3] for each in about} == {17, 65}
    with Image.open(picture) as drawn:
        assert drawn.width > 1000
    assert "largest / mean" in run("smoothing", runs["softmax"], "--tiny").stdout


def test_smoothing_without_a_checkpoint_takes_every_kind_at_random(monkeypatch):
    monkeypatch.setattr("openclip_linattn.cli.analyze.smoothing.RANDOM_MODELS", "ViT-T32-8-")
    rows = json.loads(run("smoothing", "--tiny", "--json").stdout)
    assert len({row["attention"] for row in rows}) == 8
    assert not any(row["trained"] for row in rows)


def test_maps_writes_a_gallery_that_stands_alone(runs, shapes, tmp_path):
    out = tmp_path / "gallery"
    result = run(
        "maps",
        *runs.values(),
        "--data",
        shapes,
        "--map",
        "class",
        "--map",
        "rollout",
        "--tiny",
        "--out",
        out,
        "--json",
    )
    report = json.loads(result.stdout)
    names = {
        "maps.png",
        "layers-ViT-T32-8-softmax.png",
        "layers-ViT-T32-8-neumannlinear.png",
        "index.html",
        "maps.npz",
    }
    assert {path.name for path in out.iterdir()} == names
    assert sorted(report["files"]) == sorted(str(out / name) for name in names)
    page = (out / "index.html").read_text()
    assert not re.search(r'(src|href)="(?!data:)', page)
    with np.load(out / "maps.npz") as arrays:
        values = arrays["ViT-T32-8-softmax:class"]
        layers, heads = values.shape[1:3]
        assert values.shape == (2, layers, heads, 6, 6)
        assert arrays["ViT-T32-8-softmax:rollout"].shape == (2, layers, 1, 6, 6)
    # Two pictures with two maps of two models each, and every layer and head of both models.
    assert page.count("<img ") == 2 * (1 + 4) + 2 * layers * heads
    assert len(report["maps"]) == 2 * 2 * layers
    assert all(row["least"] <= 1 <= row["contrast"] for row in report["maps"])
    assert "largest / mean" in run("maps", runs["softmax"], "--data", shapes, "--tiny", "--out", out).stdout


def test_faithfulness_shows_controls_and_boxes_beside_the_maps(runs, shapes, tmp_path):
    words = ("faithfulness", runs["softmax"], "--data", shapes, "--label-set", "color", "--tiny")
    picture = tmp_path / "curves.png"
    result = run(*words, "--picture", picture)
    for word in (
        "MoRF above random",
        "ROC-AUC",
        "rollout",
        "random",
        "centre",
        "patch, fill mean, 4 steps, ratio",
    ):
        assert word in result.stdout
    assert picture.is_file()
    found = json.loads(run(*words, "--json").stdout)
    assert [row["map"] for row in found["rows"]] == ["class", "arrivals", "rollout", "random", "centre"]
    assert len(found["morf"]["ViT-T32-8-softmax"]["class"]) == 5


def test_a_spectrum_that_was_not_reached_is_said(capsys):
    compared = {"compared_left": 1.0, "compared_right": 0.5}
    heads = [{"converged": 0.5, **compared}, {"converged": 1.0, **dict.fromkeys(compared, 1.0)}]
    _show_undefined([{"heads": heads}])
    printed = capsys.readouterr().out
    assert "In 1 of 2 heads the power iteration found no Perron vector" in printed
    assert "In 1 of 2 heads ReLU(QK^T) has no Perron vector" in printed
    _show_undefined([{"heads": heads[1:]}])
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("spectrum", "{run}", "--data", "{shapes}", "--gamma", "1"), "gamma is 1"),
        (("spectrum", "{run}", "--data", "{shapes}", "--images", "0"), "--images is 0"),
        (("spectrum", "{shapes}", "--data", "{shapes}"), "holds no epoch_N.pt"),
        (("maps", "{run}", "--data", "{shapes}", "--map", "gradcam"), "no map 'gradcam'"),
        (("maps", "{run}", "--data", "{shapes}", "--layer", "77"), "no layer 77"),
        (("smoothing", "{run}", "--tokens", "60"), "--tokens has 60"),
        (("smoothing", "{run}", "--picture", "x.bmp"), "must end in one of"),
        (("smoothing", "--random", "RN50", "--tiny"), "the image tower of RN50 is none"),
        (("maps", "{run}", "--data", "{shapes}", "--out", "file"), "file is no folder"),
        (("maps", "{run}", "--data", "{shapes}", "--out", "file/maps"), "file is no folder"),
        (("spectrum", "{run}", "--data", "{shapes}", "--out", "none/x.json"), "cannot be written"),
        (("smoothing", "{run}", "--out", "none/x.json"), "cannot be written"),
        (("faithfulness", "{run}", "--data", "{shapes}", "--out", "none/x.json"), "cannot be written"),
        (("faithfulness", "{run}", "--data", "{shapes}", "--unit", "token"), "--unit is 'token'"),
        (("faithfulness", "{run}", "--data", "{shapes}", "--label-set", "size"), "no label set 'size'"),
    ],
)
def test_wrong_input_is_said_in_a_sentence(words, what, runs, shapes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    result = RUNNER.invoke(
        app, ["analyze", *(word.format(run=runs["softmax"], shapes=shapes) for word in words)]
    )
    assert result.exit_code != 0
    assert isinstance(result.exception, UserError)
    assert what in str(result.exception)
    assert not list(tmp_path.glob("maps*"))


def test_a_folder_that_cannot_be_made_is_said(tmp_path):
    (tmp_path / "file").touch()
    maps = TokenMaps("class", "softmax", torch.ones(1, 1, 1, 2, 2))
    with pytest.raises(UserError, match="file/maps cannot be made"):
        write_gallery(
            [ModelMaps("m", torch.zeros(1, 3, 8, 8), [maps])],
            ["a"],
            tmp_path / "file/maps",
            layer=None,
            head=None,
        )


@pytest.mark.parametrize(
    ("row", "shown"),
    [
        ({"x": 0.5, "x_interval": [0.25, 0.75]}, "0.500 [0.250, 0.750]"),
        ({"x": -0.00031, "x_interval": [-0.0012, 0.0004]}, "-0.00031 [-0.0012, 0.0004]"),
        ({"x": 0.001, "x_interval": [-0.02, 0.02]}, "0.001 [-0.020, 0.020]"),
        ({"x": 0.0}, "0"),
        ({"x": None}, "-"),
    ],
)
def test_small_numbers_are_not_shown_as_zeros(row, shown):
    assert with_interval("x")(row) == shown


def test_one_model_for_several_runs_must_be_theirs(runs):
    both = list(runs.values())
    with pytest.raises(
        UserError, match=r"is for all checkpoints, and .*neumannlinear records ViT-T32-8-neumann"
    ):
        trained_subjects(both, "ViT-T32-8-softmax")
    assert len(trained_subjects(both, None)) == 2
    alone = trained_subjects([runs["softmax"]], "ViT-T32-8-linear")
    assert [each.checkpoint.model for each in alone] == ["ViT-T32-8-linear"]
