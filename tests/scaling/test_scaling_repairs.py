"""Everything that is repaired or assumed in a run is said: clocks, processes, repeated steps, GPU-hours, noise."""

from __future__ import annotations

import io
import json
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from joblib import Parallel
from rich.console import Console

from openclip_scaling.reading.run_rows import condensed
from openclip_scaling.reading.runs import collect
from openclip_scaling.reading.smoothing import smoothed_loss
from openclip_scaling.screens.collect_screen import collect_command

LOSSES = [2.0, 1.9, 1.8, 1.7]
GPU = {"device": "cuda:0", "world_size": 4, "batch_size": 2}


def notices_of(collection: Any) -> str:
    return "\n".join(str(notice) for notice in collection.notices)


def test_a_long_pause_within_an_epoch_is_said_and_counted(fake: Any, write_run: Any) -> None:
    writer = fake.LogWriter()
    writer.process(fake.PARAMS)
    writer.epoch(0, 8, 32, LOSSES)
    writer.time += timedelta(hours=5)
    for step in range(1, 25):
        writer.train(1, 8 * step, 192, 1.6)
        writer.time += timedelta(hours=5 if step == 12 else 0)
    found = collect([write_run("pause", writer.text)])
    assert "the log stands still for 5.0 hours" in notices_of(found)
    assert notices_of(found).count("stands still") == 1  # a long evaluation between epochs is none


def test_another_number_of_processes_after_a_resume_is_said(
    log_writer: Any, fake: Any, write_run: Any
) -> None:
    log_writer.process(fake.PARAMS)
    log_writer.epoch(0, 8, 32, LOSSES)
    log_writer.process({**fake.PARAMS, "batch_size": 4, "world_size": 2}, resumed=True)
    log_writer.epoch(1, 8, 32, LOSSES)
    found = collect([write_run("world", log_writer.text)])
    assert "the number of processes changed on resume (1 -> 2)" in notices_of(found)
    assert "batch size changed" not in notices_of(found)


def test_steps_that_are_logged_twice_count_once(fake: Any, write_run: Any) -> None:
    writer = fake.LogWriter()
    writer.process(fake.PARAMS)
    writer.epoch(0, 8, 32, LOSSES)
    train = [line for line in writer.lines if "Train Epoch" in line]
    text = writer.text
    for line in train:
        text = text.replace(line, f"{line}\n{line}")
    found = collect([write_run("twice", text)])
    assert found.curves["step"].tolist() == [1, 2, 3, 4]
    assert "epoch 0: 4 logged steps are there twice" in notices_of(found)


def test_many_missing_epochs_are_counted_at_once(fake: Any, write_run: Any) -> None:
    writer = fake.LogWriter()
    writer.process({**fake.PARAMS, "epochs": 900_001})
    writer.epoch(0, 8, 32, LOSSES)
    writer.epoch(900_000, 8, 16, LOSSES[:2])
    found = collect([write_run("far", writer.text)])
    missing = 900_000 - 1
    near = missing // 2
    assert found.checkpoints["samples_seen"].tolist() == [32, 32 + near * 32 + (missing - near) * 16 + 16]
    assert "epochs 1 to 449999 are not in the log; they are counted like epoch 0" in notices_of(found)


def test_other_values_in_results_and_log_are_said(log_writer: Any, fake: Any, write_run: Any) -> None:
    log_writer.process({**fake.PARAMS, "epochs": 1})
    log_writer.epoch(0, 8, 32, LOSSES)
    log_writer.evaluation(1, clip_val_loss=1.5)
    found = collect([write_run("apart", log_writer.text, results=[{"clip_val_loss": 1.4, "epoch": 1}])])
    assert found.checkpoints["val_loss"].tolist() == [1.4]
    assert "results.jsonl and out.log have other values for epoch 1" in notices_of(found)


def test_two_evaluations_of_an_epoch_in_the_log_are_said(log_writer: Any, fake: Any, write_run: Any) -> None:
    log_writer.process({**fake.PARAMS, "epochs": 1})
    log_writer.epoch(0, 8, 32, LOSSES)
    log_writer.evaluation(1, clip_val_loss=1.5)
    log_writer.evaluation(1, clip_val_loss=1.4)
    found = collect([write_run("again", log_writer.text)])
    assert found.checkpoints["val_loss"].tolist() == [1.4]
    assert "out.log has more than one evaluation of epoch 1; the later one is used" in notices_of(found)


