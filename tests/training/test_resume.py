"""Resumed runs: the right checkpoint, the real numbers of steps and samples, and a word on what changed."""

import json
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from openclip_linattn.errors import UserError
from openclip_linattn.manifest import Manifest, Plan, read_manifest
from openclip_linattn.resume import epoch_of, epochs_done, latest_checkpoint
from openclip_linattn.train import open_manifest, run


def plan(samples: int, epochs: int) -> Plan:
    return Plan(samples, batch_size=8, world_size=1, workers=1, accum_freq=1, epochs=epochs)


def save(folder: Path, name: str, epoch: int = 0) -> Path:
    path = folder / "checkpoints" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"epoch": epoch, "state_dict": {}}, path)
    return path


def test_killed_again_and_again(tmp_path):
    """A process that is killed closes nothing: what it planned counts up to where the next one began."""
    path = tmp_path / "run.json"
    for start_epoch in (0, 2, 2, 5):
        manifest = Manifest(path)
        manifest.start(plan(32, epochs=10), start_epoch=start_epoch)
    assert manifest.content["planned"] == {"epochs": 10, "steps": 40, "samples": 320}
    manifest.finish("finished", plan(32, epochs=10), epochs_done=10)
    assert read_manifest(tmp_path)["seen"] == {"epochs": 10, "steps": 40, "samples": 320}
    assert [segment["end"] is None for segment in read_manifest(tmp_path)["segments"]] == [True] * 3 + [False]


def test_another_epoch_length_counts_the_real_steps_and_is_said(tmp_path):
    manifest = Manifest(tmp_path / "run.json")
    manifest.start(plan(32, epochs=1), start_epoch=0, held=40)
    manifest.finish("finished", plan(32, epochs=1), epochs_done=1)
    manifest = Manifest(tmp_path / "run.json")
    assert manifest.changes(plan(32, epochs=1), start_epoch=1) == []
    length, epochs = manifest.changes(plan(64, epochs=2), start_epoch=1)
    assert "4 steps of 8 samples before and has 8 steps of 8 from epoch 1" in length
    assert "planned for 1 epochs and now for 2" in epochs
    manifest.start(plan(64, epochs=2), start_epoch=1, held=40)
    manifest.finish("finished", plan(64, epochs=2), epochs_done=2)
    assert manifest.content["seen"] == {"epochs": 2, "steps": 12, "samples": 96}
    assert manifest.content["unique_samples_bound"] == 40


def test_an_older_checkpoint_takes_back_what_came_after_it(tmp_path):
    for start_epoch, done in ((0, 3), (3, 6), (2, 4)):
        manifest = Manifest(tmp_path / "run.json")
        manifest.start(plan(32, epochs=done), start_epoch=start_epoch)
        manifest.finish("finished", plan(32, epochs=done), epochs_done=done)
    assert manifest.content["seen"]["epochs"] == 4


def test_two_sets_may_hold_more_distinct_samples_than_one(tmp_path):
    for start_epoch, pattern, bound in ((0, "a.tar", 32), (1, "b.tar", 64), (2, "b.tar", 64)):
        manifest = Manifest(tmp_path / "run.json")
        done = start_epoch + 1
        manifest.start(plan(64, done), start_epoch=start_epoch, held=32, dataset={"pattern": pattern})
        manifest.finish("finished", plan(64, done), epochs_done=done)
        assert manifest.content["unique_samples_bound"] >= bound
    assert bound <= manifest.content["unique_samples_bound"] <= 96


def test_a_run_from_another_run_s_checkpoint_knows_what_that_had_seen(tmp_path):
    old = Manifest(tmp_path / "old" / "run.json")
    old.start(plan(32, epochs=3), start_epoch=0)
    old.finish("finished", plan(32, epochs=3), epochs_done=3)
    checkpoint = save(tmp_path / "old", "epoch_2.pt", 2)
    args = Namespace(
        name="new",
        logs=str(tmp_path),
        resume=str(checkpoint),
        model="ViT-T32-8-linear",
        force_image_size=None,
        force_context_length=None,
    )
    manifest = open_manifest(args, [], plan(32, epochs=4), None, 1)
    assert manifest.content["earlier"] == {
        "checkpoint": str(checkpoint),
        "epochs": 2,
        "steps": 8,
        "samples": 64,
    }
    manifest.finish("finished", plan(32, epochs=4), epochs_done=4)
    assert manifest.content["seen"] == {"epochs": 4, "steps": 16, "samples": 128}


def test_the_newest_checkpoint_is_what_openclip_takes(tmp_path):
    assert latest_checkpoint(tmp_path, save_most_recent=False) is None
    assert epochs_done(tmp_path) == 0
    latest = save(tmp_path, "epoch_latest.pt", 3)
    assert latest_checkpoint(tmp_path, save_most_recent=True) == latest
    assert epochs_done(tmp_path) == 3
    save(tmp_path, "epoch_2.pt", 2)
    assert latest_checkpoint(tmp_path, save_most_recent=True) == latest
    ten = save(tmp_path, "epoch_10.pt", 10)
    for most_recent in (False, True):
        with pytest.raises(UserError, match=r"epoch_latest\.pt, which is of epoch 3, though epoch_10\.pt"):
            latest_checkpoint(tmp_path, save_most_recent=most_recent)
    latest.unlink()
    save(tmp_path, "epoch_9.pt", 9)
    assert latest_checkpoint(tmp_path, save_most_recent=False) == ten
    with pytest.raises(UserError, match="would start anew"):
        latest_checkpoint(tmp_path, save_most_recent=True)
    save(tmp_path, "tmp.pt")
    with pytest.raises(UserError, match=r"tmp\.pt"):
        latest_checkpoint(tmp_path, save_most_recent=False)


def test_openclip_agrees_on_the_latest(tmp_path):
    from open_clip_train.main import get_latest_checkpoint

    for name in ("epoch_9.pt", "epoch_10.pt", "epoch_latest.pt"):
        path = save(tmp_path, name, 10)
        assert get_latest_checkpoint(str(tmp_path / "checkpoints"), remote=False) == str(path)
        assert latest_checkpoint(tmp_path, save_most_recent=False) == path
    tmp = save(tmp_path, "tmp.pt")
    assert get_latest_checkpoint(str(tmp_path / "checkpoints"), remote=False) == str(tmp)


def test_what_is_no_checkpoint_tells_no_epoch(tmp_path):
    broken = tmp_path / "epoch_latest.pt"
    assert epoch_of(broken) == 0
    broken.write_bytes(b"not a checkpoint")
    assert epoch_of(broken) == 0
    torch.save([1], broken)
    assert epoch_of(broken) == 0


def test_a_changed_command_is_warned_of_on_resume(flags, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("openclip_linattn.train.open_clip_main", lambda argv: None)
    command = ["--model", "ViT-T32-8-linear", *flags, "--name", "x"]
    assert run(command) == 0
    save(tmp_path / "logs" / "x", "epoch_1.pt", 1)
    assert "warning" not in capsys.readouterr().err
    assert run([*command, "--resume", "latest", "--epochs", "2", "--train-num-samples", "64"]) == 0
    assert "warning: an epoch had 4 steps of 32 samples before and has 2 steps" in capsys.readouterr().err
    facts = json.loads((tmp_path / "logs" / "x" / "run.json").read_text())
    assert facts["seen"] == {"epochs": 2, "steps": 6, "samples": 192}
