"""Resumed runs: the right checkpoint, the real numbers of steps and samples, and a word on what changed."""

import json
import struct
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from open_clip_train.main import LATEST_CHECKPOINT_NAME, get_latest_checkpoint

from openclip_linattn.data.training.epoch_shape import Reading
from openclip_linattn.epochs import damage, training_damage
from openclip_linattn.errors import UserError
from openclip_linattn.manifest import Manifest, Plan, read_manifest
from openclip_linattn.resume import (
    Latest,
    check_resumed_file,
    epoch_of,
    epochs_done,
    resumed_epoch,
    settle_latest,
)
from openclip_linattn.run_record import open_record
from openclip_linattn.train import run


def plan(samples: int, epochs: int) -> Plan:
    return Plan(samples, batch_size=8, world_size=1, workers=1, accum_freq=1, epochs=epochs)


def save(folder: Path, name: str, epoch: int = 0) -> Path:
    path = folder / "checkpoints" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"epoch": epoch, "state_dict": {"weight": torch.ones(64)}, "optimizer": {}}, path)
    return path


def cut(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[:-100])
    return path


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


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


def test_a_set_that_has_grown_bounds_by_all_that_it_may_have_held(tmp_path):
    for start_epoch, held, bound in ((0, 16, 16), (1, 48, 64)):
        manifest = Manifest(tmp_path / "run.json")
        done = start_epoch + 1
        manifest.start(plan(64, done), start_epoch=start_epoch, held=held, dataset={"pattern": "a.tar"})
        manifest.finish("finished", plan(64, done), epochs_done=done)
        assert manifest.content["unique_samples_bound"] == bound


def test_two_sets_may_hold_more_distinct_samples_than_one(tmp_path):
    for start_epoch, pattern, bound in ((0, "a.tar", 32), (1, "b.tar", 64), (2, "b.tar", 64)):
        manifest = Manifest(tmp_path / "run.json")
        done = start_epoch + 1
        manifest.start(plan(64, done), start_epoch=start_epoch, held=32, dataset={"pattern": pattern})
        manifest.finish("finished", plan(64, done), epochs_done=done)
        assert manifest.content["unique_samples_bound"] >= bound
    assert bound <= manifest.content["unique_samples_bound"] <= 96


def test_how_a_segment_ended_is_written_and_forgotten_by_the_next(tmp_path):
    path = tmp_path / "run.json"
    Manifest(path).start(plan(32, epochs=4), start_epoch=0)
    manifest = Manifest(path)
    manifest.start(plan(32, epochs=4), start_epoch=1)
    manifest.finish("interrupted", plan(32, epochs=4), epochs_done=2, signal="SIGUSR1")
    facts = read_manifest(tmp_path)
    assert [segment["status"] for segment in facts["segments"]] == ["killed", "interrupted"]
    assert (facts["status"], facts["signal"], facts["segments"][1]["signal"]) == (
        "interrupted",
        "SIGUSR1",
        "SIGUSR1",
    )
    Manifest(path).start(plan(32, epochs=4), start_epoch=2)
    facts = read_manifest(tmp_path)
    assert (facts["status"], "signal" in facts) == ("running", False)


@pytest.mark.parametrize(
    ("epochs", "resampled", "bound", "expected"),
    [(1, False, 32, 32), (3, False, 80, 63), (1, True, 32, 27), (3, True, 80, 56), (100, True, 80, 80)],
)
def test_different_samples_are_bounded_and_expected(tmp_path, epochs, resampled, bound, expected):
    """32 draws an epoch of 80 samples: without replacement an epoch misses 3 in 5, with it (79/80)^32."""
    coverage = Reading(80, 4, batch_size=8, world_size=1, workers=1).coverage(32, resampled=resampled)
    manifest = Manifest(tmp_path / "run.json")
    manifest.start(plan(32, epochs), start_epoch=0, held=80, coverage=coverage)
    found = manifest.content["unique_samples_bound"], manifest.content["unique_samples_expected"]
    assert found == (bound, expected)
    manifest.finish("interrupted", plan(32, epochs), epochs_done=1)
    found = manifest.content["unique_samples_bound"], manifest.content["unique_samples_expected"]
    assert found == ((32, 32) if not resampled else (32, 27))
    manifest = Manifest(tmp_path / "run.json")
    manifest.start(plan(32, epochs), start_epoch=1, held=80, coverage=coverage)
    assert manifest.content["unique_samples_expected"] == expected


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
    args.epochs = 4
    record = open_record(args, [], plan(32, epochs=4), None, Latest(checkpoint, 2), 1)
    content = record.manifest.content
    assert content["earlier"] == {"checkpoint": str(checkpoint), "epochs": 2, "steps": 8, "samples": 64}
    record.finish("finished")
    assert content["seen"] == {"epochs": 4, "steps": 16, "samples": 128}
    assert (content["unique_samples_bound"], content["unique_samples_expected"]) == (128, None)


