"""Checks whose shards are read by the tasks of an array; here submitit runs them as processes of this machine."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from openclip_linattn.cli.data import app
from openclip_linattn.data.checks import cluster as cluster_check
from openclip_linattn.data.checks.check import check
from openclip_linattn.data.checks.cluster import ClusterReader, check_share, parse_options
from openclip_linattn.data.checks.verdicts import VerdictStore
from openclip_linattn.errors import UserError

pytest.importorskip("submitit")


def run(*arguments):
    return CliRunner().invoke(app, ["check", *map(str, arguments)])


@pytest.fixture
def local(monkeypatch, tmp_path):
    """Options of an array of two tasks on this machine."""
    monkeypatch.setattr(cluster_check, "POLL", 0.1)
    return ("--slurm-array", 2, "--slurm", "cluster=local", "--state", tmp_path / "state", "--json")


def test_two_tasks_find_what_one_process_finds(broken_set, local, tmp_path):
    result = run(broken_set, *local)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == [check(str(broken_set)).to_json()]
    (verdicts,) = (tmp_path / "state").glob("*.jsonl")
    assert len(verdicts.read_text(encoding="utf-8").splitlines()) == 3
    assert not list((tmp_path / "state").glob("tasks-*"))
    assert json.loads((broken_set / "sizes.json").read_text()) == {f"0000{n}.tar": 5 for n in range(3)}


def test_a_task_that_dies_is_named_and_only_its_shards_are_read_again(good_set, local, tmp_path, monkeypatch):
    monkeypatch.setattr("submitit.core.core.Job._results_timeout_s", 1)  # its wait for a slow file system
    # Shard 1 is the second task's, which is the parent of the process that reads it.
    script, log = tmp_path / "read.sh", tmp_path / "reads"
    script.write_text(
        f"test $1 = 1 && kill -9 $(cut -d' ' -f4 /proc/$PPID/stat) && exit\n"
        f"echo $1 >> {log}\ncat {good_set}/0000$1.tar\n"
    )
    source = f"pipe:exec sh {script} {{0..2}}"
    first = run(source, *local)
    assert first.exit_code == 1
    (report,) = json.loads(first.stdout)
    assert (report["usable"], report["unfinished"]) == (20, [f"pipe:exec sh {script} 1"])
    assert "error: task " in first.stderr
    assert "failed" in first.stderr
    stated = Path(first.stderr.partition("its log is ")[2].partition(". Run")[0])
    assert stated.is_file()
    script.write_text(f"echo $1 >> {log}\ncat {good_set}/0000$1.tar\n")
    again = run(source, *local)
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout)[0]["usable"] == 30
    assert sorted(log.read_text().split()) == ["0", "1", "2"]


def test_the_share_of_one_task(broken_set, tmp_path):
    urls = [str(broken_set / "00000.tar"), f"pipe:cat {broken_set}/absent.tar"]
    (unread,) = check_share(urls, str(tmp_path / "state"))
    assert unread["url"] == urls[1]
    assert "No such file" in unread["fault"]
    (verdicts,) = (tmp_path / "state").glob("*.jsonl")
    assert [json.loads(line)["url"] for line in verdicts.read_text(encoding="utf-8").splitlines()] == urls[:1]


def test_options_are_pairs():
    assert parse_options(["partition=cpu", "comment=a=b"]) == {"partition": "cpu", "comment": "a=b"}
    for option in ("partition", "=cpu", "partition="):
        with pytest.raises(UserError, match="KEY=VALUE"):
            parse_options([option])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--slurm-array", 2, "--slurm", "cluster=moon"), "moon"),
        (("--slurm-array", 2, "--slurm", "cluster=local", "--slurm", "colour=red"), "colour"),
        (("--slurm-array", 2, "--slurm", "cluster=local", "--slurm", "timeout_min=soon"), "timeout_min"),
        (("--slurm", "partition=cpu"), "give --slurm-array"),
        (("--slurm-array", 2, "--workers", 2), "cpus_per_task"),
    ],
)
def test_wrong_options_are_sentences(arguments, said, good_set):
    result = run(good_set, *arguments)
    assert isinstance(result.exception, UserError)
    assert said in str(result.exception)


def test_without_slurm_a_sentence_says_so(good_set, monkeypatch):
    monkeypatch.setenv("PATH", "")
    result = run(good_set, "--slurm-array", 2)
    assert isinstance(result.exception, UserError)
    assert "srun" in str(result.exception)


def test_without_submitit_a_sentence_says_what_to_install(good_set, monkeypatch):
    monkeypatch.setitem(sys.modules, "submitit", None)
    result = run(good_set, "--slurm-array", 2)
    assert isinstance(result.exception, UserError)
    assert "pip install 'openclip-linattn[cluster]'" in str(result.exception)


class Job:
    """Stands for a submitted task of which nothing is heard again."""

    job_id = "17_0"

    def __init__(self):
        self.cancelled = False
        self.paths = SimpleNamespace(stderr="17_0.err")

    def done(self):
        return False

    def cancel(self, check):
        self.cancelled = True


class Executor:
    """Stands for submitit: takes the tasks, or fails as a cluster does that refuses them."""

    cluster = "slurm"

    def __init__(self, error=None):
        self.error, self.jobs, self.shares = error, [], []

    def map_array(self, task, shares, folders):
        if self.error is not None:
            raise self.error
        self.shares, self.jobs = shares, [Job() for _ in shares]
        return self.jobs


@pytest.fixture
def cluster_reader(tmp_path, monkeypatch):
    """Makes a reader that hands its tasks to an executor, and closes its store afterwards."""
    stores = []

    def make(executor, tasks=2):
        monkeypatch.setattr(cluster_check, "_executor", lambda folder, options: executor)
        stores.append(VerdictStore(tmp_path / "state"))
        return ClusterReader(stores[-1], tasks, {})

    yield make
    for store in stores:
        store.close(finished=False)


def test_shares_are_interleaved_and_tasks_are_cancelled_on_an_interrupt(cluster_reader, monkeypatch):
    executor = Executor()

    def interrupt(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(cluster_check.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        list(cluster_reader(executor)(["a", "b", "c", "d", "e"]))
    assert executor.shares == [["a", "c", "e"], ["b", "d"]]
    assert all(job.cancelled for job in executor.jobs)


def test_no_more_tasks_than_shards(cluster_reader, monkeypatch):
    executor = Executor()
    monkeypatch.setattr(cluster_check.ClusterReader, "_ended", lambda self, jobs: True)
    list(cluster_reader(executor, tasks=9)(["a", "b"]))
    assert executor.shares == [["a"], ["b"]]


def test_tasks_that_the_cluster_refuses_are_a_sentence(cluster_reader):
    executor = Executor(RuntimeError("sbatch: error: invalid partition specified: moon\n"))
    read = cluster_reader(executor)
    read.logs.mkdir()
    with pytest.raises(UserError, match="did not take the tasks: sbatch: error: invalid partition"):
        list(read(["a", "b"]))
    assert not read.logs.exists()
    assert list(read([])) == []


def put_squeue(folder, text, monkeypatch):
    """A command `squeue` that does what the shell script `text` says."""
    folder.mkdir(exist_ok=True)
    (folder / "squeue").write_text(f"#!/bin/sh\n{text}\n")
    (folder / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


@pytest.mark.parametrize(
    ("answer", "queue"),
    [
        ("echo RUNNING None", ["RUNNING None"]),
        ("true", []),
        ("echo slurm_load_jobs error: Invalid job id specified >&2; exit 1", []),
        ("echo Unable to contact slurm controller >&2; exit 1", None),
    ],
)
def test_the_queue_is_asked(answer, queue, tmp_path, monkeypatch):
    expected = "--noheader --format=%T %r --jobs 17,18"
    put_squeue(tmp_path / "bin", f'test "$*" = "{expected}" || exit 9\n{answer}', monkeypatch)
    assert cluster_check._queue({"18", "17"}) == queue


def test_a_queue_that_cannot_be_asked_proves_nothing(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert cluster_check._queue({"17"}) is None


def test_why_no_task_begins_is_said_once(cluster_reader, caplog):
    read = cluster_reader(Executor())
    for queue in (["PENDING Priority", "RUNNING None"], ["PENDING Resources"], ["PENDING Resources"], []):
        read._say_why_waiting(queue)
    assert [record.getMessage() for record in caplog.records] == [
        "The tasks wait in SLURM's queue (Resources); their options are those of --slurm."
    ]


def test_tasks_that_are_gone_without_a_result_are_not_waited_for(cluster_reader, tmp_path, monkeypatch):
    put_squeue(tmp_path / "bin", "true", monkeypatch)
    monkeypatch.setattr(cluster_check, "LOOK", 0.0)
    read = cluster_reader(Executor())
    assert list(read(["a", "b"])) == []
    assert len(read.failures) == 2
    assert "error: task 17_0 failed (it ended without a result): its log is 17_0.err" in read.failures[0]


def test_the_reason_of_a_failure_is_the_last_thing_that_was_said():
    raised = (
        "Job (task=0) failed during processing with trace:\n-----\nTraceback\nOSError: disk is full.\n-----\n"
        "You can check full logs with 'job.stderr(0)' and 'job.stdout(0)'or at paths:\n  - a\n  - b"
    )
    assert cluster_check._reason(RuntimeError(raised)) == "OSError: disk is full"
    ended = (
        "Job 1 with path x\nhas not produced any output (state: TIMEOUT)\nError stream produced:\n----\nslow"
    )
    assert cluster_check._reason(RuntimeError(ended)) == "TIMEOUT, slow"
