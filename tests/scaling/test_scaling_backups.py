"""Runs whose out.log is absent or cut, read from what tensorboard and wandb kept."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from openclip_scaling.errors import UserError
from openclip_scaling.reading.runs import collect

LOSSES = [2.0, 1.9, 1.8, 1.7]


def notices_of(collection: Any) -> str:
    return "\n".join(str(notice) for notice in collection.notices)


def two_epochs(log_writer: Any, params: dict[str, Any]) -> str:
    log_writer.process(params)
    for epoch in range(2):
        log_writer.epoch(epoch, 8, 32, [loss - 0.5 * epoch for loss in LOSSES])
        log_writer.evaluation(epoch + 1, clip_val_loss=1.5 - epoch / 4)
    return str(log_writer.text)


def scalars(
    epochs: Sequence[int] = (0, 1), per_epoch: int = 4, evaluated: bool = True
) -> list[tuple[float, int, dict[str, float]]]:
    """Time, step and scalars as OpenCLIP gives them to tensorboard: a step each second, evaluations by epoch."""
    rows: list[tuple[float, int, dict[str, float]]] = []
    for epoch in epochs:
        for index in range(per_epoch):
            step = epoch * per_epoch + index
            loss = LOSSES[index] - 0.5 * epoch
            rows.append((100.0 + step, step, {"train/loss": loss, "train/lr": 5e-4, "train/scale": 14.0}))
        if evaluated:
            metrics = {"val/clip_val_loss": 1.5 - epoch / 4, "val/epoch": epoch + 1, "val/num_samples": 40}
            rows.append((100.2 + step, epoch + 1, metrics))
    return rows


def write_events(folder: Path, rows: Sequence[tuple[float, int, dict[str, float]]], start: int = 1) -> Path:
    """An event file such as torch's SummaryWriter writes it."""
    pytest.importorskip("tensorboard")
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    path = folder / "tensorboard" / f"events.out.tfevents.{start:010d}.host"
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as stream:
        writer = RecordWriter(stream)
        writer.write(Event(wall_time=99.0, file_version="brain.Event:2").SerializeToString())
        for time, step, values in rows:
            for tag, value in values.items():
                summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
                writer.write(Event(wall_time=time, step=step, summary=summary).SerializeToString())
        writer.flush()
    return path


def test_a_run_without_out_log_is_read_from_tensorboard(log_writer: Any, fake: Any, write_run: Any) -> None:
    logged = collect([write_run("logged", two_epochs(log_writer, fake.PARAMS))])
    folder = write_run("kept")
    write_events(folder, scalars())
    found = collect([folder])
    columns = ["epoch", "step", "samples_seen", "batch", "val_batch"]
    assert found.checkpoints[columns].equals(logged.checkpoints[columns])
    for column in ("train_loss", "val_loss"):
        assert found.checkpoints[column].tolist() == pytest.approx(logged.checkpoints[column].tolist())
    assert found.curves["train_loss"].tolist() == pytest.approx(logged.curves["train_loss"].tolist())
    assert found.curves["learning_rate"].tolist() == pytest.approx([5e-4] * 8)
    assert found.checkpoints["hours"].tolist() == pytest.approx([3 / 3600, 7 / 3600])
    assert "there is no out.log" in notices_of(found)
    assert "steps, losses and hours are those of tensorboard" in notices_of(found)
    assert "evaluations of epoch 1, 2 are those of tensorboard" in notices_of(found)


@pytest.mark.parametrize("part", ["beginning", "end"])
def test_a_cut_out_log_gives_way_to_tensorboard(
    log_writer: Any, fake: Any, write_run: Any, part: str
) -> None:
    lines = two_epochs(log_writer, fake.PARAMS).splitlines(keepends=True)
    second = next(i for i, line in enumerate(lines) if "Start epoch 1" in line)
    text = "".join(lines[:second] if part == "end" else lines[second:])
    folder = write_run("cut", text)
    assert collect([folder]).checkpoints["samples_seen"].iloc[-1] == (32 if part == "end" else 64)
    write_events(folder, scalars())
    found = collect([folder])
    assert found.checkpoints["samples_seen"].tolist() == [32, 64]
    assert len(found.curves) == 8
    assert "out.log does not hold the whole training" in notices_of(found)
    assert "have other losses" not in notices_of(found)


