import logging
import multiprocessing
import os
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from openclip_linattn.errors import UserError
from openclip_linattn.zeroshot.sets.dataset import open_evaluation_set
from openclip_linattn.zeroshot.sets.reading import keyed_batches
from openclip_linattn.zeroshot.sets.streaming import DataError


def small(image: Image.Image) -> Tensor:
    assert image.mode == "RGB"
    return torch.tensor(list(image.resize((2, 2)).tobytes()), dtype=torch.float32)


def labels_of(source: str | Path, **options: Any) -> list[list[int]]:
    data = open_evaluation_set(source)
    found = [
        batch[1].tolist()
        for batch in keyed_batches(data, small, **{"batch_size": 4, "workers": 0, **options})
    ]
    return [label for batch in found for label in batch]


@pytest.fixture
def folder(tmp_path: Path, make: Any) -> Path:
    return make.set(tmp_path / "a, b {c}" / "figures", make.samples(6))


def test_the_set_is_found_and_counted(data_folder: Path) -> None:
    data = open_evaluation_set(data_folder)
    assert (data.name, data.n, len(data.shards)) == ("figures", 45, 3)
    assert [each.name for each in data.label_sets] == ["color x shape", "color", "shape"]


@pytest.mark.parametrize("form", ["root", "folder of tars", "pattern", "two patterns", "relative"])
def test_every_way_to_name_a_set_reads_the_same(
    data_folder: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(data_folder.parent)
    test = data_folder / "test"
    source = {
        "root": str(data_folder),
        "folder of tars": str(test),
        "pattern": f"{test}/{{0..2}}.tar",
        "two patterns": f"{test}/{{0..1}}.tar::{test}/2.tar",
        "relative": "figures/test/{0..2}.tar",
    }[form]
    assert labels_of(source) == labels_of(data_folder)
    assert open_evaluation_set(source).name.startswith("figures")


def test_paths_with_commas_blanks_and_braces_work(folder: Path) -> None:
    assert len(labels_of(folder)) == 6
    assert len(labels_of(folder / "test" / "0.tar")) == 3


def test_shards_are_read_in_numerical_order(tmp_path: Path, make: Any) -> None:
    folder = make.set(tmp_path / "many", make.samples(12), shards=12)
    assert [shard.stem for shard in open_evaluation_set(folder).shards] == [
        str(number) for number in range(12)
    ]


@pytest.mark.parametrize("workers", [0, 2, 5])
def test_every_image_is_read_once_whatever_the_workers(data_folder: Path, workers: int) -> None:
    data = open_evaluation_set(data_folder, label_sets=["color x shape"])
    seen = torch.cat([images for images, *_ in keyed_batches(data, small, batch_size=4, workers=workers)])
    alone = torch.cat([images for images, *_ in keyed_batches(data, small, batch_size=45, workers=0)])
    assert sorted(seen.tolist()) == sorted(alone.tolist())
    assert len({tuple(row) for row in seen.tolist()}) == 45


def test_without_label_sets_json_the_cls_member_counts(folder: Path) -> None:
    by_fields = labels_of(folder)
    (folder / "label_sets.json").unlink()
    assert labels_of(folder) == [[label[0]] for label in by_fields]
    assert open_evaluation_set(folder).label_sets[0].name == "classnames"


def test_given_names_and_templates_replace_those_of_the_data(folder: Path, tmp_path: Path) -> None:
    names, templates = tmp_path / "other.txt", tmp_path / "prompts.txt"
    names.write_text("\n".join("abcdefgh"))
    templates.write_text("only {}")
    (both,) = open_evaluation_set(folder, classnames=names, templates=templates).label_sets
    assert (both.name, both.classes, both.templates, both.fields) == (
        "other",
        tuple("abcdefgh"),
        ("only {}",),
        (),
    )
    kept = open_evaluation_set(folder, templates=templates).label_sets
    assert [(each.name, each.templates) for each in kept] == [
        (name, ("only {}",)) for name in ("color x shape", "color", "shape")
    ]


def test_repeated_class_names_are_reported(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "label_sets.json").unlink()
    (folder / "classnames.txt").write_text("\n".join(["crane"] * 2 + list("cdefgh")))
    with caplog.at_level(logging.WARNING):
        assert len(labels_of(folder)) == 6
    assert "crane" in caplog.text


def test_a_set_may_have_no_shard_count(folder: Path) -> None:
    (folder / "test" / "nshards.txt").unlink()
    assert len(labels_of(folder)) == 6


@pytest.mark.parametrize(
    ("stated", "reason"),
    [
        ("3", r"says 3 shard\(s\), but 2 tar\(s\).*2.tar is missing"),
        ("1", r"says 1 shard\(s\), but 2"),
        ("two", "must be the number of tars, here 2"),
        ("", "must be the number"),
        ("-2", "must be the number"),
        ("9" * 30, "but 2 tar"),
    ],
)
def test_a_shard_count_that_disagrees_is_refused(folder: Path, stated: str, reason: str) -> None:
    (folder / "test" / "nshards.txt").write_text(stated)
    with pytest.raises(UserError, match=reason):
        open_evaluation_set(folder)


def test_a_gap_in_the_numbering_is_refused(folder: Path) -> None:
    (folder / "test" / "1.tar").rename(folder / "test" / "2.tar")
    with pytest.raises(UserError, match=r"1\.tar is missing"):
        open_evaluation_set(folder)


def test_padded_numbers_agree_with_the_count(folder: Path) -> None:
    for number in range(2):
        (folder / "test" / f"{number}.tar").rename(folder / "test" / f"{number:05d}.tar")
    assert len(labels_of(folder)) == 6


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{root}/nowhere", r"1 of 1 shard\(s\).*do not exist"),
        ("{root}/test/{{0..4}}.tar", r"3 of 5 shard\(s\).*first .*2\.tar"),
        ("{root}/test/{{0 .. 1}}.tar", "do not exist"),
        ("{root}/test/{{0..1.tar", "unbalanced braces"),
        ("{root}/test/0.tar::{root}/test/0.tar", "twice"),
        ("pipe:cat {root}/test/0.tar", "not a local path"),
        ("s3://bucket/{{0..1}}.tar", "not a local path"),
        ("{root}/empty", "holds no tar"),
        ("", "names no path"),
    ],
)
def test_a_source_that_is_not_there_is_explained(
    folder: Path, source: str, reason: str, tmp_path: Path
) -> None:
    plain = tmp_path / "plain"
    shutil.copytree(folder, plain)
    (plain / "empty").mkdir()
    with pytest.raises(UserError, match=reason):
        open_evaluation_set(source.format(root=plain))


