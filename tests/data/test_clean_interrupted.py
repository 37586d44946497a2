"""Cleaning that is ended at any moment: the next call loses nothing, repeats nothing and mixes nothing."""

import io
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from openclip_linattn.data import shard_pool
from openclip_linattn.data.clean.folder import Folder
from openclip_linattn.data.clean.judging import PlanTask, plan_shard
from openclip_linattn.data.clean.run import clean
from openclip_linattn.data.clean.settings import Settings
from openclip_linattn.data.clean.workers import Unfinished, share
from openclip_linattn.termination import Terminated, terminable

FLAGS = ("--samples-per-shard", "8", "--resize", "64", "--deduplicate", "caption")
SETTINGS = Settings(samples_per_shard=8, resize=64, deduplicate="caption")


class Killed(BaseException):
    """Stands for the end of the process."""


@pytest.fixture
def big_set(tmp_path, make_sample, make_tar) -> Path:
    """Thirty shards of twelve noisy images, some of which cannot be kept; each pass takes about a second."""
    chance = np.random.default_rng(0)
    images = []
    for _ in range(12):
        buffer = io.BytesIO()
        Image.fromarray(chance.integers(0, 256, (300, 250, 3), np.uint8)).save(buffer, "JPEG", quality=95)
        images.append(buffer.getvalue())
    for shard in range(30):
        members = []
        for n, jpg in enumerate(images):
            changes = {3: {"jpg": jpg[:9000]}, 5: {"txt": b"again"}, 7: {"json": b"{"}}.get(n, {})
            members += make_sample(f"{shard:05d}{n:04d}", n, **{"jpg": jpg, **changes})
        make_tar(tmp_path / "in" / f"{shard:05d}.tar", members)
    return tmp_path / "in"