def test_gpu_hours_are_hours_times_the_gpus_of_each_process_group(fake: Any, write_run: Any) -> None:
    writer = fake.LogWriter()
    params = {**fake.PARAMS, **GPU}
    writer.process(params)
    writer.train(0, 8, 16, 2.0)
    writer.time += timedelta(hours=1)
    writer.train(0, 16, 16, 2.0)
    writer.process({**params, "world_size": 8, "batch_size": 1}, resumed=True)
    writer.time += timedelta(hours=2)
    writer.epoch(1, 8, 16, [1.9, 1.8])
    frame = collect([write_run("gpu", writer.text)]).checkpoints
    assert frame["hours"].tolist() == pytest.approx([1, 3], abs=0.01)
    assert frame["gpu_hours"].tolist() == pytest.approx([4, 20], abs=0.1)


@pytest.mark.parametrize("device", ["cpu", None])
def test_hours_of_a_cpu_or_of_an_unknown_device_are_no_gpu_hours(
    device: Any, fake: Any, write_run: Any
) -> None:
    params = {**fake.PARAMS, **({"device": device} if device else {})}
    writer = fake.LogWriter()
    writer.process(params)
    writer.epoch(0, 8, 32, LOSSES)
    text = writer.text if device else writer.text.replace("Device cpu.", "")
    frame = collect([write_run("cpu", text, params)]).checkpoints
    assert frame["gpu_hours"].isna().all()
    assert frame["hours"].notna().all()


def test_gpus_are_known_from_the_first_line_of_a_distributed_run(fake: Any, write_run: Any) -> None:
    params = {key: value for key, value in fake.PARAMS.items() if key != "world_size"}
    writer = fake.LogWriter()
    writer.process(params)
    writer.epoch(0, 8, 32, LOSSES)
    said = (
        "Running in distributed mode with multiple processes. Device: cuda:0."
        "Process (global: 0, local 0), total 16."
    )
    text = writer.text.replace("Running with a single process. Device cpu.", said)
    (row,) = collect([write_run("many", text, params)]).checkpoints.to_dict("records")
    assert row["gpu_hours"] == pytest.approx(16 * row["hours"])
    assert row["batch"] == 16 * 8


def test_the_error_of_the_smoothed_loss_is_that_of_repeated_runs() -> None:
    """Of 4,000 curves that fall and scatter by 0.05, the mean's scatter is what each curve says of itself."""
    generator = np.random.default_rng(0)
    falling = np.linspace(3, 2, 400)
    found = [smoothed_loss((falling + 0.05 * generator.normal(size=400)).tolist()) for _ in range(4000)]
    means, errors = (np.array(column, dtype=float) for column in zip(*found, strict=True))
    assert means.mean() == pytest.approx(falling[-40:].mean(), abs=5e-4)
    assert np.sqrt((errors**2).mean()) == pytest.approx(means.std(), rel=0.04)
    assert means.std() == pytest.approx(0.05 / np.sqrt(40), rel=0.04)


def test_many_logs_are_read_by_several_processes_to_the_same_tables(
    fake: Any, write_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "c"):
        writer = fake.LogWriter()
        writer.process(fake.PARAMS)
        writer.epoch(0, 8, 32, LOSSES)
        folder = write_run(name, writer.text)
    alone = collect([folder.parent])
    monkeypatch.setattr("openclip_scaling.reading.runs._BYTES_FOR_PROCESSES", 0)
    monkeypatch.setattr("openclip_scaling.reading.runs.cpu_count", lambda: 2)
    processes: list[int] = []

    def counted(n_jobs: int, **options: Any) -> Any:
        processes.append(n_jobs)
        return Parallel(n_jobs=n_jobs, **options)

    monkeypatch.setattr("openclip_scaling.reading.runs.Parallel", counted)
    seen: list[tuple[int, int]] = []
    together = collect([folder.parent], lambda done, total: seen.append((done, total)))
    assert together.checkpoints.equals(alone.checkpoints)
    assert together.curves.equals(alone.curves)
    assert together.notices == alone.notices
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert processes == [2]


