"""The quickstart at its smoke size: everything for real, and a second call repeats nothing."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from openclip_linattn.errors import UserError
from openclip_linattn.ladder import Recipe, Run, _last_line, train_ladder
from openclip_linattn.quickstart import TINY, quickstart

RECIPE = Recipe(
    "a.tar", "b.tar", 8, epoch_samples=64, epochs=2, batch_size=8, learning_rate=1e-3, warmup_steps=1
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("quick")
    quickstart(out, sizes=("ViT-T32-8", "ViT-T64-8"), scale=TINY)
    return out


@pytest.mark.slow
def test_report_links_pictures_that_exist(finished):
    text = (finished / "report" / "report.md").read_text()
    pictures = [line.split("](")[1].rstrip(")") for line in text.splitlines() if line.startswith("![")]
    assert len(pictures) >= 6
    for picture in pictures:
        assert (finished / "report" / picture).stat().st_size > 5_000, picture
    assert "samples-shapes.png" in pictures
    assert "not reliable" in text
    for attention in ("softmax", "linear", "normlinear"):
        assert f"| ViT-T64-8-{attention} | 384 |" in text
    assert "shapes/color x shape/top1" in text
    assert "digits/digit/top1" in text
    assert str(finished) not in text


@pytest.mark.slow
def test_runs_are_finished_and_evaluated(finished):
    for attention in ("softmax", "linear", "normlinear"):
        folder = finished / "logs" / f"ViT-T32-8-{attention}"
        facts = json.loads((folder / "run.json").read_text())
        assert (facts["status"], facts["attention"]) == ("finished", attention)
        assert facts["seen"] == {"epochs": 3, "steps": 12, "samples": 384}
        rows = [
            json.loads(line) for line in (folder / "checkpoints" / "zeroshot.jsonl").read_text().splitlines()
        ]
        assert {row["epoch"] for row in rows} == {1, 2, 3}
        assert {(row["dataset"], row["n"]) for row in rows} == {("shapes", 64), ("digits", 360)}
        assert [path.name for path in (folder / "checkpoints").glob("*.pt")] == ["epoch_3.pt"]


@pytest.mark.slow
def test_a_second_call_trains_nothing(finished, monkeypatch):
    def refuse(*_: object) -> None:
        raise AssertionError("a finished run was started again")

    monkeypatch.setattr("openclip_linattn.ladder._Children.start", refuse)
    before = (finished / "report" / "report.md").read_text()
    quickstart(finished, sizes=("ViT-T32-8", "ViT-T64-8"), scale=TINY)
    assert (finished / "report" / "report.md").read_text() == before


@pytest.mark.slow
def test_other_settings_do_not_overwrite_the_runs(finished):
    from dataclasses import replace

    with pytest.raises(UserError, match="holds a run with other settings"):
        quickstart(finished, sizes=("ViT-T32-8",), scale=replace(TINY, epochs=4))


def make_run(folder: Path, *, epochs: int = 0, status: str = "running") -> Run:
    run = Run("ViT-T32-8-linear", RECIPE, folder)
    (run.folder / "checkpoints").mkdir(parents=True)
    (run.folder / "out.log").write_text("... Train Epoch: 1 [16/64 (25%)] Data (t): 0\n")
    for epoch in range(1, epochs + 1):
        (run.folder / "checkpoints" / f"epoch_{epoch}.pt").touch()
    command = " ".join(["python", "-m", "openclip_linattn.train", *run.arguments])
    (run.folder / "run.json").write_text(json.dumps({"status": status, "command": command}))
    return run


@pytest.mark.parametrize(
    ("epochs", "status", "expected"),
    [(0, "running", "trained"), (1, "failed", "resumed"), (2, "finished", "already done")],
)
def test_how_a_run_is_taken_up(tmp_path, monkeypatch, epochs, status, expected):
    run = make_run(tmp_path, epochs=epochs, status=status)
    started = []

    class Child:
        returncode = 0

        def poll(self) -> int:
            return 0

    monkeypatch.setattr("openclip_linattn.ladder._Children.start", lambda *a: started.append(a[1]) or Child())
    done = []
    (outcome,) = train_ladder([run], jobs=1, after=done.append)
    assert outcome.status == expected
    assert done == [run]
    assert [command[-2:] == ["--resume", "latest"] for command in started] == {
        "trained": [False], "resumed": [True], "already done": []
    }[expected]  # fmt: skip
    assert run.folder.exists() == (expected != "trained")  # what cannot be resumed was cleared away


def test_progress_is_read_from_the_log(tmp_path):
    run = make_run(tmp_path)
    assert run.samples_seen() == 64 + 16
    assert Run("ViT-T32-8-softmax", RECIPE, tmp_path).samples_seen() == 0


@pytest.mark.slow
def test_a_failed_run_is_named_with_its_last_line(tmp_path):
    run = Run("ViT-T32-8-linear", RECIPE, tmp_path)
    with pytest.raises(UserError, match=r"ViT-T32-8-linear failed: exit status 2; .*a\.tar"):
        train_ladder([run], jobs=1)


def test_a_folder_that_is_no_run_is_left_alone(tmp_path):
    run = Run("ViT-T32-8-linear", RECIPE, tmp_path)
    run.folder.mkdir()
    (run.folder / "thesis.tex").touch()
    with pytest.raises(UserError, match="no training run"):
        train_ladder([run], jobs=1)
    assert (run.folder / "thesis.tex").exists()


def test_openclip_s_own_run_is_left_alone(tmp_path):
    run = Run("ViT-T32-8-linear", RECIPE, tmp_path)
    run.folder.mkdir()
    (run.folder / "out.log").write_text("a run without checkpoints, trained by another command")
    with pytest.raises(UserError, match="no training run of ours"):
        train_ladder([run], jobs=1)
    assert (run.folder / "out.log").exists()


def test_one_evaluation_that_fails_does_not_end_the_others(tmp_path):
    runs = [make_run(tmp_path / name, epochs=2, status="finished") for name in ("a", "b")]
    evaluated = []

    def evaluate(run: Run) -> None:
        if run is runs[0]:
            raise UserError("no images")
        evaluated.append(run)

    with pytest.raises(UserError, match="ViT-T32-8-linear failed: no images"):
        train_ladder(runs, jobs=1, after=evaluate)
    assert evaluated == runs[1:]


def test_the_reason_of_a_failure_is_found_in_its_output(tmp_path):
    log = tmp_path / "log"
    for text, reason in (
        ("Traceback\n  File x\ntorch.OutOfMemoryError: 3 GB\nI1130 00:26:02.897 cache_hits: 0\n", "3 GB"),
        ("error: no shards\n\n", "error: no shards"),
        ("Train Epoch: 0\nW1130 00:26:02.897 x\n", "Train Epoch: 0"),
        ("", "no output"),
    ):
        log.write_text(text)
        assert _last_line(log).endswith(reason)


LADDER = """
import sys
from pathlib import Path
from openclip_linattn.ladder import Recipe, Run, train_ladder
recipe = Recipe("a.tar", "b.tar", 8, epoch_samples=64, epochs=2, batch_size=8, learning_rate=1e-3, warmup_steps=1)
sys.executable = sys.argv[2]  # what the ladder starts for each run
train_ladder([Run("ViT-T32-8-linear", recipe, Path(sys.argv[1]))], jobs=1)
"""


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGKILL])
def test_a_second_ladder_is_refused_and_children_end_with_theirs(tmp_path, ending):
    sleeper, logs = tmp_path / "sleeper", tmp_path / "logs"
    sleeper.write_text(
        f"#!/bin/sh\necho $$ > {tmp_path}/pid.part\nmv {tmp_path}/pid.part {tmp_path}/pid\nexec sleep 60\n"
    )
    sleeper.chmod(0o755)
    ladder = subprocess.Popen([sys.executable, "-c", LADDER, str(logs), str(sleeper)], stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not (tmp_path / "pid").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    child = int((tmp_path / "pid").read_text())
    run = Run("ViT-T32-8-linear", RECIPE, logs)
    with pytest.raises(UserError, match="another ladder trains in"):
        train_ladder([run], jobs=1)
    ladder.send_signal(ending)
    ladder.communicate(timeout=30)
    if ending == signal.SIGTERM:
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)
    else:  # nothing can be done when killed; but the child it left keeps the folder
        with pytest.raises(UserError, match="a run that it left behind"):
            train_ladder([run], jobs=1)
        os.kill(child, signal.SIGKILL)


def test_an_interrupt_ends_the_children(tmp_path, monkeypatch):
    from openclip_linattn.ladder import _Children

    children = _Children()
    child = children.start(["sleep", "60"], tmp_path / "log")
    children.terminate()
    started = time.monotonic()
    assert child.wait(timeout=10) != 0
    assert time.monotonic() - started < 10
    with pytest.raises(RuntimeError, match="interrupted"):
        children.start(["sleep", "60"], tmp_path / "log")
    assert [path.name for path in tmp_path.iterdir()] == ["log"]
