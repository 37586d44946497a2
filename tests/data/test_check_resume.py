"""Checks that are stopped go on, unchanged shards are not read again, and dead processes cost one shard."""

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from openclip_linattn.data import shard_pool
from openclip_linattn.data.checks import check as check_module
from openclip_linattn.data.checks import verdicts
from openclip_linattn.data.checks.check import check
from openclip_linattn.data.checks.shard_report import ShardReport
from openclip_linattn.data.checks.verdicts import VerdictStore, open_store
from openclip_linattn.data.shard_pool import MAX_DEATHS, DeadProcess, available_cores, map_unordered
from openclip_linattn.errors import UserError

COMMAND = [sys.executable, "-c", "import sys; from openclip_linattn.cli import main; sys.exit(main())"]


def checked(source, folder, *, finished=True, **arguments):
    """The report of a check with a store, which is closed afterwards."""
    store = VerdictStore(folder)
    try:
        return check(str(source), store=store, **arguments)
    finally:
        store.close(finished)


@pytest.fixture
def read(monkeypatch):
    """Names of the shards that this process reads, as it does so."""
    names: list[str] = []
    original = check_module.check_shard

    def noting(url, **arguments):
        names.append(Path(url).name)
        return original(url, **arguments)

    monkeypatch.setattr(check_module, "check_shard", noting)
    return names


def lines(folder: Path) -> list[dict]:
    found = []
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                found.append({"url": None})
    return found


def test_unchanged_shards_are_not_read_again(broken_set, tmp_path, read):
    first = checked(broken_set, tmp_path / "state")
    assert read == ["00000.tar", "00001.tar", "00002.tar"]
    again = checked(broken_set, tmp_path / "state")
    assert len(read) == 3
    assert again == first
    assert again.problems == first.problems


def test_new_and_changed_shards_are_read(good_set, tmp_path, read, make_tar, make_sample):
    (good_set / "00003.tar").rename(tmp_path / "later.tar")
    checked(good_set, tmp_path / "state")
    (tmp_path / "later.tar").rename(good_set / "00003.tar")
    make_tar(good_set / "00001.tar", make_sample("000019999"))
    del read[:]
    report = checked(good_set, tmp_path / "state")
    assert read == ["00001.tar", "00003.tar"]
    assert [shard.samples for shard in report.shards] == [10, 1, 10, 10]
    assert check(str(good_set)) == report


def test_results_are_on_the_disk_as_soon_as_they_are_there(good_set, tmp_path):
    state, seen = tmp_path / "state", []
    checked(good_set, state, watch=lambda report, kept: seen.append(len(lines(state))))
    assert seen == [1, 2, 3, 4]


def test_a_line_that_was_cut_is_passed_over(good_set, tmp_path, read):
    state = tmp_path / "state"
    first = checked(good_set, state)
    (path,) = state.glob("*.jsonl")
    content = path.read_bytes()
    path.write_bytes(content[: len(content) - 200])
    del read[:]
    assert checked(good_set, state) == first
    assert read == ["00003.tar"]


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\n", b"[]\n", b'{"version": 1}\n', b"null\n"])
def test_a_spoilt_file_is_passed_over(content, good_set, tmp_path):
    state = tmp_path / "state"
    state.mkdir()
    (state / "verdicts-0.jsonl").write_bytes(content)
    assert checked(good_set, state).usable == 40


@pytest.mark.parametrize(("name", "value"), [("VERSION", 999), ("pillow_version", "0.0")])
def test_results_of_another_version_are_not_used(name, value, good_set, tmp_path, read, monkeypatch):
    checked(good_set, tmp_path / "state")
    del read[:]
    monkeypatch.setattr(verdicts, name, value)
    checked(good_set, tmp_path / "state")
    assert len(read) == 4


