"""Ladders on SLURM: the job, the watch over all jobs, and one run through a real SLURM of one node."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from openclip_linattn.cli import app
from openclip_linattn.errors import UserError
from openclip_linattn.ladder import slurm
from openclip_linattn.ladder.plan import Ladder, read_ladder
from openclip_linattn.ladder.slurm import train_on_cluster
from openclip_linattn.ladder.slurm_task import Evaluating, TrainingTask, ending_file, launcher, read_ending

ROOT = Path(__file__).parents[2]
NOTHING = Evaluating((), 128, "fp32", keep_checkpoints=True)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Puts shell scripts in the place of SLURM's commands, by their names."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def put(**scripts: str) -> Path:
        for name, script in scripts.items():
            (folder / name).write_text(f"#!/bin/sh\n{script}\n")
            (folder / name).chmod(0o755)
        return folder

    return put


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a job's first task."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_PROCID", "0")


@pytest.fixture
def trains_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes a shell script what the runs are trained by."""

    def make(script: str) -> None:
        (tmp_path / "python").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "python").chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))

    return make


def test_a_job_trains_deaf_to_submitit_s_signal_and_writes_down_how_it_ended(
    new_run, job, trains_by, tmp_path
):
    trains_by(f'kill -USR2 $$\necho "$@" > {tmp_path}/started')
    assert TrainingTask(new_run, 1, 1.0, NOTHING)() == "trained"
    assert (tmp_path / "started").read_text().endswith("--resume latest\n")
    assert read_ending(new_run).status == "trained"


@pytest.mark.parametrize(("status", "again"), [(1, True), (2, False)])
def test_a_job_that_fails_says_why_and_whether_to_try_again(new_run, job, trains_by, status, again):
    trains_by(f"echo error: no card\nexit {status}")
    assert TrainingTask(new_run, 1, 1.0, NOTHING)() == "failed"
    ending = read_ending(new_run)
    assert (ending.status, ending.again) == ("failed", again)
    assert ending.message.startswith(f"exit status {status}; error: no card (")


def test_an_evaluation_that_breaks_down_is_told_and_tried_again(make_run, job, monkeypatch):
    def evaluate(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr("openclip_linattn.ladder.slurm_task.evaluate_run", evaluate)
    run = make_run(epochs=2, status="finished")
    assert TrainingTask(run, 1, 1.0, NOTHING)() == "failed"
    ending = read_ending(run)
    assert (ending.message, ending.again) == ("not evaluated: RuntimeError: out of memory", True)


def test_a_job_of_a_finished_run_only_evaluates(make_run, job, trains_by, tmp_path):
    run = make_run(epochs=2, status="finished")
    trains_by(f"touch {tmp_path}/started")
    evaluating = Evaluating((str(tmp_path / "none"),), 128, "fp32", keep_checkpoints=True)
    assert TrainingTask(run, 1, 1.0, evaluating)() == "failed"
    assert not (tmp_path / "started").exists()
    assert read_ending(run).message.startswith("not evaluated: ")


@pytest.mark.parametrize(
    ("shown", "word", "requeued"),
    [
        ("JobState=RUNNING PreemptTime=None", "failed", False),
        ("JobState=COMPLETING PreemptTime=2026-01-01", "failed", False),
        ("JobState=RUNNING PreemptTime=2026-01-01T00:00:00", "preempted", True),
    ],
)
def test_a_job_that_is_told_to_end_goes_back_into_the_queue_where_it_was_preempted(
    new_run, job, trains_by, programs, tmp_path, shown, word, requeued
):
    programs(scontrol=f'[ "$1" = requeue ] && touch {tmp_path}/requeued-$2\necho {shown}')
    trains_by("kill -TERM $PPID\nexit 143")
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *_: None)  # submitit's
    try:
        assert TrainingTask(new_run, 1, 1.0, NOTHING)() == word
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (tmp_path / "requeued-7").exists() == requeued
    ending = read_ending(new_run)
    assert ending is None if requeued else (ending.message, ending.again) == ("it was cancelled", False)


@pytest.mark.parametrize(
    ("hours", "epoch", "goes_on"), [(9, False, True), (0.01, True, True), (0.01, False, False)]
)
def test_a_job_that_is_stopped_goes_back_into_the_queue_unless_it_cannot_get_on(
    make_run, job, trains_by, tmp_path, hours, epoch, goes_on
):
    run = make_run(epochs=1)
    new = f"touch {run.folder}/checkpoints/epoch_2.pt" if epoch else ":"
    trains_by(
        f"trap 'touch {tmp_path}/ended; exit 143' TERM\n{new}\ntouch {tmp_path}/on\nwhile :; do sleep 0.05; done"
    )
    task = TrainingTask(run, 1, hours, NOTHING)
    found = []

    def stop(*_: object) -> None:  # as submitit's handler does
        found.append(task.checkpoint())
        raise InterruptedError

    before = signal.signal(signal.SIGUSR2, stop)
    sends = f"while [ ! -e {tmp_path}/on ]; do sleep 0.05; done; kill -USR2 {os.getpid()}"
    try:
        with subprocess.Popen(["sh", "-c", sends]), pytest.raises(InterruptedError):
            task()
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert task._child.wait() == 143
    assert (tmp_path / "ended").exists()
    assert (found[0] is not None) == goes_on
    if goes_on:
        assert found[0].function == TrainingTask(run, 1, hours, NOTHING)
    else:
        assert "not one epoch was finished within 0.01 hours" in read_ending(run).message