@pytest.mark.parametrize(
    ("gone", "reason"),
    [
        (["label_sets.json", "classnames.txt"], "no class names"),
        (["label_sets.json", "zeroshot_classification_templates.txt"], "no templates"),
    ],
)
def test_missing_names_or_templates_are_explained(folder: Path, gone: list[str], reason: str) -> None:
    for name in gone:
        (folder / name).unlink()
    with pytest.raises(UserError, match=reason):
        open_evaluation_set(folder)


def test_an_unknown_label_set_is_refused_with_the_known(folder: Path) -> None:
    with pytest.raises(UserError, match=r"no label set 'colour'.*'color'"):
        open_evaluation_set(folder, label_sets=["colour"])


def test_a_retrieval_set_is_refused(folder: Path) -> None:
    (folder / "dataset_type.txt").write_text("retrieval\n")
    with pytest.raises(UserError, match="'retrieval'"):
        open_evaluation_set(folder)


def test_a_set_without_samples_is_refused(tmp_path: Path, make: Any) -> None:
    with pytest.raises(UserError, match="holds no sample"):
        open_evaluation_set(make.set(tmp_path / "none", {}))


@pytest.mark.parametrize("cut", ["empty file", "in an image", "between members", "in a header", "no tar"])
def test_a_damaged_tar_is_refused_before_anything_runs(folder: Path, cut: str) -> None:
    shard = folder / "test" / "1.tar"
    with tarfile.open(shard) as tar:
        second = tar.getmembers()[1]
    size = {
        "empty file": 0,
        "in an image": 700,
        "between members": second.offset,
        "in a header": second.offset + 100,
        "no tar": 0,
    }[cut]
    os.truncate(shard, size)
    if cut == "no tar":
        shard.write_bytes(b"<html>not found</html>" * 100)
    with pytest.raises(UserError, match=r"1\.tar (cannot be read|has no end mark)"):
        open_evaluation_set(folder)


def faulty(make: Any, fault: str) -> dict[str, dict[str, bytes]]:
    content = make.samples(6)
    odd = content["000004"]
    if fault == "out of range":
        odd["cls"] = b"8"
    elif fault == "no label":
        del odd["cls"]
    elif fault == "no image":
        del odd["png"]
    elif fault == "cut image":
        odd["png"] = odd["png"][: len(odd["png"]) // 2]
    elif fault == "text as image":
        odd["png"] = b"<html>"
    elif fault == "image under another suffix":
        odd["input.png"] = odd.pop("png")
    return content


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("out of range", "label 8 is out of range"),
        ("no label", "no cls member"),
        ("no image", "no image"),
        ("cut image", "png does not decode"),
        ("text as image", "png does not decode"),
        ("image under another suffix", r"no image.*input\.png"),
    ],
)
def test_a_faulty_sample_stops_by_name(
    tmp_path: Path, make: Any, fault: str, reason: str, workers: int
) -> None:
    folder = make.set(tmp_path / "faulty", faulty(make, fault))
    (folder / "label_sets.json").unlink()
    with pytest.raises(DataError, match=reason) as caught:
        labels_of(folder, workers=workers)
    assert "0.tar: sample '000004'" in str(caught.value)
    assert "Traceback" not in str(caught.value)
    assert multiprocessing.active_children() == []


def test_a_member_named_twice_is_refused(folder: Path) -> None:
    with tarfile.open(folder / "test" / "0.tar", "a") as tar:
        tar.addfile(tarfile.TarInfo(tar.getnames()[-1]))
    with pytest.raises(UserError, match=r"0\.tar.*duplicate"):
        open_evaluation_set(folder)


def test_shards_that_change_between_counting_and_reading_are_noticed(folder: Path, make: Any) -> None:
    data = open_evaluation_set(folder)
    make.tar(data.shards[0], make.samples(1))
    with pytest.raises(DataError, match="4 of 6 samples"):
        list(keyed_batches(data, small, batch_size=4, workers=0))


def test_a_tar_that_is_cut_after_counting_stops_the_reading(folder: Path) -> None:
    data = open_evaluation_set(folder)
    os.truncate(data.shards[1], 700)
    with pytest.raises(DataError, match=r"1\.tar cannot be read to its end"):
        list(keyed_batches(data, small, batch_size=2, workers=0))
