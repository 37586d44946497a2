"""A softmax teacher distilled into the linear form of itself, by the recipe's script, through OpenCLIP's own flags."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import open_clip
import pytest
import torch
from open_clip_train.params import parse_args

from openclip_linattn.data.drawn.shapes import write_shapes
from openclip_linattn.errors import UserError
from openclip_linattn.train import check_command

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "distill.sh"


def call(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=cwd,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "OPENCLIP_LINATTN_PYTHON": sys.executable,
            **environment,
        },
        check=False,
    )


@pytest.mark.slow
def test_the_recipe_converts_distils_and_evaluates(tmp_path):
    write_shapes(tmp_path / "shapes", samples=64, test_samples=16, samples_per_shard=32)
    torch.manual_seed(0)
    teacher = open_clip.create_model("ViT-T32-8-softmax")
    torch.save({"epoch": 1, "name": "t", "state_dict": teacher.state_dict()}, tmp_path / "teacher.pt")
    done = call(
        *("teacher.pt", "normlinear", "out", "--train-data", "shapes/{00000..00001}.tar"),
        *("--dataset-type", "webdataset", "--batch-size", "16", "--workers", "1", "--epochs", "1"),
        *("--warmup", "1", "--precision", "fp32", "--log-every-n-steps", "1", "--name", "student"),
        cwd=tmp_path,
        MODEL="ViT-T32-8-softmax",
        CONVERT="--last 2",
        EVAL="shapes",
    )
    assert done.returncode == 0, done.stderr
    log = (tmp_path / "out/student/out.log").read_text()
    assert "Distill_loss:" in log
    assert "kind=normlinear" in log
    run = json.loads((tmp_path / "out/student/run.json").read_text())
    assert (run["model"], run["seen"]["samples"]) == ("ViT-T32-8-normlinear-last2", 64)
    assert "optimizer state and epoch are not taken over" in done.stderr
    rows = (tmp_path / "out/student/checkpoints/zeroshot.jsonl").read_text().splitlines()
    assert {json.loads(row)["label_set"] for row in rows} == {"color x shape", "color", "shape"}
    before = torch.load(tmp_path / "out/converted.pt", weights_only=True)["state_dict"]
    after = torch.load(tmp_path / "out/student/checkpoints/epoch_1.pt", weights_only=True)["state_dict"]
    assert after.keys() == before.keys()
    assert not torch.equal(after["visual.proj"], before["visual.proj"])
    torch.testing.assert_close(before["visual.proj"], teacher.visual.proj.detach())


def test_the_recipe_says_how_it_is_called(tmp_path):
    done = call("teacher.pt", cwd=tmp_path)
    assert done.returncode == 2
    assert "bash scripts/distill.sh TEACHER KIND OUT" in done.stderr


@pytest.mark.slow
def test_the_recipe_does_not_take_one_conversion_for_another(tmp_path):
    torch.save(open_clip.create_model("ViT-T32-8-softmax").state_dict(), tmp_path / "teacher.pt")
    model = {"MODEL": "ViT-T32-8-softmax"}
    flags = ("--train-data", "nowhere.tar")
    first = call("teacher.pt", "normlinear", "out", *flags, cwd=tmp_path, **model)
    assert "nowhere.tar" in first.stderr  # converted, and then the training refused its data
    other = call("teacher.pt", "infsa", "out", *flags, cwd=tmp_path, **model)
    assert other.returncode == 2
    assert (
        "out holds the conversion of teacher.pt to normlinear, MODEL=ViT-T32-8-softmax, not of"
        in other.stderr
    )


@pytest.mark.parametrize(
    ("arguments", "environment", "words"),
    [
        ((), {"EVAL": "\nnosuch"}, "EVAL: 1 of 1 shard(s) of 'nosuch' do not exist"),
        ((), {}, "(--model NAME is MODEL=NAME here, before bash)"),
        (("--model", "ViT-B-16"), {}, "MODEL=NAME"),
        (("--model=ViT-B-16",), {}, "MODEL=NAME"),
    ],
)
def test_the_recipe_refuses_before_it_leaves_anything(tmp_path, arguments, environment, words):
    (tmp_path / "teacher.pt").touch()
    done = call(
        "teacher.pt", "linear", "out", "--train-data", "x.tar", *arguments, cwd=tmp_path, **environment
    )
    assert done.returncode == 2
    assert words in done.stderr
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "teacher.pt"]


def command(tmp_path: Path, *flags: str) -> argparse.Namespace:
    (tmp_path / "weights.pt").touch()
    return parse_args(["--model", "ViT-T32-8-normlinear", "--logs", str(tmp_path), "--name", "x", *flags])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--distill-model ViT-T32-8-softmax", "go together"),
        ("--distill-pretrained weights.pt", "go together"),
        (
            "--distill-model ViT-T32-8-softmax --distill-pretrained no.pt",
            "no.pt: no such file, and no pretrained tag",
        ),
        ("--distill-model ViT-T32-8-sofmax --distill-pretrained weights.pt", "closest are ViT-T32-8-softmax"),
        ("--distill-model ViT-T32-8-softmax --distill-pretrained weights.pt --accum-freq 2", "--accum-freq"),
        (
            "--distill-model ViT-B-16 --distill-pretrained weights.pt",
            r"224, 224\) px and texts of 77 tokens, .* \(48, 48\) px and 32 tokens",
        ),
        (
            "--distill-model ViT-T32-8-softmax --distill-pretrained weights.pt --force-image-size 64",
            r"\(64, 64\) px",
        ),
        (
            "--distill-model ViT-T32-8-softmax --distill-pretrained weights.pt --force-context-length 16",
            "16 tokens",
        ),
    ],
)
def test_teachers_that_cannot_teach_are_refused_before_the_model_is_built(
    tmp_path, monkeypatch, flags, words
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=words):
        check_command(command(tmp_path, *flags.split()))


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--distill-model ViT-T64-8-softmax --distill-pretrained weights.pt",
        "--distill-model hf-hub:some/model --distill-pretrained weights",
        "--distill-model ViT-B-16 --distill-pretrained laion400m_e32 --model ViT-B-16-normlinear",
    ],
)
def test_teachers_that_can_teach_are_not(tmp_path, monkeypatch, flags):
    monkeypatch.chdir(tmp_path)
    check_command(command(tmp_path, *flags.split()))