def test_a_report_of_another_form_is_not_used(good_set, tmp_path, read):
    state = tmp_path / "state"
    checked(good_set, state)
    (path,) = state.glob("*.jsonl")
    path.write_text(path.read_text(encoding="utf-8").replace('"bomb_pixels":0,', "", 1), encoding="utf-8")
    del read[:]
    checked(good_set, state)
    assert read == ["00000.tar"]


def test_files_become_one_and_foreign_files_stay(good_set, tmp_path):
    state = tmp_path / "state"
    state.mkdir()
    (state / "notes.jsonl").write_text("{}\n", encoding="utf-8")
    for shards in (2, 3, 4):
        checked(good_set, state, finished=False, sample_shards=shards)
    assert len(list(state.glob("verdicts-*.jsonl"))) == 3
    checked(good_set, state)
    (path,) = state.glob("verdicts-*.jsonl")
    assert sorted(Path(entry["url"]).name for entry in lines(state)[1:]) == [f"0000{n}.tar" for n in range(4)]
    assert len(path.read_text(encoding="utf-8").splitlines()) == 4
    assert (state / "notes.jsonl").read_text(encoding="utf-8") == "{}\n"


def test_what_another_process_is_writing_is_left_to_it(good_set, tmp_path, read):
    state = tmp_path / "state"
    other = VerdictStore(state)
    checked(good_set, state)
    report = check(f"{good_set}/00000.tar").shards[0]
    other.add("1-1", ShardReport(str(good_set / "00000.tar"), samples=1, digest=report.digest))
    other.close(finished=False)
    assert len(lines(state)) == 5


def test_nothing_is_lost_where_files_cannot_be_locked(good_set, tmp_path, read, monkeypatch):
    monkeypatch.setattr(verdicts, "_lock", lambda file: False)
    for _ in range(2):
        assert checked(good_set, tmp_path / "state").usable == 40
    assert len(read) == 4


def test_earlier_results_are_dropped_on_demand(good_set, tmp_path, read):
    checked(good_set, tmp_path / "state")
    store = VerdictStore(tmp_path / "state")
    store.forget()
    assert list(store.known([str(good_set / "00000.tar")])) == []
    check(str(good_set), store=store)
    assert [report.usable for report in store.known([str(good_set / "00000.tar")])] == [10]
    store.close(finished=True)
    assert len(read) == 8


def test_commands_are_remembered_until_a_check_has_come_to_its_end(good_set, tmp_path, read):
    source = f"pipe:cat {good_set}/{{00000..00003}}.tar"
    for finished in (False, False, True, True):
        assert checked(source, tmp_path / "state", finished=finished).usable == 40
        read.append("end")
    reads = [len(part.split()) for part in " ".join(read).split("end")]
    assert reads == [4, 0, 0, 4, 0]


def test_faults_that_may_pass_are_looked_at_again(good_set, tmp_path, read):
    flag = tmp_path / "flag"
    source = f"pipe:test -e {flag} && cat {good_set}/00000.tar"
    assert checked(source, tmp_path / "state", finished=False).usable == 0
    flag.touch()
    assert checked(source, tmp_path / "state", finished=False).usable == 10
    assert len(read) == 2


def test_a_cut_tar_is_a_lasting_verdict(good_set, tmp_path, read):
    shard = good_set / "00000.tar"
    shard.write_bytes(shard.read_bytes()[:2000])
    first = checked(shard, tmp_path / "state")
    assert checked(shard, tmp_path / "state") == first
    assert len(read) == 1


def test_partial_readings_are_not_kept_and_kept_ones_serve_them(good_set, tmp_path, read):
    checked(good_set, tmp_path / "state", sample_limit=3)
    assert checked(good_set, tmp_path / "state").usable == 40
    assert checked(good_set, tmp_path / "state", sample_limit=3).usable == 40
    assert len(read) == 8