@pytest.mark.parametrize("most_recent", [False, True])
@pytest.mark.parametrize(
    ("whole", "broken", "epoch"),
    [
        ({}, (), 0),
        ({"epoch_9.pt": 9, "epoch_10.pt": 10}, (), 10),
        ({"epoch_1.pt": 1, "epoch_2.pt": 2}, ("epoch_3.pt", "epoch_10.pt"), 2),
        ({"epoch_2.pt": 2, "epoch_latest.pt": 3}, (), 3),
        ({"epoch_2.pt": 2, "epoch_latest.pt": 2}, (), 2),
        ({"epoch_10.pt": 10, "epoch_latest.pt": 3}, (), 10),
        ({"epoch_2.pt": 2}, ("epoch_latest.pt",), 2),
        ({"epoch_2.pt": 2}, ("epoch_latest.pt", "tmp.pt"), 2),
        ({"epoch_latest.pt": 2, "tmp.pt": 3}, (), 3),
        ({"tmp.pt": 3}, (), 3),
        ({"epoch_latest.pt": 3}, ("tmp.pt",), 3),
        ({"epoch_latest.pt": 3, "tmp.pt": 3}, (), 3),
        ({"epoch_4.pt": 4, "epoch_latest.pt": 3, "tmp.pt": 2}, (), 4),
    ],
)
def test_openclip_goes_on_from_the_newest_whole_checkpoint(tmp_path, most_recent, whole, broken, epoch):
    for name in broken:
        cut(save(tmp_path, name, 99))
    for name, number in whole.items():
        save(tmp_path, name, number)
    found = settle_latest(tmp_path, save_most_recent=most_recent)
    assert found.epoch == epoch
    taken = openclip_s_choice(tmp_path, most_recent)
    assert taken == (str(found.checkpoint) if found.checkpoint else None)
    assert taken is None or torch.load(taken)["epoch"] == epoch
    assert {each.name for each in found.skipped if each.kept_as.endswith(".unreadable")} == set(broken)
    again = settle_latest(tmp_path, save_most_recent=most_recent)
    assert (again.checkpoint, again.epoch, again.skipped) == (found.checkpoint, epoch, [])


def openclip_s_choice(folder: Path, most_recent: bool) -> str | None:
    """What the lines of OpenCLIP's main take for `--resume latest`."""
    checkpoints = folder / "checkpoints"
    latest = checkpoints / LATEST_CHECKPOINT_NAME
    if most_recent:
        return str(latest) if latest.exists() else None
    return get_latest_checkpoint(str(checkpoints), remote=False)


def test_nothing_is_deleted_but_what_a_killed_process_was_writing(tmp_path):
    save(tmp_path, "epoch_1.pt", 1)
    save(tmp_path, "epoch_latest.pt", 1)
    cut(save(tmp_path, "epoch_2.pt", 2))
    cut(save(tmp_path, "epoch_2.pt.unreadable", 2))
    (tmp_path / "checkpoints" / ".epoch_3.pt.123.tmp").write_bytes(b"half")
    (skipped,) = settle_latest(tmp_path, save_most_recent=False).skipped
    assert skipped.kept_as == "epoch_2.pt.unreadable-2"
    assert str(skipped).startswith("--resume latest passes over epoch_2.pt: it is cut off")
    assert files(tmp_path) == [
        "epoch_1.pt",
        "epoch_2.pt.unreadable",
        "epoch_2.pt.unreadable-2",
        "epoch_latest.pt",
    ]


@pytest.mark.parametrize("most_recent", [False, True])
def test_a_run_of_which_nothing_can_be_read_does_not_start_anew(tmp_path, most_recent):
    cut(save(tmp_path, "epoch_1.pt", 1))
    (tmp_path / "checkpoints" / "epoch_latest.pt").write_bytes(b"")
    with pytest.raises(UserError, match=r"no checkpoint in .* can be read \(epoch_latest\.pt: it is cut off"):
        settle_latest(tmp_path, save_most_recent=most_recent)
    assert files(tmp_path) == ["epoch_1.pt", "epoch_latest.pt"]


def test_what_openclip_would_take_instead_is_named(tmp_path):
    save(tmp_path, "epoch_1.pt", 1)
    other = tmp_path / "checkpoints_before" / "epoch_7.pt"
    other.parent.mkdir()
    other.write_bytes(b"")
    with pytest.raises(UserError, match=r"OpenCLIP would take \S*checkpoints_before/epoch_7\.pt"):
        settle_latest(tmp_path, save_most_recent=False)
    assert settle_latest(tmp_path, save_most_recent=True).epoch == 1


def test_a_path_that_openclip_takes_for_a_pattern_is_named(tmp_path):
    folder = tmp_path / "lr[1e-3]"
    save(folder, "epoch_1.pt", 1)
    with pytest.raises(UserError, match=r"OpenCLIP does not find \S*epoch_1\.pt.* would start anew"):
        settle_latest(folder, save_most_recent=False)


