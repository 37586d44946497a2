"""Run folders to tables: resumed runs, repeated and missing evaluations, NaN, run.json, any OpenCLIP run."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from openclip_scaling.errors import UserError
from openclip_scaling.flops import clip_cost
from openclip_scaling.reading.runs import collect, load, save
from openclip_scaling.reading.smoothing import divergence, smoothed_loss


def notices_of(collection: Any) -> str:
    return "\n".join(str(notice) for notice in collection.notices)


def two_epochs(log_writer: Any, params: dict[str, Any]) -> str:
    log_writer.process(params)
    log_writer.epoch(0, 8, 32, [2.0, 1.9, 1.8, 1.7])
    log_writer.evaluation(1, clip_val_loss=1.5)
    log_writer.epoch(1, 8, 32, [1.6, 1.5, 1.4, 1.3])
    log_writer.evaluation(2, clip_val_loss=1.25)
    return str(log_writer.text)


def test_a_plain_run(log_writer: Any, fake: Any, write_run: Any) -> None:
    results = [{"clip_val_loss": 1.50001, "epoch": 1}, {"clip_val_loss": 1.25002, "epoch": 2}]
    folder = write_run("plain", two_epochs(log_writer, fake.PARAMS), results=results)
    found = collect([folder])
    frame = found.checkpoints
    assert list(frame["epoch"]) == [1, 2]
    assert list(frame["step"]) == [4, 8]
    assert list(frame["samples_seen"]) == [32, 64]
    assert list(frame["batch"]) == [8, 8]
    assert list(frame["val_loss"]) == [1.50001, 1.25002]  # full precision, not the printed four decimals
    assert list(frame["attention"]) == ["linear", "linear"]
    config = {
        "embed_dim": 64,
        "vision_cfg": {"image_size": 64, "width": 64, "layers": 2, "head_width": 32},
        "text_cfg": {"width": 64, "heads": 1, "layers": 1},
    }
    cost = clip_cost(config, "linear")
    assert frame["train_flop"].iloc[-1] == pytest.approx(cost.train_flops(64))
    assert list(found.runs["parameters"]) == [cost.parameters]
    assert len(found.curves) == 8
    assert list(found.curves["step"]) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_resuming_with_another_epoch_length(log_writer: Any, fake: Any, write_run: Any) -> None:
    log_writer.process(fake.PARAMS)
    log_writer.epoch(0, 8, 32, [2.0, 1.9, 1.8, 1.7])
    log_writer.process(fake.PARAMS, resumed=True)
    log_writer.epoch(1, 8, 64, [1.6] * 8)
    found = collect([write_run("resumed", log_writer.text)])
    last = found.checkpoints.iloc[-1]
    assert (last["step"], last["samples_seen"]) == (12, 96)
    assert "32 -> 64 samples" in notices_of(found)
    assert "12 steps, 96 samples" in notices_of(found)


def test_an_interrupted_epoch_that_was_trained_again(log_writer: Any, fake: Any, write_run: Any) -> None:
    log_writer.process(fake.PARAMS)
    log_writer.epoch(0, 8, 32, [2.0, 1.9, 1.8, 1.7])
    log_writer.epoch(1, 8, 32, [9.0, 9.0])
    log_writer.process(fake.PARAMS, resumed=True)
    log_writer.epoch(1, 8, 32, [1.6, 1.5, 1.4, 1.3])
    found = collect([write_run("again", log_writer.text)])
    assert list(found.checkpoints["samples_seen"]) == [32, 64]
    assert 9.0 not in set(found.curves["train_loss"])
    assert "epoch 1 was trained again" in notices_of(found)
    assert "up to sample 16" in notices_of(found)


def test_a_killed_run_has_no_checkpoint_for_its_last_epoch(
    log_writer: Any, fake: Any, write_run: Any
) -> None:
    log_writer.process(fake.PARAMS)
    log_writer.epoch(0, 8, 32, [2.0, 1.9, 1.8, 1.7])
    log_writer.epoch(1, 8, 32, [1.6])
    found = collect([write_run("killed", log_writer.text)])
    assert list(found.checkpoints["epoch"]) == [1]
    assert "epoch 1 stopped after 8 of 32 samples" in notices_of(found)
    assert "finished 1 of 2 planned epochs" in notices_of(found)


def test_epochs_missing_from_the_log_are_counted_and_named(
    log_writer: Any, fake: Any, write_run: Any
) -> None:
    log_writer.process(fake.PARAMS)
    log_writer.epoch(2, 8, 32, [2.0, 1.9, 1.8, 1.7])
    found = collect([write_run("tail", log_writer.text)])
    last = found.checkpoints.iloc[-1]
    assert (last["epoch"], last["step"], last["samples_seen"]) == (3, 12, 96)
    assert "epochs 0 to 1 are not in the log" in notices_of(found)


def test_a_changed_batch_size_is_followed(log_writer: Any, fake: Any, write_run: Any) -> None:
    log_writer.process(fake.PARAMS)
    log_writer.epoch(0, 8, 32, [2.0, 1.9, 1.8, 1.7])
    log_writer.process({**fake.PARAMS, "batch_size": 4, "world_size": 4}, resumed=True)
    log_writer.epoch(1, 16, 32, [1.6, 1.5])
    found = collect([write_run("batch", log_writer.text)])
    assert list(found.checkpoints["batch"]) == [8, 16]
    assert list(found.checkpoints["val_batch"]) == [8, 4]
    assert list(found.checkpoints["step"]) == [4, 6]
    assert "batch size changed" in notices_of(found)


def test_accumulation_drops_an_incomplete_tail(fake: Any, write_run: Any) -> None:
    writer = fake.LogWriter()
    writer.process({**fake.PARAMS, "accum_freq": 3})
    writer.train(0, 24, 56, 2.0)
    writer.train(0, 48, 56, 2.0)
    last = collect([write_run("accumulated", writer.text)]).checkpoints.iloc[-1]
    assert (last["batch"], last["step"], last["samples_seen"]) == (24, 2, 48)


def test_later_rows_of_an_epoch_win(log_writer: Any, fake: Any, write_run: Any) -> None:
    results = [
        {"clip_val_loss": 9.0, "epoch": 1},
        {"clip_val_loss": 1.5, "epoch": 1},
        {"clip_val_loss": 1.25, "epoch": 2},
    ]
    found = collect([write_run("twice", two_epochs(log_writer, fake.PARAMS), results=results)])
    assert list(found.checkpoints["val_loss"]) == [1.5, 1.25]
    assert "more than one row for epoch 1" in notices_of(found)


def test_rows_without_epoch_find_it_in_the_log(log_writer: Any, fake: Any, write_run: Any) -> None:
    log_writer.process(fake.PARAMS)
    key = "imagenet-zeroshot-val-top1"
    for epoch, value in ((1, 0.12341), (2, 0.23452)):
        log_writer.epoch(epoch - 1, 8, 32, [2.0, 1.9, 1.8, 1.7])
        log_writer.line(f"Eval Epoch: {epoch} {key}: {value:.4f}")
    rows = [{key: 0.12341, "num_samples": 50000}, {key: 0.77, "num_samples": 50000}, {key: 0.23452}]
    found = collect([write_run("zeroshot-only", log_writer.text, results=rows)])
    assert list(found.checkpoints[key]) == [0.12341, 0.23452]
    assert notices_of(found).count("has no epoch and matches no evaluation") == 1


def test_a_cut_results_line_is_named(log_writer: Any, fake: Any, write_run: Any) -> None:
    folder = write_run(
        "cut", two_epochs(log_writer, fake.PARAMS), results=[{"clip_val_loss": 1.5, "epoch": 1}]
    )
    path = folder / "checkpoints" / "results.jsonl"
    path.write_text(path.read_text(encoding="utf-8") + '{"clip_val_loss": 1.2', encoding="utf-8")
    found = collect([folder])
    assert list(found.checkpoints["val_loss"]) == [1.5, 1.25]
    assert "results.jsonl line 2 is cut" in notices_of(found)


def test_zero_shot_rows_become_columns(log_writer: Any, fake: Any, write_run: Any) -> None:
    common = {"dataset": "shapes", "label_set": "color x shape", "n": 1024, "classes": 64}
    rows = [
        {"checkpoint": "epoch_1.pt", "epoch": 1, **common, "top1": 0.1, "top5": 0.3},
        {"checkpoint": "/x,y/epoch_2.pt", **common, "top1": 0.2},
        {"checkpoint": "/x,y/epoch_2.pt", **common, "top1": 0.25},
        {"checkpoint": "epoch_latest.pt", **common, "top1": 0.9},
    ]
    found = collect([write_run("zero", two_epochs(log_writer, fake.PARAMS), zeroshot=rows)])
    frame = found.checkpoints
    assert list(frame["shapes/color x shape/top1"]) == [0.1, 0.25]
    assert frame["shapes/color x shape/top5"].iloc[0] == 0.3
    assert math.isnan(frame["shapes/color x shape/top5"].iloc[1])
    assert "shapes/color x shape/n" not in frame.columns
    assert "epoch_latest.pt" in notices_of(found)
    assert "the later row is used" in notices_of(found)


def test_rows_of_other_tasks_and_sizes_have_columns_of_their_own(
    log_writer: Any, fake: Any, write_run: Any
) -> None:
    rows = [
        {"dataset": "pets", "label_set": "folder", "top1": 0.5, "top1_interval": [0.4, 0.6], "image_size": 224},
        {"dataset": "pets", "label_set": "folder", "top1": 0.6, "image_size": 336, "trained_image_size": 224},
        {"dataset": "coco", "label_set": "retrieval", "task": "retrieval", "image_to_text_recall@5": 0.3},
        {"dataset": "pets", "label_set": "probe", "task": "linear_probe", "top1": 0.7, "C": 2.0, "n_train": 9},
        {"dataset": "wds/voc", "label_set": "clip_benchmark", "mean_average_precision": 0.8, "n": 3},
        {"dataset": "coco", "label_set": "retrieval", "text_to_image_recall@1": 0.2, "image_size": 96,
         "trained_image_size": 224},
    ]  # fmt: skip
    rows = [{"checkpoint": "epoch_2.pt", "epoch": 2, "images_per_s": 9.5, **row} for row in rows]
    found = collect([write_run("tasks", two_epochs(log_writer, fake.PARAMS), zeroshot=rows)])
    (last,) = found.checkpoints[found.checkpoints["epoch"] == 2].to_dict("records")
    assert {str(name): value for name, value in last.items() if "/" in str(name)} == {
        "pets/folder/top1": 0.5,
        "pets/folder@336px/top1": 0.6,
        "coco/image_to_text_recall@5": 0.3,
        "pets/probe/top1": 0.7,
        "wds/voc/clip_benchmark/mean_average_precision": 0.8,
        "coco@96px/text_to_image_recall@1": 0.2,
    }
    assert "later row" not in notices_of(found)


def test_probes_of_two_training_sets_have_columns_of_their_own(
    log_writer: Any, fake: Any, write_run: Any
) -> None:
    sets = [("few", "/x/few"), ("all", "/x/all"), ("all", "/y/all"), (None, "/old/train")]
    rows = [
        {"checkpoint": "epoch_2.pt", "epoch": 2, "dataset": "pets", "label_set": "probe", "top1": number / 10,
         "train_data": path, **({"train_dataset": name} if name else {})}
        for number, (name, path) in enumerate(sets)
    ]  # fmt: skip
    rows.append({**rows[0], "image_size": 64, "trained_image_size": 32, "top1": 0.9})
    found = collect([write_run("probes", two_epochs(log_writer, fake.PARAMS), zeroshot=rows)])
    (last,) = found.checkpoints[found.checkpoints["epoch"] == 2].to_dict("records")
    assert {str(name): value for name, value in last.items() if "/" in str(name)} == {
        "pets/probe trained on few/top1": 0.0,
        "pets/probe trained on /x/all/top1": 0.1,
        "pets/probe trained on /y/all/top1": 0.2,
        "pets/probe trained on /old/train/top1": 0.3,
        "pets/probe trained on few@64px/top1": 0.9,
    }
    assert "later row" not in notices_of(found)


def test_run_json_wins_and_is_read_tolerantly(log_writer: Any, fake: Any, write_run: Any) -> None:
    manifest = {
        "name": "x", "model": "ViT-S-16-normlinear", "attention": "normlinear", "text_attention": "softmax",
        "parameters": {"image": 10, "text": 20, "total": 31}, "gmac_per_pair": 0.5, "batch_size": 8,
        "world_size": 1, "unique_samples_bound": 40, "status": "failed", "segments": "?", "unknown": [1],
    }  # fmt: skip
    found = collect([write_run("own", two_epochs(log_writer, fake.PARAMS), manifest=manifest)])
    frame = found.checkpoints
    assert set(frame["attention"]) == {"normlinear"}
    assert set(frame["model"]) == {"ViT-S-16-normlinear"}
    assert list(frame["unique_samples_bound"]) == [32, 40]
    assert frame["train_flop"].iloc[-1] == pytest.approx(6 * 0.5e9 * 64)
    assert list(found.runs["image_parameters"]) == [10]
    assert "run.json says that it is failed" in notices_of(found)


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", '"text"'])
def test_a_broken_run_json_is_named_and_not_needed(
    log_writer: Any, fake: Any, write_run: Any, text: str
) -> None:
    folder = write_run("broken", two_epochs(log_writer, fake.PARAMS))
    (folder / "run.json").write_text(text, encoding="utf-8")
    found = collect([folder])
    assert list(found.checkpoints["samples_seen"]) == [32, 64]
    assert "run.json cannot be read" in notices_of(found)


def test_an_unknown_architecture_has_no_compute_and_says_so(fake: Any, write_run: Any) -> None:
    writer = fake.LogWriter()
    writer.process(fake.PARAMS, model="CLIP(\n  (visual): TimmModel(\n  )\n)")
    writer.epoch(0, 8, 32, [2.0, 1.9, 1.8, 1.7])
    found = collect([write_run("timm", writer.text)])
    assert found.checkpoints["train_flop"].isna().all()
    assert found.checkpoints["samples_seen"].tolist() == [32]
    assert "compute is not known" in notices_of(found)


def test_forced_patch_dropout_lowers_training_compute(fake: Any, write_run: Any) -> None:
    flops = []
    for name, rate in (("whole", "None"), ("half", "0.5")):
        params = {**fake.PARAMS, "force_patch_dropout": rate}
        writer = fake.LogWriter()
        writer.process(params)
        writer.epoch(0, 8, 32, [2.0, 1.9, 1.8, 1.7])
        frame = collect([write_run(name, writer.text, params)]).checkpoints
        flops.append(frame["train_flop"].iloc[0])
    assert flops[1] < flops[0]


@pytest.mark.parametrize(
    ("losses", "named"),
    [([2.0, 1.9, "nan (nan)", "nan (nan)"], "ends as NaN"), ([2.0, 2.4, 2.9, 3.6], "above 1.2 ln(batch)")],
    ids=["nan", "rising"],
)
def test_a_diverged_run_is_marked_and_named(fake: Any, write_run: Any, losses: list[Any], named: str) -> None:
    writer = fake.LogWriter()
    writer.process(fake.PARAMS)
    writer.epoch(0, 8, 32, losses)
    found = collect([write_run("lost", writer.text)])
    assert found.runs["diverged"].tolist() == [True]
    assert named in notices_of(found)


def test_one_nan_step_is_not_divergence(fake: Any, write_run: Any) -> None:
    writer = fake.LogWriter()
    writer.process(fake.PARAMS)
    writer.epoch(0, 8, 48, [2.0, 1.9, "nan (nan)", 1.7, 1.6, 1.5])
    found = collect([write_run("spike", writer.text)])
    assert found.runs["diverged"].tolist() == [False]
    assert found.checkpoints["train_loss"].iloc[0] == pytest.approx((1.9 + 1.7 + 1.6 + 1.5) / 4)
    assert "1 of 6 logged training losses are NaN" in notices_of(found)


def test_smoothed_loss_takes_no_slope_for_noise() -> None:
    line, error = smoothed_loss([10 - 0.1 * i for i in range(60)])
    assert line == pytest.approx(sum(10 - 0.1 * i for i in range(54, 60)) / 6)
    assert error == pytest.approx(0, abs=1e-12)
    assert smoothed_loss([]) == (None, None)
    assert smoothed_loss([math.nan] * 3) == (None, None)


def test_divergence_knows_other_losses_and_starts_above_chance() -> None:
    assert divergence([], 8) is None
    assert divergence([5.0, 4.0, 3.0, 2.9, 2.8], 8) is None  # above 1.2 ln 8, but falling from a bad start
    assert divergence([2.0, 3.0, 4.0, 5.0, 6.0], 8, contrastive=False) is None
    assert divergence([2.0, 3.0, 4.0, 5.0, 6.0], 8) is not None


def test_folders_below_a_parent_and_equal_names(
    log_writer: Any, fake: Any, write_run: Any, tmp_path: Path
) -> None:
    text = two_epochs(log_writer, fake.PARAMS)
    for name in ("a/run", "b/run", "c/other"):
        write_run(name, text)
    assert list(collect([tmp_path]).runs["run"]) == ["a/run", "b/run", "other"]
    twice = collect([tmp_path / "logs", tmp_path / "logs" / "a" / "run"])
    assert len(twice.runs) == 3


def test_a_link_to_a_run_is_followed_and_counted_once(write_run: Any, fake: Any, tmp_path: Path) -> None:
    folder = write_run("far/away")
    links = tmp_path / "links"
    (links / "below").mkdir(parents=True)
    for name in ("one", "below/two"):
        (links / name).symlink_to(folder)
    (links / "loop").symlink_to(links)
    (links / "nowhere").symlink_to(tmp_path / "absent")
    assert collect([links]).runs["run"].tolist() == ["away"]
    assert collect([links, folder]).runs["run"].tolist() == ["away"]


def test_folders_that_may_not_be_read_are_named(
    write_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run("open")
    closed = folder.parent / "closed"
    closed.mkdir()
    listed = os.scandir

    def refusing(path: Any) -> Any:
        if Path(path) == closed:
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr("os.scandir", refusing)
    found = collect([folder.parent])
    assert found.runs["run"].tolist() == ["open"]
    assert f"{closed}: this folder is left out: it cannot be read" in notices_of(found)
    with pytest.raises(UserError, match=r"No OpenCLIP run in .*closed, where .*closed cannot be read"):
        collect([closed])


def test_a_file_of_a_run_that_cannot_be_read_is_a_sentence(
    write_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run("shut")

    def refused(self: Path, *_: Any, **__: Any) -> str:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_text", refused)
    with pytest.raises(UserError, match=r"Cannot read .*params.txt: Permission denied"):
        collect([folder])


def test_names_of_bytes_and_of_digits_are_kept_apart(
    log_writer: Any, fake: Any, write_run: Any, tmp_path: Path
) -> None:
    names = ["001", "1", "1e3", os.fsdecode(b"bad\xff")]
    for name in names:
        write_run(name, two_epochs(log_writer, fake.PARAMS))
    save(collect([tmp_path]), tmp_path / "table.csv")
    again = load(tmp_path / "table.csv")
    assert again.runs["run"].tolist() == ["001", "1", "1e3", "bad\ufffd"]
    assert set(again.checkpoints["run"]) == set(again.curves["run"]) == set(again.runs["run"])


@pytest.mark.parametrize("name", [".", "/", ""])
def test_a_folder_is_no_name_for_a_table(name: str, write_run: Any) -> None:
    found = collect([write_run("any")])
    with pytest.raises(UserError, match="is a folder; give the name of a CSV file"):
        save(found, Path(name))


def test_no_run_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No OpenCLIP run"):
        collect([tmp_path])
    with pytest.raises(UserError, match="is not a folder"):
        collect([tmp_path / "absent"])


def test_a_folder_with_params_alone(write_run: Any) -> None:
    found = collect([write_run("planned")])
    assert found.checkpoints.empty
    assert len(found.runs) == 1
    assert "there is no out.log" in notices_of(found)


def test_saved_tables_come_back(log_writer: Any, fake: Any, write_run: Any, tmp_path: Path) -> None:
    found = collect([write_run("plain", two_epochs(log_writer, fake.PARAMS))])
    files = save(found, tmp_path / "out" / "table.csv")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(path.name for path in files)
    again = load(tmp_path / "out" / "table.csv")
    pd.testing.assert_frame_equal(again.checkpoints, found.checkpoints, check_dtype=False)
    pd.testing.assert_frame_equal(again.curves, found.curves, check_dtype=False)
    assert again.notices == found.notices


def test_csv_errors_are_sentences(tmp_path: Path) -> None:
    (tmp_path / "empty.csv").write_text("", encoding="utf-8")
    for name in ("absent.csv", "empty.csv"):
        with pytest.raises(UserError, match=name):
            load(tmp_path / name)


def test_real_runs(real_logs: Path) -> None:
    found = collect([real_logs])
    assert len(found.runs) == 4
    assert found.checkpoints["samples_seen"].tolist() == [128, 256] * 4
    assert found.checkpoints.groupby("run")["step"].last().tolist() == [32, 16, 32, 16]
    assert set(found.runs["attention"]) == {"infsa", "linear"}
    for folder in sorted(real_logs.iterdir()):
        rows = [
            json.loads(line) for line in (folder / "checkpoints" / "results.jsonl").read_text().splitlines()
        ]
        mine = found.checkpoints[found.checkpoints["run"] == folder.name]
        assert mine["val_loss"].tolist() == [row["clip_val_loss"] for row in rows]