def test_the_store_is_beside_the_shards_or_in_the_cache(good_set, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def folder(urls, state=None):
        store = open_store(urls, state)
        store.close(finished=False)
        return store.folder

    shard = str(good_set / "00000.tar")
    assert folder(["pipe:cat x", shard]) == good_set / ".openclip_linattn_check"
    remote = folder(["s3://bucket/a/0.tar"])
    assert remote.parent == tmp_path / "cache" / "openclip_linattn"
    assert remote == folder(["s3://bucket/a/1.tar", "s3://bucket/b/0.tar"])
    assert remote != folder(["s3://bucket/b/0.tar"])
    assert folder([shard], tmp_path / "own") == tmp_path / "own"


def test_a_folder_that_cannot_be_written_is_named(good_set, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file/state cannot keep the check's results.*--state"):
        open_store([str(good_set / "00000.tar")], tmp_path / "file" / "state")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(verdicts, "FOLDER", "00000.tar/state")
    store = open_store([str(good_set / "00000.tar")], None)
    store.close(finished=False)
    assert store.folder.parent == tmp_path / "cache" / "openclip_linattn"


def test_a_full_disk_is_a_sentence_and_loses_nothing(good_set, tmp_path, monkeypatch):
    written = []

    def full(number):
        if len(written) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(number)

    with monkeypatch.context() as patch:
        patch.setattr(verdicts.os, "fsync", full)
        with pytest.raises(UserError, match="No space left on device"):
            checked(good_set, tmp_path / "state", finished=False)
    assert len(lines(tmp_path / "state")) >= 2


def test_relative_and_absolute_paths_are_the_same_shard(good_set, tmp_path, read, monkeypatch):
    checked(good_set, tmp_path / "state")
    monkeypatch.chdir(good_set)
    report = checked("{00000..00003}.tar", tmp_path / "state")
    assert len(read) == 4
    assert report.shards[0].url == "00000.tar"


def double(url: str) -> str:
    if url == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if url == "exit":
        os._exit(3)
    if url == "slow":
        time.sleep(0.5)
    return url * 2


def test_results_come_when_they_are_done():
    results = list(map_unordered(double, ["slow", "a", "b", "c"], 2))
    assert dict(results) == {"slow": "slowslow", "a": "aa", "b": "bb", "c": "cc"}
    assert results[0][0] != "slow"


def test_what_is_waited_for_is_named(monkeypatch, caplog):
    monkeypatch.setattr("openclip_linattn.data.shard_pool.PATIENCE", 0.1)
    list(map_unordered(double, ["a", "slow"], 2))
    assert "still reading: slow" in caplog.text


def test_a_process_that_dies_is_named_by_its_task_and_replaced():
    results = dict(map_unordered(double, ["a", "die", "b", "exit", "c"], 1))
    assert [results.pop(url) for url in ("a", "b", "c")] == ["aa", "bb", "cc"]
    assert all(isinstance(result, DeadProcess) for result in results.values())
    assert str(results["die"]) == "by SIGKILL, perhaps for want of memory"
    assert str(results["exit"]) == "with exit status 3"


def test_reading_ends_where_every_process_dies(monkeypatch):
    monkeypatch.setattr("openclip_linattn.data.shard_pool.MAX_DEATHS", 3)
    assert MAX_DEATHS > 3
    assert len(list(map_unordered(double, ["exit"] * 10, 1))) == 3


def test_more_processes_than_the_machine_runs_are_refused_and_the_others_ended(monkeypatch):
    started = []

    class Few(shard_pool._Worker):
        def __init__(self, task):
            if len(started) == 2:
                raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
            super().__init__(task)
            started.append(self)

    monkeypatch.setattr(shard_pool, "_Worker", Few)
    with pytest.raises(UserError, match=r"5 processes cannot be started \(Resource .*fewer --workers"):
        list(map_unordered(str.upper, list("abcde"), 5))
    assert [worker.process.is_alive() for worker in started] == [False, False]


def test_processes_end_when_nobody_reads_on():
    running = map_unordered(os.path.basename, ["a", "b", "c"], 1)
    next(running)
    running.close()
    assert list(running) == []


def test_cores_are_those_that_were_granted(monkeypatch):
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    cores = available_cores()
    assert cores >= 1
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "1")
    assert available_cores() == 1
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "100000")
    assert available_cores() == cores


