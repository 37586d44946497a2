"""The training entrypoint for real: OpenCLIP's main on webdataset shards, alone and under torchrun."""

import json
from pathlib import Path

import open_clip
import pytest
import torch

MODEL = "ViT-T32-8-normlinear"
HERE = Path(__file__).parent


def manifest(tmp_path: Path, name: str) -> dict:
    return json.loads((tmp_path / "logs" / name / "run.json").read_text())


@pytest.mark.slow
def test_train_resume_and_evaluate(run, flags, tmp_path, shards):
    command = ("-m", "openclip_linattn.train", "--model", MODEL, "--name", "a", *flags)
    first = run(*command)
    assert first.returncode == 0, first.stderr
    facts = manifest(tmp_path, "a")
    assert facts["status"] == "finished"
    assert (facts["model"], facts["attention"], facts["text_attention"]) == (MODEL, "normlinear", "softmax")
    assert facts["parameters"]["total"] == sum(p.numel() for p in open_clip.create_model(MODEL).parameters())
    assert facts["planned"] == facts["seen"] == {"epochs": 1, "steps": 4, "samples": 128}
    assert facts["unique_samples_bound"] == 128
    assert facts["dataset"]["usable_share"] == 1.0
    assert torch.__version__.startswith(facts["versions"]["torch"])
    log = (tmp_path / "logs" / "a" / "out.log").read_text()
    assert "kind=normlinear, heads=2, train_tokens=37" in log
    assert "128/128 (100%)" in log

    resumed = run(*command, "--epochs", "3", "--train-num-samples", "64", "--resume", "latest")
    assert resumed.returncode == 0, resumed.stderr
    facts = manifest(tmp_path, "a")
    assert [segment["start_epoch"] for segment in facts["segments"]] == [0, 1]
    assert facts["seen"] == {"epochs": 3, "steps": 4 + 4, "samples": 128 + 128}
    assert facts["planned"] == facts["seen"]

    last = tmp_path / "logs" / "a" / "checkpoints" / "epoch_3.pt"
    evaluation = (
        *("-m", "clip_benchmark.cli", "eval", "--model", MODEL, "--pretrained", str(last)),
        *("--dataset", "wds/shapes", "--dataset_root", str(shards), "--split", "test", "--batch_size", "8"),
        *("--num_workers", "0", "--output", str(tmp_path / "result.json")),
    )
    scored = run(*evaluation)
    assert scored.returncode == 0, scored.stderr
    assert 0 <= json.loads((tmp_path / "result.json").read_text())["metrics"]["acc1"] <= 1


@pytest.mark.slow
def test_unmodified_openclip_trains_a_full_size_model(run, tmp_path):
    result = run(
        *("-m", "open_clip_train.main", "--model", "ViT-S-16-normlinear", "--dataset-type", "synthetic"),
        *(
            "--train-num-samples",
            "4",
            "--batch-size",
            "2",
            "--epochs",
            "1",
            "--workers",
            "0",
            "--device",
            "cpu",
        ),
        *("--precision", "fp32", "--logs", str(tmp_path), "--name", "s", "--save-frequency", "0"),
        *("--log-every-n-steps", "1", "--warmup", "1"),
    )
    assert result.returncode == 0, result.stderr
    log = (tmp_path / "s" / "out.log").read_text()
    assert "kind=normlinear, heads=6, train_tokens=197" in log
    assert "Train Epoch: 0" in log


@pytest.mark.slow
@pytest.mark.parametrize("model", ["ViT-T32-8-infsa", "ViT-T32-8-softmax"])
def test_two_processes_train(run, flags, tmp_path, model):
    result = run(
        *("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "--"),
        *(str(HERE / "train_ddp_on_cpu.py"), "--model", model, "--name", "two", *flags, "--batch-size", "16"),
        *("--local-loss", "--gather-with-grad", "--save-most-recent"),
    )
    assert result.returncode == 0, result.stderr
    facts = manifest(tmp_path, "two")
    assert (facts["world_size"], facts["batch_size"]) == (2, 32)
    assert facts["seen"] == {"epochs": 1, "steps": 4, "samples": 128}
    weights = tmp_path / "logs" / "two" / "checkpoints" / "epoch_1.pt"
    assert next(iter(torch.load(weights, weights_only=True)["state_dict"])).startswith("module.")
    open_clip.create_model(model, pretrained=str(weights))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "models"),
    [
        (2, ("ViT-T32-8-softmax", "ViT-T32-8-normlinear-text", "ViT-T32-8-neumannlinear")),
        (4, ("ViT-T32-8-normlinear",)),
    ],
)
def test_several_processes_equal_one(run, processes, models):
    result = run(
        *("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)),
        *(str(HERE / "ddp_equality.py"), *models),
    )
    assert result.returncode == 0, result.stderr
    for model in models:
        for rank in range(processes):
            assert f"{model}, rank {rank} of {processes}: equal" in result.stdout


@pytest.mark.slow
def test_torchrun_as_documented_reaches_the_models(run, flags):
    """`torchrun -m -- openclip_linattn.train --logs ...`: the `--` keeps torchrun from reading OpenCLIP's flags."""
    result = run(
        *("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "--"),
        *("openclip_linattn.train", "--model", MODEL, *flags, "--batch-size", "16", "--workers", "3"),
    )
    assert result.returncode != 0
    assert "4 < 6" in result.stderr
