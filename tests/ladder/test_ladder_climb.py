"""The smallest ladder, for real: ended by a signal, gone on with, a run that fails once, and the report."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from openclip_linattn.cli import app
from openclip_linattn.errors import UserError
from openclip_linattn.ladder.climb import climb
from openclip_linattn.ladder.folders import check_settings, prepare
from openclip_linattn.ladder.plan import read_ladder

TINY = Path(__file__).parents[2] / "scaling" / "plans" / "tiny.yaml"
SOFTMAX, LINEAR = (f"ViT-T32-8-{kind}-256-lr1e-3-seed0" for kind in ("softmax", "normlinear"))
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
# Trains as Python does; but of the run of normlinear attention it ends the first try after its first epoch.
FAILS_ONCE = """#!/bin/sh
case "$*" in
*--resume*) ;;
*{run}*)
    {python} "$@" &
    while [ ! -e {folder}/checkpoints/epoch_1.pt ]; do kill -0 $! || exit 3; sleep 0.02; done
    kill -9 $!
    echo "error: a card fell off"
    exit 9 ;;
esac
exec {python} "$@"
"""


def command(out: Path, *more: str) -> list[str]:
    call = [sys.executable, "-m", "openclip_linattn.cli", "ladder", str(TINY), "--out", str(out)]
    return [*call, "--jobs", "1", *more]


def wait_for(path: Path, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + 1200
    while not path.exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a ladder that was told to end when its first run had a checkpoint, and went on then."""
    folder = tmp_path_factory.mktemp("ladder")
    with subprocess.Popen(command(folder), stderr=subprocess.PIPE, env=ENVIRONMENT) as ladder:
        try:
            wait_for(folder / "logs" / SOFTMAX / "checkpoints" / "epoch_1.pt", ladder)
            ladder.send_signal(signal.SIGTERM)
            ladder.communicate(timeout=300)
        finally:
            ladder.kill()
    assert ladder.returncode not in (0, 2)
    assert not (folder / "logs" / LINEAR).exists()
    return folder


@pytest.fixture(scope="module")
def result(out: Path, tmp_path_factory: pytest.TempPathFactory):
    """What the same ladder printed in JSON, with a run that fails once."""
    stand_in = tmp_path_factory.mktemp("python") / "python"
    folder = out / "logs" / LINEAR
    stand_in.write_text(FAILS_ONCE.format(python=sys.executable, run=LINEAR, folder=folder))
    stand_in.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(stand_in))
        shown = CliRunner().invoke(app, ["ladder", str(TINY), "--out", str(out), "--jobs", "1", "--json"])
    assert shown.exit_code == 0, shown.stderr
    return json.loads(shown.stdout)


@pytest.mark.slow
def test_a_ladder_goes_on_where_it_was_ended_and_takes_a_failed_run_up_again(out, result):
    statuses = {run["run"]: run["status"] for run in result["runs"]}
    assert statuses[LINEAR] == "resumed"
    assert statuses[SOFTMAX] in ("resumed", "already done")  # the signal may have come after the last epoch
    record = json.loads((out / "logs" / LINEAR / "run.json").read_text())
    assert record["seen"] == {"epochs": 2, "steps": 8, "samples": 256}
    assert [part["start_epoch"] for part in record["segments"]] == [0, 1]
    assert record["segments"][0]["status"] == "killed"
    assert "error: a card fell off" in (out / "logs" / f"{LINEAR}.console.txt").read_text()


@pytest.mark.slow
def test_runs_are_evaluated_and_reported_with_the_plan(out, result):
    assert {run["message"] for run in result["runs"]} == {""}
    assert result["report"] == str(out / "report" / "report.md")
    text = (out / "report" / "report.md").read_text()
    assert text.startswith("# Ladder report\n\n2 runs of a [plan](../plan.yaml)")
    assert text.count("\n# Scaling\n") == 1
    for name in (SOFTMAX, LINEAR):
        assert f"| {name} | 256 |" in text
        folder = out / "logs" / name / "checkpoints"
        rows = [json.loads(line) for line in (folder / "zeroshot.jsonl").read_text().splitlines()]
        assert {(row["epoch"], row["dataset"]) for row in rows} == {
            (epoch, dataset) for epoch in (1, 2) for dataset in ("shapes", "digits")
        }
        assert [path.name for path in folder.glob("*.pt")] == ["epoch_2.pt"]
    assert (out / "plan.yaml").read_text() == TINY.read_text()
    assert (out / "report" / "samples-digits.png").stat().st_size > 5_000


@pytest.mark.slow
def test_a_ladder_that_is_done_trains_nothing_and_a_run_that_cannot_be_used_is_named(
    out, result, monkeypatch
):
    def refuse(*_: object) -> None:
        raise AssertionError("a finished run was started again")

    monkeypatch.setattr("openclip_linattn.ladder.children.Children.start", refuse)
    log = out / "logs" / SOFTMAX / "out.log"
    kept = log.read_text()
    log.write_text(kept.replace(" Loss: ", " Loss: nan (nan) Was: "))
    shown = CliRunner().invoke(app, ["ladder", str(TINY), "--out", str(out)])
    log.write_text(kept)
    path = out / "report" / "report.md"
    assert (shown.exit_code, shown.stdout.strip()) == (1, str(path))
    assert f"error: the run {SOFTMAX} failed: it diverged, and is left out of every fit" in shown.stderr
    assert [f"{run}: already done" in shown.stderr for run in (SOFTMAX, LINEAR)] == [True, True]
    assert f"## Runs that failed\n\n- {SOFTMAX}: it diverged" in path.read_text()


@pytest.mark.slow
def test_a_changed_plan_is_refused_where_there_are_runs_and_a_longer_one_is_not(out, result, tmp_path):
    changed = tmp_path / "changed.yaml"
    changed.write_text(TINY.read_text().replace("warmup: 2", "warmup: 1"))
    with pytest.raises(UserError, match=r"holds a run with other settings: --warmup was 2 and is now 1\."):
        climb(read_ladder(changed, out), Console(stderr=True))
    assert (out / "plan.yaml").read_text() == TINY.read_text()
    changed.write_text(TINY.read_text().replace("softmax, normlinear", "softmax, normlinear, linear"))
    runs = read_ladder(changed, out).runs
    for run in runs:
        check_settings(run)
    assert [prepare(run) for run in runs].count("already done") == len(runs) - 1 == 2


def test_without_a_trained_run_there_is_no_report(write_plan, tmp_path, monkeypatch):
    stand_in = tmp_path / "python"
    stand_in.write_text("#!/bin/sh\necho error: no shards\nexit 2\n")
    stand_in.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stand_in))
    path = write_plan(sizes="ViT-T32-8", attentions="linear")
    shown = CliRunner().invoke(app, ["ladder", str(path), "--out", str(tmp_path / "out")])
    assert shown.exit_code == 1
    assert "seed0 failed: exit status 2; error: no shards (" in shown.stderr
    assert not (tmp_path / "out" / "report").exists()