def content(folder: Path) -> dict[str, bytes]:
    """Every file of the result by name; asserts that nothing else was left behind."""
    assert {path.name for path in (folder / ".clean").iterdir()} == {"lock", "sealed.json", "settings.json"}
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def start(source: Path, out: Path, workers: int) -> "subprocess.Popen[str]":
    command = [
        sys.executable,
        "-m",
        "openclip_linattn.cli",
        "data",
        "clean",
        source,
        out,
        "--workers",
        workers,
    ]
    return subprocess.Popen(
        [*map(str, command), *FLAGS],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def await_files(process: "subprocess.Popen[str]", folder: Path, pattern: str, count: int) -> bool:
    """Wait until so many files are there; False where the process has ended before."""
    while process.poll() is None:
        if len(list(folder.glob(pattern))) >= count:
            return True
        time.sleep(0.001)
    return False


def await_end_of_group(process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    pytest.fail("a process was left behind")


class Steps:
    """Stands in for Path.replace, by which every file appears, and ends the process at one of the calls."""

    replace = staticmethod(Path.replace)

    def __init__(self, last: int | None = None, before: bool = False) -> None:
        self.last, self.before = last, before
        self.done: list[str] = []

    def __call__(self, path: Path, target: Path) -> Path:
        ends = len(self.done) == self.last
        if ends and self.before:
            raise Killed
        result = self.replace(path, target)
        self.done.append(target.name)
        if ends:
            raise Killed
        return result

    def __get__(self, path: Path, owner: type[Path]) -> Callable[[Path], Path]:
        return partial(self, path)


@pytest.mark.parametrize("before", [True, False])
def test_an_end_before_or_after_any_step_changes_nothing(
    before, good_set, tmp_path, monkeypatch, make_sample, make_tar
):
    repeated = make_sample("a", txt=b"photo 000020001")
    make_tar(good_set / "00003.tar", [*repeated, *make_sample("b", json=b"{")])
    settings = Settings(samples_per_shard=9, deduplicate="caption")
    whole = Steps()
    monkeypatch.setattr(Path, "replace", whole)
    clean(str(good_set), tmp_path / "whole", settings)
    wanted = content(tmp_path / "whole")
    assert whole.done.count("000003.npz") == 2  # planned, and again without the duplicate
    assert len(whole.done) == 21

    for last in range(21):
        out = tmp_path / str(last)
        first, second = Steps(last, before), Steps()
        monkeypatch.setattr(Path, "replace", first)
        with pytest.raises(Killed):
            clean(str(good_set), out, settings)
        monkeypatch.setattr(Path, "replace", second)
        clean(str(good_set), out, settings)
        assert content(out) == wanted
        tars = [name for name in first.done + second.done if name.endswith(".tar")]
        # Written again at most where the end fell between a tar and its record.
        assert len(tars) - len(set(tars)) <= 1


@pytest.mark.slow
def test_killed_twenty_times_the_result_is_the_same_to_the_byte(big_set, tmp_path):
    clean(str(big_set), tmp_path / "whole", SETTINGS)
    wanted = content(tmp_path / "whole")
    out = tmp_path / "out"
    chance = random.Random(0)
    moments = [(".clean/plan/*.npz", count) for count in range(2, 29, 3)]
    moments += [("*.tar", count) for count in range(1, 32, 3)] + [("sizes.json", 1)]
    ended: Counter[str] = Counter()
    for number, (pattern, count) in enumerate(moments):
        process = start(big_set, out, 1 + number % 2)
        if await_files(process, out, pattern, count):
            time.sleep(chance.uniform(0, 0.02) if count > 1 else 0)
            process.kill() if number % 4 == 1 else os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        if process.returncode == -signal.SIGKILL:
            sealed, sizes = (out / ".clean" / "sealed.json").exists(), (out / "sizes.json").exists()
            ended["the end" if sizes else "pass 2" if sealed else "pass 1"] += 1
    process = start(big_set, out, 2)
    _, errors = process.communicate()
    assert (process.returncode, errors) == (0, "")
    assert content(out) == wanted
    assert ended["pass 1"] >= 5
    assert ended["pass 2"] >= 5


@pytest.mark.parametrize(
    ("number", "whole_group", "status"), [(signal.SIGINT, True, 130), (signal.SIGTERM, False, 143)]
)
@pytest.mark.parametrize("moment", [".clean/settings.json", ".clean/plan/*1.npz"])
def test_a_signal_ends_all_processes_with_one_sentence(
    moment, number, whole_group, status, big_set, tmp_path
):
    process = start(big_set, tmp_path / "out", 2)
    assert await_files(process, tmp_path / "out", moment, 1)
    time.sleep(0.03 if "settings" in moment else 0)  # its processes are starting then
    os.killpg(process.pid, number) if whole_group else process.send_signal(number)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output) == (status, "")
    assert errors == "Interrupted: run the same command again to go on.\n"
    await_end_of_group(process)


@pytest.mark.parametrize(
    ("number", "workers"), [(signal.SIGINT, 1), (signal.SIGTERM, 2), (signal.SIGKILL, 2)]
)
def test_a_command_that_is_waited_for_ends_with_the_cleaning(number, workers, good_set, tmp_path):
    told = tmp_path / "pid"
    silent = f"pipe:echo $$ > {told}.new; mv {told}.new {told}; sleep 600"
    process = start(f"{silent}::{good_set}/00000.tar::{good_set}/00001.tar", tmp_path / "out", workers)
    assert await_files(process, tmp_path, "pid", 1)
    process.send_signal(number)
    process.communicate(timeout=30)
    await_end_of_group(process)
    with pytest.raises(ProcessLookupError):
        os.kill(int(told.read_text()), 0)


def test_where_every_process_dies_the_cleaning_ends_with_what_to_do(good_set, tmp_path, monkeypatch):
    monkeypatch.setattr(shard_pool, "MAX_DEATHS", 2)
    source = f"pipe:kill -9 $PPID; cat {good_set}/{{00000..00003}}.tar"
    with pytest.raises(Unfinished, match=r"2 tasks were given up .*SIGKILL.*fewer --workers"):
        clean(source, tmp_path / "out", SETTINGS, workers=2)


def test_a_process_that_is_killed_is_named_and_the_others_go_on(good_set, tmp_path):
    source = (
        f"{good_set / '00000.tar'}::pipe:test -e {tmp_path}/spare || kill -9 $PPID; cat {good_set}/00001.tar"
    )
    with pytest.raises(
        Unfinished, match=r"1 shard could not be done: .*the process that had pipe:test .* ended by SIGKILL"
    ):
        clean(f"{source}::{good_set}/{{00002..00003}}.tar", tmp_path / "out", SETTINGS, workers=2)
    assert len(list((tmp_path / "out" / ".clean" / "plan").iterdir())) == 3
    (tmp_path / "spare").touch()
    clean(f"{source}::{good_set}/{{00002..00003}}.tar", tmp_path / "out", SETTINGS, workers=2)
    assert (tmp_path / "out" / "account.json").exists()


def test_an_error_in_a_process_reaches_the_caller(good_set, tmp_path):
    clean(str(good_set), tmp_path / "out", SETTINGS)
    tasks = [PlanTask(str(good_set / "00000.tar"), tmp_path / "absent" / "plan", SETTINGS)] * 2
    with pytest.raises(FileNotFoundError):
        share(plan_shard, tasks, 2, lambda result: None)


def test_what_a_killed_cleaning_left_half_written_is_removed(good_set, tmp_path):
    folder = Folder(tmp_path / "out")
    folder.plan(0).parent.mkdir(parents=True)
    for path in (folder.plan(0), folder.settings, folder.tar(0)):
        path.with_name(f".{path.name}.1.tmp").touch()
    clean(str(good_set), tmp_path / "out", SETTINGS)
    assert not list((tmp_path / "out").rglob("*.tmp"))


def test_terminable_gives_the_old_handler_back():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Terminated), terminable():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before