def test_a_shard_that_kills_its_reader_is_an_error_and_the_others_are_kept(good_set, tmp_path, read):
    # The shell's parent is the process that reads the shard.
    script = tmp_path / "read.sh"
    script.write_text(f"test $1 = 00002 && kill -9 $PPID\ncat {good_set}/$1.tar\n")
    source = f"pipe:exec sh {script} {{00000..00003}}"
    report = checked(source, tmp_path / "state", finished=False, workers=2)
    assert (report.usable, report.unfinished) == (30, [])
    assert not report.complete
    (error,) = report.errors
    assert "00002 was not read: the process that read it ended by SIGKILL" in error
    script.write_text(f"cat {good_set}/$1.tar\n")
    again = checked(source, tmp_path / "state")
    assert again.usable == 40
    assert read == [f"read.sh {number}" for number in ("00002",)]


def test_commands_that_stay_silent_one_after_the_other_end_the_check(good_set):
    source = f"pipe:cat {good_set}/00000.tar::pipe:sleep 6{{0..8}}::pipe:cat {good_set}/00001.tar"
    report = check(source, silence=0.2)
    assert [shard.timed_out for shard in report.shards] == [False, True, True, True]
    assert len(report.unfinished) == 7
    assert any("7 shards were not read: pipe:sleep 63" in text for text in report.errors)


def test_one_silent_command_does_not_end_the_check(good_set):
    source = f"pipe:cat {good_set}/00000.tar::pipe:sleep 60::pipe:cat {good_set}/00001.tar"
    report = check(source, silence=0.2)
    assert [shard.samples for shard in report.shards] == [10, 0, 10]
    assert any("sleep 60" in text for text in report.errors)


def report_of(command: list[str]) -> dict:
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    (report,) = json.loads(result.stdout)
    return report


@pytest.mark.slow
def test_killed_again_and_again_a_check_reads_no_shard_twice_and_finds_the_same(
    tmp_path, make_tar, make_sample, make_image
):
    for shard in range(60):
        members = [m for n in range(12) for m in make_sample(f"{shard:05d}{n:04d}", n)]
        make_tar(tmp_path / "set" / f"{shard:05d}.tar", members[shard % 5 :])
    script, log, state = tmp_path / "read.sh", tmp_path / "reads", tmp_path / "state"
    script.write_text(f"echo $1 >> {log}\nsleep 0.03\ncat {tmp_path}/set/$1.tar\n")
    source = f"pipe:sh {script} {{00000..00059}}"
    undisturbed = report_of([*COMMAND, "data", "check", source, "--json", "--state", str(tmp_path / "other")])
    log.unlink()
    command = [*COMMAND, "data", "check", source, "--json", "--workers", "2", "--state", str(state)]
    draw = random.Random(1)
    kills, kept, read_before_kept = 0, 0, []
    while kept < 45:
        goal = kept + draw.randint(3, 12)
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            while len(lines(state)) < goal:
                assert process.poll() is None
                time.sleep(0.005)
            process.kill()
        kills += 1
        names = [entry["url"].split()[-1] for entry in lines(state) if entry["url"]]
        kept = len(names)
        read_before_kept.append((len(log.read_text().split()), set(names)))
    report = report_of(command)
    assert report == undisturbed
    reads = log.read_text().split()
    assert len(set(reads)) == 60
    for position, names in read_before_kept:
        assert not names.intersection(reads[position:])
    # What was under way at a kill is read again: a shard of each process, and one that was just handed in.
    assert len(reads) <= 60 + 3 * kills
    assert kills >= 4
