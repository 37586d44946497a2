"""Real runs that are killed and told to end, at the worst moments."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from openclip_linattn.checkpointing import partial_checkpoints
from openclip_linattn.epochs import training_damage
from openclip_linattn.resume import settle_latest

HERE = Path(__file__).parent
MODEL = ("--model", "ViT-T32-8-normlinear")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")


@contextmanager
def started(command: Sequence[str], output: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A training command; where it is still under way at the end it is killed, and its children."""
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, *command],
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            for pid in [*descendants(process.pid), process.pid]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        process.wait()


def children(pid: int) -> list[int]:
    try:
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def descendants(pid: int) -> list[int]:
    return [each for child in children(pid) for each in (child, *descendants(child))]


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], object], process: subprocess.Popen[bytes] | None = None) -> None:
    """Waits for as long as two minutes, and no longer than the process lives."""
    for _ in range(6000):
        if condition():
            return
        assert process is None or process.poll() is None, "the process ended before"
        time.sleep(0.02)
    raise AssertionError("it did not happen in two minutes")


def facts(folder: Path) -> dict:
    return json.loads((folder / "run.json").read_text())


@pytest.mark.slow
def test_a_run_killed_while_it_saves_goes_on_and_one_told_to_end_saves_first(flags, tmp_path):
    folder, output = tmp_path / "logs" / "x", tmp_path / "output"
    checkpoints = folder / "checkpoints"
    command = [str(HERE / "train_with_held_saving.py"), *MODEL, *flags, "--name", "x", "--epochs", "3"]
    (tmp_path / "go_1").touch()

    with started(command, output, HELD=str(tmp_path)) as process:
        wait_until(lambda: partial_checkpoints(checkpoints), process)
        wait_until(lambda: list(checkpoints.glob(".epoch_2.pt.*")), process)
        process.kill()
        process.wait()
    assert [path.name for path in checkpoints.glob("*.pt")] == ["epoch_1.pt"]
    (leftover,) = partial_checkpoints(checkpoints)
    assert facts(folder)["status"] == "running"

    with started([*command, "--resume", "latest"], output, HELD=str(tmp_path)) as process:
        wait_until(lambda: set(partial_checkpoints(checkpoints)) - {leftover}, process)
        process.terminate()
        process.terminate()  # SLURM and torchrun both pass it on
        assert not (checkpoints / "epoch_2.pt").exists()
        (tmp_path / "go_2").touch()
        assert process.wait() == 128 + signal.SIGTERM
    assert partial_checkpoints(checkpoints) == []
    assert training_damage(checkpoints / "epoch_2.pt") is None
    assert settle_latest(folder, save_most_recent=False).epoch == 2
    record = facts(folder)
    assert (record["status"], record["signal"]) == ("interrupted", "SIGTERM")
    assert [each["status"] for each in record["segments"]] == ["killed", "interrupted"]
    assert [each["start_epoch"] for each in record["segments"]] == [0, 1]
    assert record["seen"] == {"epochs": 2, "steps": 8, "samples": 256}
    text = output.read_text()
    assert "interrupted by SIGTERM: 2 of 3 epochs are saved" in text
    assert "Traceback" not in text


@pytest.mark.slow
def test_a_worker_that_is_killed_ends_the_run_and_is_named(flags, tmp_path):
    folder, output = tmp_path / "logs" / "x", tmp_path / "output"
    command = ["-m", "openclip_linattn.train", *MODEL, *flags, "--name", "x", "--epochs", "500"]
    with started([*command, "--accum-freq", "3"], output) as process:
        wait_until((folder / "checkpoints" / "epoch_1.pt").exists, process)
        (worker,) = children(process.pid)
        os.kill(worker, signal.SIGKILL)
        assert process.wait() == 1
    assert (
        f"RuntimeError: DataLoader worker (pid {worker}) is killed by signal: Killed." in output.read_text()
    )
    record = facts(folder)
    assert record["status"] == record["segments"][0]["status"] == "failed"
    assert re.match(rf"RuntimeError: DataLoader worker \(pid(\(s\))? {worker}\)", record["error"])
    # Four batches make one step of three, and the fourth is dropped.
    steps = re.findall(r"Train Epoch: 0 \[", (folder / "out.log").read_text())
    assert len(steps) == 1
    epochs = record["seen"]["epochs"]
    assert record["seen"] == {"epochs": epochs, "steps": epochs, "samples": 96 * epochs}


@pytest.mark.slow
@pytest.mark.parametrize("way", ["the agent passes on SIGUSR1", "a process is killed"])
def test_all_processes_end_together(flags, tmp_path, way):
    folder, output = tmp_path / "logs" / "x", tmp_path / "output"
    passing_on = way.startswith("the agent")
    if passing_on and "--signals-to-handle" not in get_args_parser().format_help():
        pytest.skip("this torchrun has no --signals-to-handle")
    handled = ("--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1") if passing_on else ()
    script = str(HERE / "train_ddp_on_cpu.py")
    command = [*TORCHRUN, *handled, "--", script, *MODEL, *flags, "--name", "x", "--epochs", "500"]
    with started([*command, "--batch-size", "16"], output) as agent:
        wait_until((folder / "checkpoints" / "epoch_1.pt").exists, agent)
        ranks = [pid for pid in children(agent.pid) if script in Path(f"/proc/{pid}/cmdline").read_text()]
        family = descendants(agent.pid)
        assert len(ranks) == 2
        if passing_on:
            agent.send_signal(signal.SIGUSR1)
        else:
            (first,) = [pid for pid in ranks if rank(pid) == "0"]
            os.kill((set(ranks) - {first}).pop(), signal.SIGKILL)
        assert agent.wait() != 0
        wait_until(lambda: not any(map(running, family)))
    record = facts(folder)
    assert record["status"] in (("interrupted",) if passing_on else ("interrupted", "failed"))
    assert record.get("signal") == ("SIGUSR1" if passing_on else record.get("signal"))
    assert record["seen"]["epochs"] >= 1


def rank(pid: int) -> str:
    environment = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return next(each.removeprefix("RANK=") for each in environment if each.startswith("RANK="))
