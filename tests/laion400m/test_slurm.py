"""The training job under a real SLURM of one node: signalled, preempted, failing, put back into the queue, resumed."""

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SCRIPTS = ROOT / "scripts" / "laion400m"
NAME = "T32-8-{}-1k-lr1.5e-3-seed0"
DAEMONS = ("munged", "slurmctld", "slurmd")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(map(shutil.which, (*DAEMONS, "sbatch"))),
        reason="no SLURM here: apt-get install slurm-wlm munge",
    ),
]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A SLURM of this module's own, which leaves no daemon; its value is the environment that finds it."""
    folder = tmp_path_factory.mktemp("slurm")
    script = ["bash", str(HERE / "one_node_slurm.sh")]
    subprocess.run([*script, "start", str(folder)], check=True, timeout=60)
    numbers = [int((folder / f"{name}.pid").read_text()) for name in DAEMONS]
    assert all(map(runs, numbers))
    yield {"SLURM_CONF": str(folder / "slurm.conf")}
    subprocess.run([*script, "stop", str(folder)], check=True, timeout=60)
    wait_until(lambda: not any(map(runs, numbers)), "the end of the daemons")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout with spaces in its path, and with a stand-in for training at `python`."""
    folder = tmp_path_factory.mktemp("copy") / "a check out"
    shutil.copytree(SCRIPTS, folder / "scripts" / "laion400m")
    shutil.copy(ROOT / "scripts" / "environment.sh", folder / "scripts")
    shutil.copytree(ROOT / "model_configs", folder / "model_configs")
    stand_in = folder / "python"
    stand_in.write_text(f"#!{sys.executable}\n{(HERE / 'training_stand_in.py').read_text()}")
    stand_in.chmod(0o755)
    return folder


def job_state(run, slurm, job: str) -> dict[str, str]:
    """SLURM's facts about a job, such as JobState and Restarts."""
    shown = run("scontrol", "show", "job", job, **slurm)
    assert shown.returncode == 0, shown.stderr
    return dict(part.split("=", 1) for part in shown.stdout.split() if "=" in part)


def runs(process: int) -> bool:
    """Whether a process is there and not only unreaped, as in a container whose first process reaps nobody."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], object], what: str, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.2)


def wait_for(run, slurm, job: str, state: str, restarts: int) -> None:
    """Waits until a job that went back into the queue so often has a state."""
    expected = {"JobState": state, "Restarts": str(restarts)}
    wait_until(lambda: expected.items() <= job_state(run, slurm, job).items(), f"job {job}: {expected}")


def start_again(run, slurm, job: str) -> None:
    """Ends the two minutes for which SLURM holds back a job, but for what its daemons need to forget it."""
    assert run("scontrol", "update", f"JobId={job}", "StartTime=now+2seconds", **slurm).returncode == 0


def submit(run, environment, scripts: Path, logs: Path, *options: str | Path, limit: str = "30") -> str:
    """Submits one run through submit.py, with a limit in minutes; returns its job number."""
    result = run(
        *(sys.executable, scripts / "submit.py", "--sizes", "T", "--samples", "1k"),
        *("--logs", logs, f"--sbatch=--time={limit}", *options),
        **environment,
    )
    assert result.returncode == 0, result.stderr
    return re.search(r"Submitted batch job (\d+)", result.stdout)[1]


@pytest.fixture
def stand_in(run, slurm, checkout: Path, tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Submits a run with the whole node that does what ACTS say; called with them, it returns the job's number."""
    jobs = []

    def call(acts: str, limit: str = "30") -> str:
        environment = {**slurm, "ACTS": acts, "OPENCLIP_LINATTN_PYTHON": str(checkout / "python")}
        options = ("--attentions", "softmax", "--data", "shards", "--sbatch=--exclusive")
        scripts, logs = checkout / "scripts" / "laion400m", tmp_path / "the logs"
        jobs.append(submit(run, environment, scripts, logs, *options, limit=limit))
        return jobs[-1]

    yield call
    run("scancel", *jobs, **slurm)  # a job that is left would hold up the next one of its name


def folder_of(tmp_path: Path) -> Path:
    return tmp_path / "the logs" / NAME.format("softmax")


def hanging(tmp_path: Path) -> None:
    """Waits until the training of a stand-in waits for a signal."""
    mark = folder_of(tmp_path) / "hangs"
    wait_until(mark.exists, "the training's start")
    mark.unlink()


def output(tmp_path: Path, job: str) -> str:
    return (folder_of(tmp_path) / f"slurm-{job}.txt").read_text()