def test_a_whole_out_log_needs_no_tensorboard(
    log_writer: Any, fake: Any, write_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run("whole", two_epochs(log_writer, fake.PARAMS))
    write_events(folder, [(1.0, 0, {"train/loss": 9.0})])
    monkeypatch.setattr("openclip_scaling.reading.backups.read_events", lambda *_: pytest.fail("it was read"))
    assert "tensorboard" not in notices_of(collect([folder]))


def test_where_log_and_tensorboard_differ_the_notice_says_so(
    log_writer: Any, fake: Any, write_run: Any
) -> None:
    log_writer.process({**fake.PARAMS, "epochs": 3})
    log_writer.epoch(0, 8, 32, LOSSES)
    log_writer.evaluation(1, clip_val_loss=1.3)
    folder = write_run("apart", log_writer.text, {**fake.PARAMS, "epochs": 3})
    rows = scalars(epochs=(0,))
    rows[1][2]["train/loss"] = 1.95
    write_events(folder, rows)
    found = collect([folder])
    assert "out.log and tensorboard have other losses at 1 of 4 steps" in notices_of(found)
    assert "tensorboard has other values than out.log and results.jsonl for the evaluation of epoch 1" in (
        notices_of(found)
    )
    assert found.checkpoints["val_loss"].tolist() == [1.3]
    assert found.curves["train_loss"].tolist() == LOSSES  # of equal reach, the log comes first


def test_a_resumed_run_has_an_event_file_for_each_process(fake: Any, write_run: Any) -> None:
    folder = write_run("resumed")
    write_events(folder, [*scalars(epochs=(0,)), (104.0, 4, {"train/loss": 9.0})], start=1)
    write_events(folder, scalars(epochs=(1,)), start=2)
    found = collect([folder])
    assert found.checkpoints["samples_seen"].tolist() == [32, 64]
    assert 9.0 not in found.curves["train_loss"].tolist()
    assert "epoch 1 was trained again after a resume" in notices_of(found)
    assert found.checkpoints["hours"].tolist() == pytest.approx([3 / 3600, (4 + 3) / 3600])


@pytest.mark.parametrize("damage", ["cut", "changed", "half a head", "middle"])
def test_a_damaged_event_file_is_used_as_far_as_it_goes(write_run: Any, damage: str) -> None:
    folder = write_run("damaged")
    path = write_events(folder, scalars())
    content = bytearray(path.read_bytes())
    if damage == "cut":
        del content[-10:]
    elif damage == "half a head":
        content += b"12345"
    else:
        content[-10 if damage == "changed" else len(content) // 2] ^= 255
    path.write_bytes(content)
    found = collect([folder])
    records = 1 + 8 * 3 + 2 * 3 + (damage == "half a head")
    (notice,) = [str(item) for item in found.notices if "is damaged or cut" in str(item)]
    assert f"of {records} records can be read" in notice
    if damage == "middle":
        assert found.checkpoints["samples_seen"].tolist() == [32]
        assert "it finished 1 of 2 planned epochs" in notices_of(found)
    else:
        assert f"{records - 1} of {records}" in notice
        assert found.checkpoints["samples_seen"].tolist() == [32, 64]


def test_steps_without_evaluations_are_told_apart_by_the_planned_samples(fake: Any, write_run: Any) -> None:
    planned = {
        "train_num_samples": 30,
        "workers": 3,
        "dataset_type": "webdataset",
    }  # 4 batches, 6 for 3 workers
    folder = write_run("planned", params={**fake.PARAMS, **planned})
    write_events(folder, scalars(epochs=(0,), evaluated=False))
    found = collect([folder])
    assert "epoch 0 stopped after 32 of 48 samples" in notices_of(found)
    folder = write_run("manifest", manifest={"planned": {"steps": 8, "epochs": 2}})
    write_events(folder, scalars(evaluated=False))
    assert collect([folder]).checkpoints["samples_seen"].tolist() == [32, 64]
    folder = write_run("unknown")
    write_events(folder, scalars(evaluated=False))
    found = collect([folder])
    assert found.checkpoints.empty
    assert "the steps of an epoch are not known, so its 8 logged steps cannot be used" in notices_of(found)


def test_a_folder_with_tensorboard_alone_needs_the_batch_size_to_count_samples(tmp_path: Path) -> None:
    folder = tmp_path / "alone"
    folder.mkdir()
    write_events(folder, scalars())
    found = collect([tmp_path])
    assert found.checkpoints["val_loss"].tolist() == [1.5, 1.25]
    assert found.checkpoints["samples_seen"].isna().all()
    assert "the batch size is not known, so its 8 logged steps cannot be used" in notices_of(found)
    (folder / "run.json").write_text(json.dumps({"batch_size": 16}), encoding="utf-8")
    assert collect([tmp_path]).checkpoints["samples_seen"].tolist() == [64, 128]
    write_events(folder, scalars()[1:])  # the batch size is not taken from the first step that was kept
    assert collect([tmp_path]).checkpoints["step"].tolist() == [4, 8]


def test_without_the_package_tensorboard_a_sentence_says_how_to_get_it(
    write_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run("none")
    write_events(folder, scalars())
    monkeypatch.setitem(sys.modules, "tensorboard.backend.event_processing.event_file_loader", None)
    found = collect([folder])
    assert found.checkpoints.empty
    assert "pip install 'openclip-linattn[tensorboard]'" in notices_of(found)


def wandb_folder(root: Path, name: str = "offline-run-20260131_120000-kept") -> Path:
    files = root / "wandb" / name / "files"
    files.mkdir(parents=True)
    return files


def config_yaml(params: dict[str, Any]) -> str:
    values = {key: {"desc": None, "value": value} for key, value in params.items()}
    return json.dumps({"_wandb": {"value": {"cli_version": "0.19"}}, **values})


def test_an_offline_folder_of_wandb_is_a_run_of_its_own(
    log_writer: Any, fake: Any, write_run: Any, tmp_path: Path
) -> None:
    text = two_epochs(log_writer, fake.PARAMS)
    logged = collect([write_run("logged", text)])
    files = wandb_folder(tmp_path / "other")
    console = text[text.index(next(line for line in text.splitlines() if "Start epoch 0" in line)) :]
    (files / "output.log").write_text(console, encoding="utf-8")
    (files / "config.yaml").write_text(config_yaml({**fake.PARAMS, "name": "kept"}), encoding="utf-8")
    found = collect([tmp_path / "other"])
    assert found.runs["run"].tolist() == ["kept"]
    columns = ["epoch", "step", "samples_seen", "batch", "model", "train_loss", "val_loss"]
    assert found.checkpoints[columns].equals(logged.checkpoints[columns])
    assert "those of wandb's output.log" in notices_of(found)
    (files / "config.yaml").unlink()
    (files / "logs" / "kept").mkdir(parents=True)
    params = "".join(f"{key}: {value}\n" for key, value in fake.PARAMS.items())
    (files / "logs" / "kept" / "params.txt").write_text(params)
    again = collect([tmp_path / "other"])
    assert again.checkpoints.equals(found.checkpoints)
    (files / "config.yaml").write_text("a: [", encoding="utf-8")
    assert "config.yaml of offline-run-20260131_120000-kept is no YAML mapping" in (
        notices_of(collect([tmp_path / "other"]))
    )


def test_wandb_folders_of_a_known_run_are_not_a_second_run(
    log_writer: Any, fake: Any, write_run: Any, tmp_path: Path
) -> None:
    text = two_epochs(log_writer, fake.PARAMS)
    middle = text.index(next(line for line in text.splitlines() if "Start epoch 1" in line))
    write_run("kept", text[:middle])
    parts = {"offline-run-20260131_120000-kept": text[:middle], "run-20260201_120000-kept": text[middle:]}
    for name, part in parts.items():
        (wandb_folder(tmp_path, name) / "output.log").write_text(part, encoding="utf-8")
    found = collect([tmp_path])
    assert found.runs["run"].tolist() == ["kept"]
    assert found.checkpoints["samples_seen"].tolist() == [32, 64]
    assert found.runs["attention"].tolist() == ["linear"]  # from the model that out.log prints


def test_a_folder_of_wandb_that_two_runs_could_own_is_left_out(
    log_writer: Any, fake: Any, write_run: Any, tmp_path: Path
) -> None:
    text = two_epochs(log_writer, fake.PARAMS)
    first = text[: text.index(next(line for line in text.splitlines() if "Start epoch 1" in line))]
    write_run("a/kept", first)
    write_run("b/kept", first)
    (wandb_folder(tmp_path) / "output.log").write_text(text, encoding="utf-8")
    found = collect([tmp_path])
    assert found.runs["run"].tolist() == ["a/kept", "b/kept"]
    assert found.checkpoints["samples_seen"].tolist() == [32, 32]
    assert "this folder is left out: 2 runs are called 'kept'" in notices_of(found)


def test_a_summary_of_wandb_gives_the_last_values(fake: Any, tmp_path: Path) -> None:
    files = wandb_folder(tmp_path)
    (files / "config.yaml").write_text(config_yaml(fake.PARAMS), encoding="utf-8")
    summary = {
        "_step": 8,
        "step": 7,
        "epoch": 2,
        "train/loss": 1.2,
        "val/clip_val_loss": 1.25,
        "_timestamp": 1e9,
    }
    (files / "wandb-summary.json").write_text(json.dumps(summary), encoding="utf-8")
    (row,) = collect([tmp_path]).checkpoints.to_dict("records")
    assert (row["epoch"], row["samples_seen"], row["val_loss"]) == (2, 64, 1.25)
    (files / "wandb-summary.json").write_text(
        json.dumps({**summary, "_step": 10, "step": 10}), encoding="utf-8"
    )
    found = collect(
        [tmp_path]
    )  # the last step is not that of the evaluation, so nothing tells the epochs apart
    assert found.checkpoints["samples_seen"].isna().all()
    assert "only the last values are known" in notices_of(found)
    (files / "wandb-summary.json").unlink()
    (files.parent / "run-kept.wandb").write_bytes(b"x")
    assert "which only wandb can open: `wandb sync` it" in notices_of(collect([tmp_path]))


ROWS: list[dict[str, Any]] = [
    *({"_step": s, "_timestamp": 1e9 + s, "train/loss": LOSSES[s % 4] - 0.5 * (s // 4), "step": s} for s in range(8)),
    {"_step": 8, "_timestamp": 1e9 + 8, "val/clip_val_loss": 1.25, "epoch": 2},
]  # fmt: skip
ROWS[4].update({"val/clip_val_loss": 1.5, "epoch": 1})  # wandb joins what is logged at one step


def export_text(form: str) -> str:
    if form == "json":
        return json.dumps(ROWS)
    if form == "jsonl":
        return "".join(json.dumps(row) + "\n" for row in ROWS)
    names = list(dict.fromkeys(name for row in ROWS for name in row))
    heads = {"_step": "Step"} if form == "chart" else {}
    prefix = "kept - " if form == "chart" else ""
    head = ",".join('"' + heads.get(name, prefix + name) + '"' for name in names)
    return "\n".join([head, *(",".join(str(row.get(name, "")) for name in names) for row in ROWS)]) + "\n"


@pytest.mark.parametrize("form", ["csv", "chart", "json", "jsonl"])
def test_an_exported_history_is_read(form: str, write_run: Any) -> None:
    folder = write_run("kept")
    suffix = "csv" if form == "chart" else form
    (folder / f"wandb-history.{suffix}").write_text(export_text(form), encoding="utf-8")
    frame = collect([folder]).checkpoints
    assert frame["samples_seen"].tolist() == [32, 64]
    assert frame["val_loss"].tolist() == [1.5, 1.25]
    assert frame["train_loss"].tolist() == pytest.approx([sum(LOSSES) / 4, 1.42])
    assert frame["hours"].tolist() == pytest.approx([3 / 3600, 7 / 3600])


def test_an_exported_history_may_begin_with_the_last_row(write_run: Any) -> None:
    folder = write_run("backwards")
    (folder / "wandb-history.json").write_text(json.dumps(ROWS[::-1]), encoding="utf-8")
    frame = collect([folder]).checkpoints
    assert frame["hours"].tolist() == pytest.approx([3 / 3600, 7 / 3600])
    assert frame["val_loss"].tolist() == [1.5, 1.25]


def test_a_thinned_out_history_still_has_whole_epochs(write_run: Any) -> None:
    folder = write_run("thin")
    kept = [row for row in ROWS if row["_step"] in (1, 4, 6, 8)]
    (folder / "wandb-history.json").write_text(json.dumps(kept), encoding="utf-8")
    found = collect([folder])
    assert found.checkpoints["samples_seen"].tolist() == [32, 64]
    assert found.curves["step"].tolist() == [2, 5, 7]


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("json", "{", "cannot be read"),
        ("json", "[1]", "not a list of objects"),
        ("csv", "a,b\n1,2\n", "has no row with _step and train/loss"),
        ("csv", 'Step,"a - train/loss","b - train/loss"\n0,1.0,2.0\n', "it holds 2 runs"),
    ],
)
def test_an_export_that_cannot_be_used_is_named(name: str, text: str, named: str, write_run: Any) -> None:
    folder = write_run("export")
    (folder / f"wandb-history.{name}").write_text(text, encoding="utf-8")
    assert named in notices_of(collect([folder]))


def test_a_folder_that_holds_nothing_of_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").mkdir()
    with pytest.raises(
        UserError, match=r"No OpenCLIP run \(out.log, params.txt, run.json, tensorboard or wandb\)"
    ):
        collect([tmp_path])
