"""Counts: read from small files where they are, written where OpenCLIP looks for them."""

import json
import os

import pytest

from openclip_linattn.data.checks.check import check
from openclip_linattn.data.sizes import openclip_count, sample_count, write_sizes
from openclip_linattn.data.sources import expand
from openclip_linattn.errors import UserError


def openclip_size(pattern):
    return pytest.importorskip("open_clip_train.data").get_dataset_size(pattern)


def test_counts_come_from_sizes_json_then_from_stats(good_set):
    assert sample_count(str(good_set)) is None
    for shard in range(4):
        (good_set / f"0000{shard}_stats.json").write_text(json.dumps({"count": 12, "successes": 9}))
    assert sample_count(str(good_set)) == 36
    (good_set / "sizes.json").write_text(json.dumps({"00000.tar": 10}))
    assert sample_count(str(good_set)) == 37
    (good_set / "00003_stats.json").unlink()
    assert sample_count(str(good_set)) is None
    assert sample_count(f"{good_set}/{{00000..00002}}.tar") == 28


def test_a_pipe_has_no_count(good_set):
    assert sample_count(f"pipe:cat {good_set}/{{00000..00003}}.tar") is None


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_openclip_reads_the_usable_samples_from_what_is_written(broken_set):
    assert write_sizes(check(str(broken_set))) == []
    assert json.loads((broken_set / "sizes.json").read_text()) == {f"0000{n}.tar": 5 for n in range(3)}
    pattern = f"{broken_set}/{{00000..00002}}.tar"
    assert openclip_size(pattern) == (15, 3)
    assert openclip_count(expand(pattern)) == 15


def test_entries_of_other_shards_are_kept_and_of_vanished_ones_dropped(good_set):
    (good_set / "sizes.json").write_text(json.dumps({"00003.tar": 7, "00009.tar": 1}))
    write_sizes(check(f"{good_set}/{{00000..00001}}.tar"))
    assert json.loads((good_set / "sizes.json").read_text()) == {
        "00000.tar": 10,
        "00001.tar": 10,
        "00003.tar": 7,
    }


def test_shards_that_were_read_in_part_get_no_entry(good_set):
    write_sizes(check(str(good_set), sample_limit=3))
    assert not (good_set / "sizes.json").exists()


def test_shards_that_could_not_be_read_get_no_entry(good_set):
    os.mkfifo(good_set / "00004.tar")
    write_sizes(check(f"{good_set}/{{00000..00004}}.tar"))
    assert list(json.loads((good_set / "sizes.json").read_text())) == [f"0000{n}.tar" for n in range(4)]


def test_a_folder_that_cannot_be_written_is_a_warning(good_set, monkeypatch):
    report = check(str(good_set))

    def refuse(*arguments):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("openclip_linattn.data.sizes.write_json", refuse)
    (sentence,) = write_sizes(report)
    assert "could not be written (Permission denied)" in sentence
    assert "--train-num-samples 40" in sentence


def test_each_folder_gets_its_own_table(good_set, broken_set):
    write_sizes(check(f"{good_set}/00000.tar::{broken_set}/00000.tar"))
    assert json.loads((good_set / "sizes.json").read_text()) == {"00000.tar": 10}
    assert json.loads((broken_set / "sizes.json").read_text()) == {"00000.tar": 5}


@pytest.mark.parametrize("content", ["[1]", '{"0.tar": -1}', '{"0.tar": true}', '{"0.tar": 1.5}', "{"])
def test_a_wrong_table_is_named_and_repaired_by_a_check(content, good_set):
    (good_set / "sizes.json").write_text(content)
    with pytest.raises(UserError, match=r"sizes\.json"):
        sample_count(str(good_set))
    write_sizes(check(str(good_set)))
    assert sample_count(str(good_set)) == 40


def test_a_shard_missing_from_the_table_is_named_before_openclip_fails_on_it(good_set):
    (good_set / "sizes.json").write_text(json.dumps({"00000.tar": 10}))
    with pytest.raises(UserError, match=r"no entry for 3 of 4 shards \(the first is 00001\.tar\)"):
        openclip_count(expand(str(good_set)))


@pytest.mark.parametrize(("content", "count"), [("40", 40), (" 40\n", 40)])
def test_the_other_file_that_openclip_knows(content, count, good_set):
    (good_set / "__len__").write_text(content)
    assert openclip_count(expand(str(good_set))) == count


@pytest.mark.parametrize("content", ["", "many", "[1]", "__import__('os')"])
def test_the_other_file_holding_nonsense(content, good_set):
    (good_set / "__len__").write_text(content)
    with pytest.raises(UserError, match="must hold one number"):
        openclip_count(expand(str(good_set)))


def test_broken_stats_are_no_count(good_set):
    for content in ("{", "[]", '{"successes": null}', '{"successes": "x"}'):
        (good_set / "00000_stats.json").write_text(content)
        assert sample_count(f"{good_set}/00000.tar") is None
