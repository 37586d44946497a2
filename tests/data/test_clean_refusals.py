"""Where cleaning stops with a sentence, and what it leaves for the next call."""

import errno
import fcntl
import json
import os
from collections import namedtuple

import pytest
from typer.testing import CliRunner

from openclip_linattn.cli.data import app
from openclip_linattn.data.clean import passes, sealing, writing
from openclip_linattn.data.clean.run import clean
from openclip_linattn.data.clean.settings import Settings
from openclip_linattn.data.clean.workers import Unfinished
from openclip_linattn.errors import UserError

TENS = Settings(samples_per_shard=10)


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def end_after_the_first_pass(monkeypatch, source, out, settings=TENS):
    """Clean until the plan is sealed."""
    with monkeypatch.context() as patch:
        patch.setattr("openclip_linattn.data.clean.run.second_pass", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            clean(source, out, settings)


def _interrupt(*_, **__):
    raise KeyboardInterrupt


def test_a_folder_with_other_files_is_refused_and_left_alone(good_set, out):
    out.mkdir()
    (out / "mine.txt").write_text("x")
    with pytest.raises(UserError, match="is not empty"):
        clean(str(good_set), out, TENS)
    assert [path.name for path in out.iterdir()] == ["mine.txt"]


def test_the_input_is_no_place_for_the_output(good_set, tmp_path):
    before = sorted(good_set.iterdir())
    for place in (good_set, good_set / "below" / "it", tmp_path / "good" / ".." / "good"):
        with pytest.raises(UserError, match="a folder of the input"):
            clean(str(good_set), place, TENS)
    assert sorted(good_set.iterdir()) == before


def test_a_file_is_no_folder(good_set, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="is a file"):
        clean(str(good_set), tmp_path / "file", TENS)
    with pytest.raises(UserError, match="file is a file"):
        clean(str(good_set), tmp_path / "file" / "below", TENS)


@pytest.mark.parametrize("finished", [True, False])
def test_other_flags_or_another_input_are_refused(finished, good_set, broken_set, out, monkeypatch):
    if finished:
        clean(str(good_set), out, TENS)
    else:
        end_after_the_first_pass(monkeypatch, str(good_set), out)
    with pytest.raises(UserError, match="--samples-per-shard 10 there, 9 here"):
        clean(str(good_set), out, Settings(samples_per_shard=9))
    with pytest.raises(UserError, match=r"another input \(4 shards of .*good; here 3\)"):
        clean(str(broken_set), out, TENS)
    assert clean(str(good_set), out, TENS).already_complete == finished


def test_the_same_input_under_another_path_is_the_same(good_set, out, monkeypatch):
    clean(str(good_set), out, TENS)
    monkeypatch.chdir(good_set.parent)
    assert clean("good/{00000..00003}.tar", out, TENS).already_complete


def test_an_input_that_changed_after_all_is_done_is_named(good_set, out):
    clean(str(good_set), out, TENS)
    os.utime(good_set / "00002.tar", ns=(1, 1))
    with pytest.raises(UserError, match=r"00002.tar has changed since: delete the folder"):
        clean(str(good_set), out, TENS)


def test_an_output_that_is_gone_is_named(good_set, out):
    clean(str(good_set), out, TENS)
    (out / "00001.tar").unlink()
    with pytest.raises(UserError, match=r"00001.tar is gone since"):
        clean(str(good_set), out, TENS)


def test_an_output_that_was_cut_since_is_noticed(good_set, out):
    clean(str(good_set), out, TENS)
    (out / "00001.tar").write_bytes((out / "00001.tar").read_bytes()[:-512])
    with pytest.raises(UserError, match="its shards have another size since"):
        clean(str(good_set), out, TENS)


def test_work_is_not_given_up_for_a_shard_that_could_not_be_read_at_first(
    good_set, out, tmp_path, make_sample, make_tar
):
    for number in range(4):
        make_tar(tmp_path / "rated" / f"{number}.tar", make_sample("a", json=b'{"similarity": 0.4}'))
    source = f"pipe:cat {tmp_path}/late.tar::{tmp_path}/rated"
    settings = Settings(min_similarity=0.3)
    with pytest.raises(Unfinished):
        clean(source, out, settings)
    (good_set / "00000.tar").rename(tmp_path / "late.tar")
    account = clean(source, out, settings).account
    assert (account["out"], account["without_field"]) == (14, {"similarity": 10})


def test_a_shard_that_changes_in_the_first_pass_is_judged_again(
    good_set, out, monkeypatch, make_tar, make_sample
):
    with monkeypatch.context() as patch:
        patch.setattr(passes, "seal", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            clean(str(good_set), out, TENS)
    make_tar(good_set / "00001.tar", make_sample("1", txt=b"new"))
    assert clean(str(good_set), out, TENS).account["out"] == 31


def test_what_repeats_a_shard_that_changed_is_kept_after_all(
    good_set, out, monkeypatch, make_tar, make_sample
):
    make_tar(good_set / "00002.tar", make_sample("repeats", txt=b"photo 000000000"))
    settings = Settings(samples_per_shard=10, deduplicate="caption")
    with monkeypatch.context() as patch:
        patch.setattr(sealing, "write_json", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            clean(str(good_set), out, settings)
    make_tar(good_set / "00000.tar", make_sample("other"))
    account = clean(str(good_set), out, settings).account
    assert (account["in"], account["out"], account["dropped"]) == (22, 22, {})


def test_a_shard_that_is_named_twice_is_refused(good_set, out):
    with pytest.raises(UserError, match=r"00001.tar comes 2 times in the source"):
        clean(f"{good_set}::{good_set}/00001.tar", out, TENS)
    assert not out.exists()


@pytest.mark.parametrize("change", ["content", "fewer", "more", "touched"])
@pytest.mark.parametrize("form", ["{}", "pipe:cat {}/{{00000..00003}}.tar"])
def test_a_shard_that_changes_between_the_passes_is_named(
    change, form, good_set, out, monkeypatch, make_tar, make_sample
):
    source = form.format(good_set)
    end_after_the_first_pass(monkeypatch, source, out)
    samples = [make_sample(f"{1:05d}{n:04d}", n) for n in range(10)]
    if change == "content":
        samples[4] = make_sample(f"{1:05d}{4:04d}", 4, txt=b"swapped")
    samples = {"fewer": samples[:-1], "more": [*samples, make_sample("x")]}.get(change, samples)
    make_tar(good_set / "00001.tar", [member for sample in samples for member in sample])
    if change == "touched" and form != "{}":
        assert clean(source, out, TENS).account["out"] == 40
        return
    with pytest.raises(Unfinished, match=r"00001.tar has changed since"):
        clean(source, out, TENS)
    assert not (out / "account.json").exists()
    assert sorted(path.name for path in out.glob("*.tar")) == ["00000.tar", "00002.tar", "00003.tar"]


@pytest.mark.parametrize("when", ["first pass", "second pass"])
def test_a_command_that_fails_stops_its_own_shard_only_and_can_be_tried_again(
    when, good_set, out, tmp_path, monkeypatch
):
    flag = tmp_path / "works"
    broken = f"pipe:head -c 9000 {good_set}/00001.tar; test -e {flag} && tail -c +9001 {good_set}/00001.tar"
    source = f"{good_set}/00000.tar::{broken}::{good_set}/{{00002..00003}}.tar"
    if when == "second pass":
        flag.touch()
        end_after_the_first_pass(monkeypatch, source, out)
        flag.unlink()
    with pytest.raises(
        Unfinished, match=r"1 shard could not be done: .* exit status 1.* run the same command again"
    ):
        clean(source, out, TENS)
    done = out.glob("*.tar") if when == "second pass" else (out / ".clean" / "plan").iterdir()
    assert len(list(done)) == 3
    flag.touch()
    clean(source, out, TENS)
    clean(str(good_set), tmp_path / "wanted", TENS)
    for path in (tmp_path / "wanted").glob("*.tar"):
        assert path.read_bytes() == (out / path.name).read_bytes()


def test_a_file_that_cannot_be_read_is_no_end_of_a_file(good_set, out):
    (good_set / "00001.tar").unlink()
    (good_set / "00001.tar").mkdir()
    with pytest.raises(Unfinished, match=r"00001.tar cannot be opened"):
        clean(str(good_set / "{00000..00003}.tar"), out, TENS)


def test_a_filter_whose_field_is_nowhere_is_refused_and_leaves_the_folder_free(good_set, out):
    for settings, flag in (
        (Settings(min_similarity=0.3), "--min-similarity needs the field similarity"),
        (Settings(drop_nsfw=("NSFW",)), "--drop-nsfw needs the field NSFW"),
        (Settings(deduplicate="md5"), "--deduplicate needs the field md5"),
    ):
        with pytest.raises(
            UserError, match=rf"{flag} .* none of the 10 usable .*00000.tar has; fields seen: key"
        ):
            clean(str(good_set), out, settings)
    assert clean(str(good_set), out, TENS).account["out"] == 40


def test_where_nothing_is_kept_nothing_is_written(captionless_set, good_set, out):
    with pytest.raises(UserError, match=r"None of the 10 samples can be kept \(missing caption\)"):
        clean(str(captionless_set), out, TENS)
    assert list(out.iterdir()) == []
    clean(str(good_set), out, TENS)


def test_a_full_disk_is_told_before_the_second_pass(good_set, out, monkeypatch):
    usage = namedtuple("usage", "free")
    needed = 40 * 7 * 512 + 4 * 10_240
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(needed - 1))
    with pytest.raises(Unfinished, match=r"0\.000184 GB"):
        clean(str(good_set), out, TENS)
    assert not list(out.glob("*.tar"))
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(needed))
    account = clean(str(good_set), out, TENS).account
    assert account["output_bytes"] <= needed


def test_a_disk_that_fills_up_leaves_what_is_whole(good_set, out, monkeypatch):
    write = writing.write_tar

    def full(path, members):
        if path.name == "00002.tar":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write(path, members)

    with monkeypatch.context() as patch:
        patch.setattr(writing, "write_tar", full)
        with pytest.raises(Unfinished, match=r"00002.tar cannot be written: No space left on device"):
            clean(str(good_set), out, TENS)
    stamp = (out / "00001.tar").stat().st_mtime_ns
    assert clean(str(good_set), out, TENS).account["out"] == 40
    assert (out / "00001.tar").stat().st_mtime_ns == stamp


def test_one_cleaner_at_a_time(good_set, out):
    (out / ".clean").mkdir(parents=True)
    with (out / ".clean" / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="Another cleaning"):
            clean(str(good_set), out, TENS)
    clean(str(good_set), out, TENS)


def test_file_systems_without_locks_are_cleaned_into(good_set, out, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    clean(str(good_set), out, TENS)


def test_an_output_of_another_size_than_recorded_is_written_again(good_set, out, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("openclip_linattn.data.clean.run._finish", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            clean(str(good_set), out, TENS)
    whole = (out / "00001.tar").read_bytes()
    (out / "00001.tar").write_bytes(whole[:-512])
    (out / ".clean" / "done" / "00002.json").write_text("")
    clean(str(good_set), out, TENS)
    assert (out / "00001.tar").read_bytes() == whole


def test_outputs_of_another_plan_are_written_again(good_set, out, monkeypatch, make_tar, make_sample):
    with monkeypatch.context() as patch:
        patch.setattr("openclip_linattn.data.clean.run._finish", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            clean(str(good_set), out, TENS)
    path, before = good_set / "00003.tar", (out / "00003.tar").read_bytes()
    status = path.stat()
    keys = [f"{3:05d}{n:04d}" for n in range(10)]
    make_tar(
        path, [m for n, key in enumerate(keys) for m in make_sample(key, n, txt=f"PHOTO {key}".encode())]
    )
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_size == status.st_size
    (out / ".clean" / "sealed.json").unlink()
    (out / ".clean" / "plan" / "000003.npz").unlink()
    clean(str(good_set), out, TENS)
    assert (out / "00003.tar").read_bytes() != before


@pytest.mark.parametrize("steps", range(5, 13))
def test_a_folder_that_is_given_up_is_never_half_another_s(steps, good_set, out, monkeypatch):
    unlink, done = os.unlink, []

    def ended(path, **options):
        if len(done) == steps:
            raise KeyboardInterrupt
        done.append(path)
        unlink(path, **options)

    nothing = Settings(min_side=1000)
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", ended)
        with pytest.raises(KeyboardInterrupt):
            clean(str(good_set), out, nothing)
    assert len(done) == steps
    try:
        account = clean(str(good_set), out, TENS).account
    except UserError as error:
        assert "--min-side 1000 there" in str(error)  # noqa: PT017 - both are right, by the step
        with pytest.raises(UserError, match="None of the 40"):
            clean(str(good_set), out, nothing)
        account = clean(str(good_set), out, TENS).account
    assert account["out"] == 40


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("absent", "OUT"), "absent"),
        (("SRC", "OUT", "--workers", "0"), "workers"),
        (("SRC", "OUT", "--samples-per-shard", "0"), "Samples per shard"),
        (("SRC", "OUT", "--drop-nsfw", "NSFW,"), "--drop-nsfw"),
    ],
)
def test_wrong_input_is_a_sentence(arguments, word, good_set, out):
    names = {"SRC": str(good_set), "OUT": str(out)}
    result = CliRunner().invoke(app, ["clean", *(names.get(argument, argument) for argument in arguments)])
    assert isinstance(result.exception, UserError)
    assert word in str(result.exception)
    assert not out.exists()


def test_the_records_of_a_finished_cleaning_are_small(good_set, out):
    clean(str(good_set), out, TENS)
    records = sorted(path.name for path in (out / ".clean").iterdir())
    assert records == ["lock", "sealed.json", "settings.json"]
    assert json.loads((out / ".clean" / "settings.json").read_text())["source"] == str(good_set)