def test_several_nodes_meet_at_the_first(job, monkeypatch):
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[03-04]")
    assert launcher(1, 1) == ()
    assert launcher(1, 4) == ("--standalone", "--nnodes", "1", "--nproc-per-node", "4")
    assert launcher(2, 16) == (
        *("--nnodes", "2", "--nproc-per-node", "8", "--rdzv-backend", "c10d"),
        *("--rdzv-endpoint", "node03:10007", "--rdzv-id", "7.0"),
    )


class Cluster:
    """Stands for submitit: a submitted job does what the run's next act says, before the next look at the queue."""

    def __init__(self, acts: dict[str, list[str]]) -> None:
        self.acts, self.submitted = acts, []

    def update_parameters(self, name: str) -> None:
        self.name = name

    def submit(self, task: TrainingTask) -> "Cluster":
        act = self.acts[task.run.model].pop(0)
        self.submitted.append((task.run.model, act))
        self.job_id = str(len(self.submitted))
        task.run.logs.mkdir(parents=True, exist_ok=True)
        if "epoch" in act:
            (task.run.folder / "checkpoints").mkdir(parents=True, exist_ok=True)
            (task.run.folder / "checkpoints" / f"epoch_{self.job_id}.pt").touch()
        word = act.split()[-1]
        if word != "silence":
            status, again = "trained" if word == "trains" else "failed", word != "refuses"
            ending = {"status": status, "message": word, "again": again}
            ending_file(task.run).write_text(json.dumps({**ending, "sets": []}))
        return self


@pytest.fixture
def watched(write_plan, tmp_path, monkeypatch) -> Callable[..., tuple[Ladder, Cluster]]:
    """A ladder of two runs on a cluster that does what ACTS say."""

    def make(softmax: list[str], linear: list[str]) -> tuple[Ladder, Cluster]:
        path = write_plan(sizes="ViT-T32-8", executor={"slurm": {}})
        cluster = Cluster({"ViT-T32-8-softmax": softmax, "ViT-T32-8-linear": linear})
        monkeypatch.setattr(slurm, "_executor", lambda *_: cluster)
        return read_ladder(path, tmp_path / "out"), cluster

    return make


def climbed(ladder: Ladder) -> dict[str, tuple[str, str]]:
    outcomes = train_on_cluster(ladder, ladder.spec.executor.slurm, Console(stderr=True), look_seconds=0.01)
    return {outcome.run.model.split("-")[-1]: (outcome.status, outcome.message) for outcome in outcomes}


@pytest.mark.parametrize(
    ("acts", "status", "message"),
    [
        (["fails", "trains"], "trained", ""),
        (["silence", "trains"], "trained", ""),
        (["fails", "fails"], "failed", "fails (job "),
        (
            ["silence", "silence"],
            "failed",
            "ended without a word: out of memory, killed, or its node was lost",
        ),
        (["refuses"], "failed", "refuses (job "),
        (["epoch fails", "epoch fails", "epoch silence", "fails", "trains"], "trained", ""),
    ],
)
def test_a_job_that_fails_is_submitted_again_while_it_gets_on_or_has_tries_left(
    watched, programs, acts, status, message
):
    programs(squeue="")
    ladder, cluster = watched(list(acts), ["trains"])
    found = climbed(ladder)
    assert found["softmax"][0] == status
    assert message in found["softmax"][1]
    assert found["linear"] == ("trained", "")
    assert [act for model, act in cluster.submitted if model.endswith("softmax")] == acts


def test_a_job_that_is_there_is_watched_and_not_submitted_again(watched, programs, tmp_path):
    ladder, cluster = watched(["trains"], ["trains"])
    run = ladder.runs[0]
    name = slurm._job_name(run)
    run.logs.mkdir(parents=True)
    looks = tmp_path / "looks"
    programs(  # gone at the third look, trained
        squeue=f'echo >> {looks}\n[ "$(wc -l < {looks})" -lt 3 ] && echo "41 {name}" && exit\n'
        f"""echo '{{"status": "trained", "message": "", "again": false, "sets": []}}' > {ending_file(run)}"""
    )
    assert {status for status, _ in climbed(ladder).values()} == {"trained"}
    assert [model for model, _ in cluster.submitted] == [ladder.runs[1].model]


