"""What the check counts and says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from openclip_linattn.data.checks.check import check, choose
from openclip_linattn.data.decoding import Reason
from openclip_linattn.errors import UserError


def test_good_shards_have_no_problems(good_set):
    report = check(str(good_set))
    assert (report.samples, report.usable, report.lost, report.problems) == (40, 40, {}, [])
    assert report.complete
    assert report.members == {"jpg": 40, "txt": 40, "json": 40}


def test_broken_samples_are_counted_by_reason(broken_set):
    report = check(f"{broken_set}/{{00000..00002}}.tar")
    assert (report.samples, report.usable, report.empty_captions, report.recoverable) == (30, 15, 3, 3)
    assert report.lost == {
        Reason.DAMAGED_IMAGE.value: 3,
        Reason.NOT_AN_IMAGE.value: 3,
        Reason.MISSING_CAPTION.value: 3,
        Reason.BROKEN_JSON.value: 3,
        Reason.CAPTION_NOT_UTF8.value: 3,
    }
    assert report.errors == []
    text = " ".join(report.warnings)
    assert "15 of 30 samples (50 %) are lost" in text
    assert "3 of the lost samples have a good image and caption" in text
    assert "3 usable samples have an empty caption" in text
    assert report.shards[0].examples[Reason.BROKEN_JSON.value] == ["000000003"]


def test_missing_captions_are_an_error_that_names_what_is_there(captionless_set):
    report = check(str(captionless_set))
    assert report.usable == 0
    assert any(
        "0 of 5 samples in 00000.tar have a txt member; members seen: jpg, json" in text
        for text in report.errors
    )


def test_members_called_input_jpg_are_no_images(tmp_path, make_tar, make_sample, make_image):
    members = [m for n in range(3) for m in make_sample(f"{n:03d}", jpg=None, **{"input.jpg": make_image(n)})]
    make_tar(tmp_path / "0.tar", members)
    report = check(str(tmp_path))
    assert any("0 of 3 samples in 0.tar have an image member" in text for text in report.errors)
    assert any("input.jpg, json, txt" in text for text in report.errors)


def test_members_that_are_pulled_apart_are_explained(tmp_path, make_tar, make_sample):
    samples = [make_sample(f"{n:03d}") for n in range(4)]
    make_tar(tmp_path / "0.tar", [member for column in zip(*samples, strict=True) for member in column])
    report = check(str(tmp_path))
    assert report.usable == 0
    assert any("do not stand next to each other" in text for text in report.errors)


def test_a_shard_of_names_without_suffix(tmp_path, make_tar):
    make_tar(tmp_path / "0.tar", [("README", b"x"), (".hidden.jpg", b"y")])
    report = check(str(tmp_path))
    assert any("2 members and none is named <key>.<suffix>" in text for text in report.errors)


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (lambda whole: b"", "is empty (0 bytes)"),
        (lambda whole: b"<html>" * 500, "is not a tar archive"),
        (lambda whole: whole[:700], "is cut short"),
        (lambda whole: whole[:512] + whole[512:600], "is cut short"),
        (lambda whole: whole[: 3 * 1024], "no end-of-archive marker"),
        (lambda whole: b"\x00" * 10240, None),
    ],
    ids=["empty", "html", "cut member", "cut header", "cut at a member", "zeros"],
)
def test_faults_of_files_are_named(content, fault, tmp_path, make_tar, make_sample):
    tiny = [(f"{n}.txt", b"x" * 512) for n in range(10)]
    whole = make_tar(tmp_path / "whole.tar", tiny).read_bytes()
    (tmp_path / "whole.tar").unlink()
    make_tar(tmp_path / "0.tar", make_sample("000"))
    (tmp_path / "1.tar").write_bytes(content(whole))
    report = check(str(tmp_path))
    assert report.errors == []
    assert report.usable == 1
    if fault is None:
        assert any("1.tar has no members" in text for text in report.warnings)
    else:
        assert report.shards[1].fault is not None
        assert fault in report.shards[1].fault
        assert any(fault in text and "1.tar" in text for text in report.warnings)


def test_a_damaged_header_hides_the_rest_and_is_reported(tmp_path, make_tar):
    members = [(f"{n}.txt", b"x" * 512) for n in range(6)]
    path = make_tar(tmp_path / "0.tar", members)
    data = bytearray(path.read_bytes())
    data[2 * 1024 : 2 * 1024 + 100] = b"#" * 100
    path.write_bytes(bytes(data))
    fault = check(str(path)).shards[0].fault
    assert fault is not None
    assert "the header at byte 2,048 is not valid" in fault


def test_a_fifo_is_not_waited_for(tmp_path, make_tar, make_sample):
    make_tar(tmp_path / "0.tar", make_sample("000"))
    os.mkfifo(tmp_path / "1.tar")
    report = check(str(tmp_path / "{0..1}.tar"))
    assert report.usable == 1
    assert any("1.tar is not a regular file" in text for text in report.errors)


def test_samples_and_shards_can_be_limited(good_set):
    report = check(str(good_set), sample_shards=2, sample_limit=3)
    assert [shard.name for shard in report.shards] == ["00000.tar", "00003.tar"]
    assert (report.samples, report.complete, report.total_shards) == (6, False, 4)


@pytest.mark.parametrize(
    ("count", "chosen"),
    [(1, ["0"]), (2, ["0", "9"]), (3, ["0", "4", "9"]), (10, list("0123456789")), (99, list("0123456789"))],
)
def test_chosen_shards_are_spread(count, chosen):
    assert choose([str(n) for n in range(10)], count) == chosen


@pytest.mark.parametrize("arguments", [{"workers": 0}, {"sample_shards": 0}])
def test_bad_numbers_are_refused(arguments, good_set):
    with pytest.raises(UserError, match="at least 1"):
        check(str(good_set), **arguments)


def test_processes_find_the_same(broken_set):
    done: list[int] = []
    several = check(str(broken_set), workers=2, watch=lambda report, kept: done.append(report.samples))
    assert several.to_json() == check(str(broken_set)).to_json()
    assert done == [10, 10, 10]


def test_report_is_plain_json(broken_set):
    value = json.loads(json.dumps(check(str(broken_set)).to_json(), allow_nan=False))
    assert value["usable"] == 15
    assert {problem["severity"] for problem in value["problems"]} == {"warning"}


def test_shards_of_other_schemes_are_reported_as_not_checked():
    report = check("ais://bucket/{00000..00003}.tar")
    assert (report.samples, report.unread) == (0, 4)
    assert any("4 remote shards were not checked" in text for text in report.warnings)


def test_a_folder_with_a_gap_in_its_numbers_is_told(good_set):
    shards = sorted(good_set.glob("*.tar"))
    shards[1].unlink()
    report = check(str(good_set))
    assert [Path(path).name for path in report.gaps] == [shards[1].name]
    assert any("1 shard is not there" in text and shards[1].name in text for text in report.warnings)
    assert report.errors == []


def test_statistics_without_their_tar_are_a_gap(good_set):
    (good_set / "00041_stats.json").write_text("{}", encoding="utf-8")
    assert [Path(path).name for path in check(str(good_set)).gaps] == ["00041.tar"]


def test_a_part_of_a_larger_set_has_no_gap(tmp_path, good_set):
    for number, shard in enumerate(sorted(good_set.glob("*.tar"))):
        (tmp_path / f"{number + 7}.tar").write_bytes(shard.read_bytes())
    assert check(str(tmp_path)).gaps == []


def test_missing_shards_are_listed_where_allowed(good_set):
    (good_set / "00002.tar").unlink()
    pattern = f"{good_set}/{{00000..00004}}.tar"
    report = check(pattern, allow_missing=True)
    assert report.usable == 30
    assert [Path(path).name for path in report.missing] == ["00002.tar", "00004.tar"]
    assert any("2 shards are missing" in text for text in report.warnings)


def test_members_that_training_would_unpickle_are_left_alone(tmp_path, make_tar, make_sample):
    make_tar(tmp_path / "0.tar", make_sample("000", pyd=b"cos\nsystem\n(S'touch pwned'\ntR."))
    report = check(str(tmp_path))
    assert report.usable == 1
    assert any("not checked: pyd" in text for text in report.warnings)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("false", "the command failed with exit status 1"),
        ("cat {folder}/absent.tar", "No such file"),
        ("true", "the command wrote nothing to its standard output"),
        ("sleep 60", "the command wrote nothing for 0.3 s"),
        ("(head -c 700 {folder}/00000.tar; sleep 60)", "the command wrote nothing for 0.3 s"),
    ],
    ids=["fails", "complains", "silent success", "hangs", "hangs after some bytes"],
)
def test_pipes_that_fail_are_named_in_time(command, said, good_set):
    report = check("pipe:" + command.format(folder=good_set), silence=0.3)
    assert report.usable == 0
    assert any(said in text for text in report.errors)


def test_no_further_command_is_run_after_a_silent_one(good_set):
    report = check("pipe:sleep 6{0..9}", silence=0.2)
    assert len(report.shards) == 1


def test_a_pipe_is_read_as_a_file_is(good_set):
    report = check(f"pipe:cat {good_set}/{{00000..00003}}.tar")
    assert (report.samples, report.usable, report.problems) == (40, 40, [])


def test_an_endless_pipe_ends_with_its_archive(good_set):
    report = check(f"pipe:cat {good_set}/00000.tar /dev/zero")
    assert (report.usable, report.problems) == (10, [])


def test_a_pipe_that_reads_our_input_gets_none():
    report = check("pipe:cat -", silence=5)
    assert any("wrote nothing to its standard output" in text for text in report.errors)


def test_reference_folders(tmp_path):
    material = os.environ.get("OPENCLIP_LINATTN_SHARED")
    script = Path(material or "") / "cases" / "make_broken_shards.py"
    if not material or not script.exists():
        pytest.skip("the reference material is not here")
    subprocess.run([sys.executable, str(script.resolve())], cwd=tmp_path, check=True, timeout=60)
    bad = check(str(tmp_path / "bad"))
    assert (bad.samples, bad.usable, bad.empty_captions, bad.recoverable) == (80, 40, 8, 8)
    assert sorted(bad.lost.values()) == [8] * 5
    assert check(str(tmp_path / "good")).usable == 80
    assert any("members seen: jpg, json" in text for text in check(str(tmp_path / "notxt")).errors)
    faults = [shard.fault for shard in check(str(tmp_path / "trunc")).shards]
    assert faults[0] is None
    assert faults[3] is None
    assert "cut short" in str(faults[1])
    assert "empty" in str(faults[2])