def test_a_signalled_job_goes_back_into_the_queue_and_resumes_to_the_end(run, slurm, shards, tmp_path):
    job = submit(
        run, slurm, SCRIPTS, tmp_path, "--attentions", "normlinear", "--data", shards, "--", "--epochs", "6"
    )
    folder = tmp_path / NAME.format("normlinear")
    wait_until((folder / "checkpoints" / "epoch_2.pt").exists, "the second checkpoint")
    assert run("scancel", "--signal=USR1", "--batch", job, **slurm).returncode == 0
    wait_for(run, slurm, job, "PENDING", 1)
    interrupted = json.loads((folder / "run.json").read_text())
    assert interrupted["status"] == "interrupted"
    first = interrupted["segments"][0]["seen"]["epochs"]
    assert 2 <= first < 6

    start_again(run, slurm, job)
    wait_for(run, slurm, job, "COMPLETED", 1)
    finished = json.loads((folder / "run.json").read_text())
    assert finished["status"] == "finished"
    assert [part["start_epoch"] for part in finished["segments"]] == [0, first]
    assert finished["segments"][1]["seen"]["epochs"] == 6 - first
    assert finished["seen"] == {"epochs": 6, "steps": 6 * 8, "samples": 6 * 512}
    printed = (folder / f"slurm-{job}.txt").read_text()
    assert f"back into the queue: job {job}" in printed
    assert all(f"Start epoch {epoch}\n" in printed for epoch in range(6))


def test_a_preempted_job_goes_back_into_the_queue_without_an_epoch_and_once_only(
    run, slurm, stand_in, tmp_path
):
    job = stand_in("hang;fail")
    hanging(tmp_path)
    urgent = ("--partition=urgent", "--cpus-per-task=4", "--output=/dev/null", "--wrap=true")
    assert run("sbatch", *urgent, **slurm).returncode == 0
    wait_for(run, slurm, job, "PENDING", 1)
    assert f"back into the queue: job {job}" in output(
        tmp_path, job
    )  # in the grace time, which SLURM gave the ranks
    start_again(run, slurm, job)
    wait_for(run, slurm, job, "FAILED", 1)


def test_a_job_that_fails_goes_back_into_the_queue_for_as_long_as_it_gets_on(run, slurm, stand_in, tmp_path):
    job = stand_in("epoch fail;fail")
    wait_for(run, slurm, job, "PENDING", 1)
    start_again(run, slurm, job)
    wait_for(run, slurm, job, "FAILED", 1)
    assert (folder_of(tmp_path) / "cpus").read_text() == "4"  # the node's
    assert "not one epoch was finished, so the job stays out of the queue" in output(tmp_path, job)


def test_a_job_whose_time_is_shorter_than_an_epoch_does_not_go_round_for_ever(run, slurm, stand_in, tmp_path):
    # Less than the five minutes before the limit at which SLURM signals: it does so at its next look at the limits.
    job = stand_in("hang", limit="4")
    wait_for(run, slurm, job, "FAILED", 0)
    assert "not one epoch was finished" in output(tmp_path, job)


def test_a_cancelled_job_stays_out_of_the_queue_and_the_next_one_of_its_name_follows(
    run, slurm, stand_in, tmp_path
):
    job = stand_in("epoch hang")
    hanging(tmp_path)
    successor = stand_in("epoch")
    assert job_state(run, slurm, successor)["JobState"] == "PENDING"  # one run, one job at a time
    assert run("scancel", job, **slurm).returncode == 0
    wait_for(run, slurm, successor, "COMPLETED", 0)
    wait_for(run, slurm, job, "CANCELLED", 0)


def test_a_job_that_is_submitted_elsewhere_says_what_it_needs(run, slurm, tmp_path):
    options = (f"--chdir={tmp_path}", f"--output={tmp_path}/out.txt", SCRIPTS / "train.sbatch")
    job = run("sbatch", "--parsable", *options, **slurm).stdout.strip()
    wait_for(run, slurm, job, "FAILED", 0)
    assert f"error: {tmp_path} is not the checkout" in (tmp_path / "out.txt").read_text()


def test_the_check_shares_its_shards_among_tasks(run, slurm, shards, tmp_path):
    result = run(
        *("bash", SCRIPTS / "check.sh", shards, "--state", tmp_path / "state", "--no-write"),
        *("--slurm-array", "2", "--slurm", "cpus_per_task=1", "--slurm", "timeout_min=5"),
        **slurm,
    )
    assert result.returncode == 0, result.stderr
    (report,) = json.loads(Path(f"{shards}.check.json").read_text())
    assert report["usable"] == 512