def test_a_run_that_is_trained_and_evaluated_needs_no_job(watched, programs):
    programs(squeue="")
    ladder, cluster = watched(["trains"], ["trains", "trains"])
    climbed(ladder)
    (run,) = [run for run in ladder.runs if run.model.endswith("softmax")]
    run.folder.mkdir()
    (run.folder / "run.json").write_text('{"status": "finished"}')
    assert climbed(ladder) == {"softmax": ("already done", ""), "linear": ("trained", "")}
    assert len(cluster.submitted) == 3


def test_a_queue_that_does_not_answer_at_first_ends_the_ladder_and_later_does_not(
    watched, programs, tmp_path
):
    ladder, cluster = watched(["trains"], ["trains"])
    programs(squeue="exit 1")
    with pytest.raises(UserError, match="squeue does not answer"):
        climbed(ladder)
    assert cluster.submitted == []
    looks = tmp_path / "looks"
    programs(squeue=f'echo >> {looks}\n[ "$(wc -l < {looks})" != 2 ]')
    assert {status for status, _ in climbed(ladder).values()} == {"trained"}
    assert len(looks.read_text()) == 3


def test_a_job_has_the_plan_s_options_and_a_cluster_that_does_not_take_it_is_named(
    write_plan, tmp_path, programs
):
    programs(squeue="", srun="", sbatch=f"cp $1 {tmp_path}/script\necho no such partition >&2\nexit 1")
    path = write_plan(
        executor={"slurm": {"partition": "none", "options": {"constraint": "a100", "exclusive": True}}}
    )
    with pytest.raises(
        UserError, match=r"the cluster does not take the job of ViT-T64-8-softmax.*no such partition"
    ):
        climbed(read_ladder(path, tmp_path / "out"))
    text = (tmp_path / "script").read_text()
    wanted = (
        "partition=none",
        "constraint=a100",
        "exclusive",
        "time=1440",
        "requeue",
        "signal=USR2@300",
        "ntasks-per-node=1",
    )
    for option in wanted:
        assert f"#SBATCH --{option}\n" in text


DAEMONS = ("munged", "slurmctld", "slurmd")


@pytest.fixture
def real_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A SLURM of this test's own, which leaves no daemon."""
    script = ["bash", str(ROOT / "tests" / "laion400m" / "one_node_slurm.sh")]
    subprocess.run([*script, "start", str(tmp_path / "slurm")], check=True, timeout=60)
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm" / "slurm.conf"))
    yield
    subprocess.run([*script, "stop", str(tmp_path / "slurm")], check=True, timeout=60)


def wait_until(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < end, f"not in time: {what}"
        time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.skipif(
    not all(map(shutil.which, (*DAEMONS, "sbatch"))), reason="no SLURM here: apt-get install slurm-wlm munge"
)
def test_a_run_goes_through_slurm_is_left_taken_up_requeued_and_reported(real_slurm, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    plan = tmp_path / "plan.yaml"
    tiny = (ROOT / "scaling" / "plans" / "tiny.yaml").read_text()
    for old, new in (
        ("epochs: 2", "epochs: 8"),
        ("s: 256", "s: 2048"),
        ("[softmax, normlinear]", "normlinear"),
    ):
        tiny = tiny.replace(old, new)
    plan.write_text(f"{tiny}executor: {{slurm: {{hours: 1}}}}\n")
    call = ["ladder", str(plan), "--out", str(tmp_path / "out")]
    (run,) = read_ladder(plan, tmp_path / "out").runs
    ladder = subprocess.Popen(
        [sys.executable, "-m", "openclip_linattn.cli", *call], stderr=subprocess.PIPE, text=True
    )
    wait_until((run.folder / "checkpoints" / "epoch_1.pt").exists, "the first checkpoint")
    ladder.send_signal(signal.SIGTERM)
    said = ladder.communicate(timeout=60)[1]
    assert "the jobs of 1 runs go on" in said
    number = re.search(r"job (\d+) submitted", said)[1]

    subprocess.run(["scancel", "--signal=USR2", number], check=True)  # as before a time limit or a preemption
    state = ["scontrol", "show", "job", number]
    shown = lambda: subprocess.run(state, capture_output=True, text=True, check=True).stdout  # noqa: E731
    wait_until(lambda: "JobState=PENDING" in shown() and "Restarts=1" in shown(), "the job in the queue")
    assert json.loads((run.folder / "run.json").read_text())["status"] == "interrupted"
    subprocess.run(["scontrol", "update", f"JobId={number}", "StartTime=now+2seconds"], check=True)

    result = CliRunner().invoke(app, call)
    assert result.exit_code == 0, result.stderr
    assert f"job {number} goes on" in result.stderr
    record = json.loads((run.folder / "run.json").read_text())
    assert (record["status"], record["seen"]["samples"]) == ("finished", 2048)
    assert [part["status"] for part in record["segments"]] == ["interrupted", "finished"]
    assert f"| {run.name} | 2,048 |" in (tmp_path / "out" / "report" / "report.md").read_text()
