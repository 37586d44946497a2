"""The command `openclip-linattn`: screens that are not tested beside their own packages."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from openclip_linattn.cli import app, doctor, main
from openclip_linattn.registration import models

RUNNER = CliRunner()


def test_models_as_a_table():
    result = RUNNER.invoke(app, ["models", "B-16-normlinear"])
    assert result.exit_code == 0
    for text in ("ViT-B-16-normlinear-text", "ViT-B-16-normlinearmean-1024", "149.62", "86.19", "GMAC"):
        assert text in result.output
    assert "ViT-S-16" not in result.output


def test_models_as_json():
    result = RUNNER.invoke(app, ["models", "--json"])
    rows = {row["model"]: row for row in json.loads(result.stdout)}
    assert rows.keys() == models().keys()
    softmax, linear = rows["ViT-B-16-softmax"], rows["ViT-B-16-linear"]
    assert softmax["gmac"] * 2 == pytest.approx(41.086, abs=1e-3)
    assert 0.02 < 1 - linear["gmac"] / softmax["gmac"] < 0.03
    assert rows["ViT-B-16-infsa-text"]["text_attention"] == "infsa"


def test_no_model_of_that_name():
    result = RUNNER.invoke(app, ["models", "nothing-like-it"])
    assert result.exit_code == 1
    assert "nothing-like-it" in result.output


def test_doctor_finds_this_environment_in_order():
    result = RUNNER.invoke(app, ["doctor", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    packages = {row["name"]: row for row in report["packages"]}
    assert packages["webdataset"]["bounds"] == "<=0.2.86,>=0.2.5"
    assert all(row["ok"] for row in packages.values())
    assert report["autoload"] == "on"
    assert report["kernels"]["cpu"] == "torch"
    assert "numpy" in RUNNER.invoke(app, ["doctor"]).output


def test_doctor_names_what_is_outside_the_bounds(monkeypatch):
    stock = doctor.version
    monkeypatch.setattr(doctor, "version", lambda name: "2.4.1" if name == "numpy" else stock(name))
    monkeypatch.setenv("OPENCLIP_LINATTN_AUTOLOAD", "0")
    result = RUNNER.invoke(app, ["doctor", "--json"])
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert [row["name"] for row in report["packages"] if not row["ok"]] == ["numpy"]
    assert report["autoload"] == "off: OPENCLIP_LINATTN_AUTOLOAD=0"


def test_train_hands_help_to_openclip():
    result = subprocess.run(
        [sys.executable, "-m", "openclip_linattn.cli", "train", "--help"],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert result.returncode == 0
    assert "--train-data-upsampling-factors" in result.stdout


def test_wrong_input_is_one_sentence_and_status_2(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(
        sys, "argv", ["openclip-linattn", "quickstart", "--tiny", "--size", "ViT-X", "--out", str(tmp_path)]
    )
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert "error: there is no model ViT-X-softmax" in error
    assert "Traceback" not in error
    assert list(tmp_path.iterdir()) == []
