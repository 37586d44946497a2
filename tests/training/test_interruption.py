"""Signals end a process with their status, at once or when it is idle, whatever its main thread is doing."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from openclip_linattn.interruption import SIGNALS, ended_by_signals

HEAD = """
import ctypes, multiprocessing, os, signal, sys, threading, time
from pathlib import Path
from openclip_linattn import interruption
from openclip_linattn.interruption import ended_by_signals

here = Path(sys.argv[1])
busy = (here / "busy").exists

def close(number):
    print("closed by", number.name)

def wait_for(name):
    while not (here / name).exists():
        time.sleep(0.01)

def hang():
    # As in a collective whose other side is gone: here the interpreter runs no handlers of its own.
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)


"""


@contextmanager
def started(folder: Path, body: str) -> Iterator[subprocess.Popen[str]]:
    """A process that runs `body`, from its word "ready" on; killed at the end, where it is still there."""
    command = [sys.executable, "-c", HEAD + body, str(folder)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            process.kill()


WAITING = """
with ended_by_signals(close, busy):
    print("ready", flush=True)
    hang()
"""


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_a_process_that_hangs_in_c_code(tmp_path, number):
    with started(tmp_path, WAITING) as process:
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (128 + number, f"closed by {number.name}\n", "")


def test_a_busy_process_is_let_finish_and_echoes_do_not_hurry_it(tmp_path):
    (tmp_path / "busy").touch()
    body = """
def telling():
    print("asked", flush=True)
    return busy()
with ended_by_signals(close, telling):
    print("ready", flush=True)
    wait_for("go")
    print("saved", flush=True)
    (here / "busy").unlink()
    hang()
"""
    with started(tmp_path, body) as process:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1):
            process.send_signal(number)
            for _ in range(2):  # so that the signal has been seen
                assert process.stdout.readline() == "asked\n"
        (tmp_path / "go").touch()
        out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (143, "")
    assert out.replace("asked\n", "") == "saved\nclosed by SIGTERM\n"


def test_a_second_signal_that_is_no_echo_ends_a_busy_process(tmp_path):
    (tmp_path / "busy").touch()
    body = """
interruption.ECHO_SECONDS = 0.0
asked = []
def noting():
    asked.append(1)
    if len(asked) == 1:
        print("busy", flush=True)
    return busy()
with ended_by_signals(close, noting):
    print("ready", flush=True)
    hang()
"""
    with started(tmp_path, body) as process:
        process.send_signal(signal.SIGUSR1)
        assert process.stdout.readline() == "busy\n"
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=30)
    assert (process.returncode, out) == (138, "closed by SIGUSR1\n")
    assert (tmp_path / "busy").exists()


def test_a_worker_s_signals_are_its_own_and_its_parent_ends_it(tmp_path):
    body = """
def work():
    (here / "pid").write_text(str(os.getpid()))
    wait_for("nothing")

with ended_by_signals(close, busy):
    worker = multiprocessing.get_context("fork").Process(target=work)
    worker.start()
    wait_for("pid")
    os.kill(worker.pid, signal.SIGUSR1)  # as SLURM does to all processes
    stray = multiprocessing.get_context("fork").Process(target=work)
    stray.start()
    os.kill(stray.pid, signal.SIGTERM)
    stray.join()
    print("ready", flush=True)
    print(stray.exitcode, worker.is_alive(), flush=True)
    hang()
"""
    with started(tmp_path, body) as process:
        assert process.stdout.readline() == "-15 True\n"
        worker = int((tmp_path / "pid").read_text())
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=30)
    assert (process.returncode, out) == (143, "closed by SIGTERM\n")
    while not gone(worker):  # it has been killed, and takes a moment
        time.sleep(0.01)


def gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"


def test_an_error_just_before_the_signal_that_caused_it_is_an_interruption(tmp_path):
    body = """
class Clock:
    monotonic = lambda: 0.0
    def sleep(seconds):
        print("lingering", flush=True)
        time.sleep(seconds)
interruption.time = Clock
with ended_by_signals(close, busy):
    print("ready", flush=True)
    raise RuntimeError("DataLoader worker is killed by signal: Terminated")
"""
    with started(tmp_path, body) as process:
        assert process.stdout.readline() == "lingering\n"
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (143, "")
    assert out.endswith("closed by SIGTERM\n")


def test_an_error_in_closing_does_not_keep_the_process(tmp_path):
    body = """
def close(number):
    raise OSError("no space left")
with ended_by_signals(close, busy):
    print("ready", flush=True)
    hang()
"""
    with started(tmp_path, body) as process:
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (143, "error: no space left\n")


def test_workers_of_joblib_are_ended_too():
    code = """
import multiprocessing, joblib
from openclip_linattn.interruption import end_children
joblib.Parallel(n_jobs=2)(joblib.delayed(abs)(n) for n in range(4))
children = multiprocessing.active_children()
end_children()
for child in children:
    child.join(20)
print(len(children), [child.is_alive() for child in children].count(True), flush=True)
import os; os._exit(0)
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True
    )
    found, alive = result.stdout.split()
    assert int(found) > 0
    assert alive == "0"


def test_after_the_block_all_is_as_before(monkeypatch):
    before = [signal.getsignal(each) for each in SIGNALS]
    threads = threading.active_count()
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    with ended_by_signals(print, bool):
        assert [signal.getsignal(each) for each in SIGNALS] != before
    monkeypatch.setattr("openclip_linattn.interruption.LINGER_SECONDS", 0.0)
    with pytest.raises(ValueError, match="of its own"), ended_by_signals(print, bool):
        raise ValueError("of its own")
    assert [signal.getsignal(each) for each in SIGNALS] == before
    assert threading.active_count() == threads
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors


def test_another_thread_is_left_alone():
    got: list[object] = []

    def run() -> None:
        with ended_by_signals(print, bool):
            got.append(signal.getsignal(signal.SIGTERM))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert got == [before]