def test_a_file_system_without_links_gets_a_copy(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr("openclip_linattn.resume.os.link", refuse)
    numbered = save(tmp_path, "epoch_4.pt", 4)
    latest = settle_latest(tmp_path, save_most_recent=True).checkpoint
    assert latest.name == "epoch_latest.pt"
    assert latest.read_bytes() == numbered.read_bytes()


def test_every_cut_of_a_checkpoint_is_found(tmp_path):
    path = save(tmp_path, "epoch_1.pt", 1)
    content = path.read_bytes()
    assert training_damage(path) is None
    for length in range(0, len(content), 5):
        path.write_bytes(content[:length])
        assert damage(path) is not None, length
    path.write_bytes(content[:700] + content[800:])
    assert damage(path) is not None
    path.unlink()
    assert damage(path) == "it cannot be read: No such file or directory"


def test_a_tensor_that_would_end_beyond_the_file_is_found(tmp_path):
    path = save(tmp_path, "epoch_1.pt", 1)
    content = bytearray(path.read_bytes())
    entry = content.rindex(b"PK\x01\x02", 0, content.rindex(b"data/0"))
    struct.pack_into("<II", content, entry + 20, 5000, 5000)  # its two sizes in the archive's table
    path.write_bytes(content)
    assert damage(path) is not None


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([1], "states no epoch"),
        ({"weight": torch.ones(1)}, "states no epoch"),
        ({"epoch": 1, "state_dict": {}}, "has no optimizer"),
        ({"epoch": 1, "optimizer": {}}, "has no state_dict"),
    ],
)
def test_a_whole_file_of_something_else_is_no_checkpoint_to_go_on_from(tmp_path, content, words):
    save(tmp_path, "epoch_1.pt", 1)
    path = tmp_path / "checkpoints" / "epoch_2.pt"
    torch.save(content, path)
    assert damage(path) is None
    assert words in training_damage(path)
    assert settle_latest(tmp_path, save_most_recent=False).epoch == 1


def test_an_unreadable_file_that_is_named_is_refused_with_the_one_to_take(tmp_path, flags):
    whole, broken = save(tmp_path, "epoch_1.pt", 1), cut(save(tmp_path, "epoch_2.pt", 2))
    check_resumed_file(whole)
    with pytest.raises(
        UserError, match=r"epoch_2\.pt: it is cut off.* whole one beside it is \S*epoch_1\.pt"
    ):
        run(["--model", "ViT-T32-8-linear", *flags, "--name", "x", "--resume", str(broken)])
    cut(whole)
    with pytest.raises(UserError, match="no whole one is beside it"):
        check_resumed_file(broken)
    assert not (tmp_path / "logs").exists()


def test_the_last_epoch_saved_counts(tmp_path):
    assert epochs_done(tmp_path) == 0
    save(tmp_path, "epoch_latest.pt", 3)
    assert epochs_done(tmp_path) == 3
    save(tmp_path, "epoch_10.pt", 10)
    assert epochs_done(tmp_path) == 10


def test_a_named_file_goes_on_from_the_epoch_inside_it_as_in_openclip(tmp_path):
    assert resumed_epoch(str(save(tmp_path, "epoch_5.pt", 3))) == 3
    weights = tmp_path / "epoch_32.pt"
    torch.save({"weight": torch.ones(1)}, weights)
    assert resumed_epoch(str(weights)) == 0
    assert resumed_epoch("s3://bucket/run/checkpoints/epoch_7.pt") == 7


def test_what_is_no_checkpoint_tells_no_epoch(tmp_path):
    broken = tmp_path / "epoch_latest.pt"
    assert epoch_of(broken) == 0
    broken.write_bytes(b"not a checkpoint")
    assert epoch_of(broken) == 0
    torch.save([1], broken)
    assert epoch_of(broken) == 0


def test_what_was_passed_over_is_said_and_recorded(flags, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("openclip_linattn.train.open_clip_main", lambda argv: None)
    folder = tmp_path / "logs" / "x"
    command = ["--model", "ViT-T32-8-linear", *flags, "--name", "x", "--epochs", "3"]
    for epoch in (1, 2):
        save(folder, f"epoch_{epoch}.pt", epoch)
    cut(folder / "checkpoints" / "epoch_2.pt")
    assert run([*command, "--resume", "latest"]) == 0
    assert "warning: --resume latest passes over epoch_2.pt" in capsys.readouterr().err
    facts = read_manifest(folder)
    (skipped,) = facts["skipped_checkpoints"]
    assert (skipped["name"], skipped["kept_as"]) == ("epoch_2.pt", "epoch_2.pt.unreadable")
    assert facts["segments"][0]["start_epoch"] == 1


def test_a_record_that_cannot_be_read_is_kept_and_said(flags, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("openclip_linattn.train.open_clip_main", lambda argv: None)
    folder = tmp_path / "logs" / "x"
    save(folder, "epoch_1.pt", 1)
    (folder / "run.json").write_text('{"segments": [')
    command = ["--model", "ViT-T32-8-linear", *flags, "--name", "x", "--resume", "latest", "--epochs", "2"]
    assert run(command) == 0
    assert "is kept as run.json.unreadable" in capsys.readouterr().err
    assert (folder / "run.json.unreadable").read_text() == '{"segments": ['
    assert [each["start_epoch"] for each in read_manifest(folder)["segments"]] == [1]


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
