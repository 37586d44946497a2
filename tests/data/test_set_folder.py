"""A folder that holds a set already: left alone, completed, extended, replaced or refused."""

import json
from pathlib import Path

import pytest

from openclip_linattn.data.drawn.shapes import write_shapes
from openclip_linattn.errors import UserError


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_a_complete_set_is_left_alone(tmp_path):
    first = write_shapes(tmp_path, 25, test_samples=5, samples_per_shard=10)
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    second = write_shapes(tmp_path, 25, test_samples=5, samples_per_shard=10)
    assert (first.already_complete, second.already_complete) == (False, True)
    assert (first.written, second.written, second.found) == (4, 0, 4)
    assert times == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}


def test_a_partial_set_is_completed(tmp_path):
    write_shapes(tmp_path / "whole", 35, test_samples=15, samples_per_shard=10)
    calls = 0

    def stop(done: int) -> None:
        nonlocal calls
        calls += 1
        if calls > 18:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_shapes(tmp_path / "part", 35, test_samples=15, samples_per_shard=10, progress=stop)
    assert [path.name for path in (tmp_path / "part").glob("*.t*")] == ["00000.tar"]
    assert not list((tmp_path / "part").glob(".*"))
    result = write_shapes(tmp_path / "part", 35, test_samples=15, samples_per_shard=10)
    assert (result.written, result.found) == (5, 1)
    assert files(tmp_path / "part") == files(tmp_path / "whole")


def test_a_deleted_shard_is_written_again(tmp_path):
    write_shapes(tmp_path, 25, samples_per_shard=10)
    before = files(tmp_path)
    (tmp_path / "00001.tar").unlink()
    assert write_shapes(tmp_path, 25, samples_per_shard=10).written == 1
    assert files(tmp_path) == before


def test_more_samples_extend_the_set(tmp_path):
    write_shapes(tmp_path / "long", 34, test_samples=12, samples_per_shard=10)
    write_shapes(tmp_path / "grown", 25, test_samples=5, samples_per_shard=10)
    result = write_shapes(tmp_path / "grown", 34, test_samples=12, samples_per_shard=10)
    assert result.found == 2
    assert files(tmp_path / "grown") == files(tmp_path / "long")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seed": 1}, "seed 0 there, 1 asked for"),
        ({"image_size": 32}, "image_size 64 there, 32 asked for"),
        ({"samples": 5}, "samples 12 there, 5 asked for"),
    ],
)
def test_other_parameters_are_refused_unless_overwriting(change, said, tmp_path):
    arguments = {"samples": 12, "seed": 0, "samples_per_shard": 5}
    write_shapes(tmp_path / "a", **arguments)
    (tmp_path / "a" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=said):
        write_shapes(tmp_path / "a", **{**arguments, **change})
    write_shapes(tmp_path / "a", **{**arguments, **change}, overwrite=True)
    write_shapes(tmp_path / "b", **{**arguments, **change})
    found = files(tmp_path / "a")
    assert found.pop("notes.txt") == b"mine"
    assert found == files(tmp_path / "b")


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_of_somebody_else_is_never_touched(overwrite, tmp_path):
    (tmp_path / "00000.tar").write_bytes(b"precious")
    with pytest.raises(UserError, match="not written by this command"):
        write_shapes(tmp_path, 5, overwrite=overwrite)
    assert files(tmp_path) == {"00000.tar": b"precious"}


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    "record",
    [
        "{",
        "[]",
        '{"kind": "digits", "parameters": {}}',
        '{"kind": "shapes"}',
        '{"kind": "shapes", "version": 1, "parameters": {"samples": 3}}',
        '{"kind": "shapes", "version": 1, "parameters": {"samples": "x", "test_samples": 0, "seed": 0, '
        '"image_size": 64, "samples_per_shard": 1000}}',
    ],
    ids=["no json", "list", "other kind", "no parameters", "few parameters", "text for a number"],
)
def test_a_strange_record_is_refused(record, overwrite, tmp_path):
    (tmp_path / "dataset.json").write_text(record)
    with pytest.raises(UserError, match=r"dataset\.json"):
        write_shapes(tmp_path, 5, overwrite=overwrite)


def test_a_set_of_another_version_is_replaced_only_when_told(tmp_path):
    write_shapes(tmp_path, 5)
    record = json.loads((tmp_path / "dataset.json").read_text())
    (tmp_path / "dataset.json").write_text(json.dumps({**record, "version": 0}))
    with pytest.raises(UserError, match="made by version 0, this is version 1"):
        write_shapes(tmp_path, 5)
    assert write_shapes(tmp_path, 5, overwrite=True).written == 1


def test_overwriting_leaves_no_evaluation_set_behind(tmp_path):
    write_shapes(tmp_path, 5, test_samples=5)
    write_shapes(tmp_path, 4, overwrite=True)
    assert not (tmp_path / "test").exists()


def test_a_file_for_a_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        write_shapes(tmp_path / "file", 5)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"samples": 0}, "at least 1, not 0"),
        ({"samples": -4}, "at least 1, not -4"),
        ({"test_samples": -1}, "at least 0, not -1"),
        ({"seed": -1}, "seed must lie between 0"),
        ({"seed": 2**32}, "seed must lie between 0"),
        ({"image_size": 8}, "between 16 and 1024"),
        ({"image_size": 5000}, "between 16 and 1024"),
        ({"samples_per_shard": 0}, "between 1 and 10,000"),
        ({"samples_per_shard": 10_001}, "between 1 and 10,000"),
        ({"samples": 200_000, "samples_per_shard": 1}, "more than 100,000 shards"),
    ],
)
def test_bad_numbers_are_refused_before_anything_is_written(arguments, said, tmp_path):
    with pytest.raises(UserError, match=said):
        write_shapes(tmp_path / "out", **{"samples": 5, **arguments})
    assert not (tmp_path / "out").exists()