def test_a_terminal_sees_how_many_runs_are_read(
    fake: Any, write_run: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        folder = write_run(name)
    terminal = Console(file=io.StringIO(), force_terminal=True, width=80)
    monkeypatch.setattr("openclip_scaling.screens.collect_screen.stderr", lambda: terminal)
    collect_command([folder.parent])
    assert "reading runs" in terminal.file.getvalue()  # type: ignore[attr-defined]
    assert "2/2" in terminal.file.getvalue()  # type: ignore[attr-defined]
    assert "reading runs" not in "".join(capsys.readouterr())


def test_a_table_of_many_runs_says_how_many_it_shows(
    write_run: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("openclip_scaling.screens.collect_screen._SHOWN", 2)
    for name in ("first", "second"):
        folder = write_run(name)
    collect_command([folder.parent])
    assert "the first" not in capsys.readouterr().out
    write_run("third")
    collect_command([folder.parent])
    shown = capsys.readouterr().out
    assert "third" not in shown
    assert "the first 2 of 3 runs; --output writes all" in shown


def test_what_is_said_very_often_is_said_ten_times_and_counted(
    log_writer: Any, fake: Any, write_run: Any
) -> None:
    log_writer.process({**fake.PARAMS, "epochs": 1})
    log_writer.epoch(0, 8, 32, LOSSES)
    broken = [f"Train Epoch: 0 [ {seen}/32 Loss:" for seen in range(25)]
    for text in broken:
        log_writer.line(text)
    found = collect([write_run("broken", log_writer.text)])
    said = [notice.text for notice in found.notices if "cut or malformed" in notice.text]
    assert len(said) == 10
    assert [text.endswith("(and 15 more like this)") for text in said] == [False] * 9 + [True]
    assert condensed(["epoch 1 is 'a'"] * 10) == ["epoch 1 is 'a'"] * 10
    assert condensed([f"epoch {n}" for n in range(9)] + ["run"]) == [f"epoch {n}" for n in range(9)] + ["run"]


@pytest.mark.parametrize("steps", [None, 0])
def test_a_log_without_a_step_is_said(fake: Any, write_run: Any, steps: int | None) -> None:
    writer = fake.LogWriter()
    writer.process(fake.PARAMS)
    folder = write_run("nothing", writer.text)
    if steps is None:
        (folder / "out.log").write_bytes(b"")
    assert "out.log holds no training step that can be read" in notices_of(collect([folder]))


def test_numbers_that_a_crash_has_made_endless_are_no_numbers(
    log_writer: Any, fake: Any, write_run: Any
) -> None:
    params = {**fake.PARAMS, "world_size": "1e300", "epochs": 1}
    log_writer.process(params)
    log_writer.epoch(0, 8, 32, LOSSES)
    log_writer.line("Train Epoch: 0 [ 99999999999999999/999999999999999999 (99%)] Loss: 1.0 (1.0)")
    found = collect([write_run("endless", log_writer.text, params)])
    assert found.checkpoints["samples_seen"].tolist() == [32]
    assert "cut or malformed" in notices_of(found)


def test_the_row_of_a_run_has_the_batch_of_its_last_checkpoint(
    log_writer: Any, fake: Any, write_run: Any
) -> None:
    log_writer.process(fake.PARAMS)
    log_writer.epoch(0, 8, 32, LOSSES)
    params = {**fake.PARAMS, "batch_size": 16}
    log_writer.process(params, resumed=True)
    log_writer.epoch(1, 16, 32, LOSSES[:1])
    found = collect([write_run("killed", log_writer.text, params)])
    assert found.checkpoints["batch"].tolist() == found.runs["batch"].tolist() == [8]
    assert found.checkpoints["val_batch"].tolist() == found.runs["val_batch"].tolist() == [8]


def test_run_json_and_params_inside_checkpoints_and_code_are_no_runs(fake: Any, write_run: Any) -> None:
    folder = write_run("outer")
    for inner in ("checkpoints/old", "code/logs/x", "tensorboard/y"):
        (folder / inner).mkdir(parents=True)
        (folder / inner / "params.txt").write_text("epochs: 1\n")
    (folder / "sub").mkdir()
    (folder / "sub" / "run.json").write_text(json.dumps({"status": "finished"}))
    assert collect([folder]).runs["run"].tolist() == ["outer", "sub"]
