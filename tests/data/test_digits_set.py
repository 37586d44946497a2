"""The set of real digits: the right images under the right names, split once and for all."""

import io
import json
import tarfile
from collections import Counter

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from openclip_linattn.data.checks.check import check
from openclip_linattn.data.drawn.digits import (
    CAPTIONS,
    NAMES,
    digit_sample,
    sample_count,
    split,
    write_digits,
)
from openclip_linattn.errors import UserError


def test_split_is_stratified_and_complete():
    target = load_digits().target
    train, test = split(0)
    assert (len(train), len(test)) == (1437, 360)
    assert sorted((*train, *test)) == list(range(1797))
    for digit, count in Counter(target).items():
        assert sum(target[i] == digit for i in test) == pytest.approx(0.2 * count, abs=1)
    assert split(0) == (train, test)
    assert split(1) != (train, test)


def test_images_are_those_of_scikit_learn():
    digits = load_digits()
    for index in range(20):
        sample = digit_sample(index, seed=0)
        source = sample.attributes["source_index"]
        assert sample.attributes["digit"] == NAMES[digits.target[source]]
        image = Image.open(io.BytesIO(sample.jpeg))
        assert (image.size, image.mode) == ((64, 64), "RGB")
        small = np.asarray(image.convert("L").resize((8, 8), Image.Resampling.BOX)).astype(float)
        assert np.corrcoef(small.ravel(), digits.images[source].ravel())[0, 1] > 0.95


def test_repetitions_show_the_same_digit_moved_and_with_another_caption():
    for place in range(20):
        samples = [digit_sample(place + repeat * 1437, seed=0) for repeat in range(3)]
        assert len({sample.attributes["source_index"] for sample in samples}) == 1
        assert len({sample.caption for sample in samples}) == 3
        assert len({sample.jpeg for sample in samples}) == 3
        images = [np.asarray(Image.open(io.BytesIO(sample.jpeg)).convert("L")).ravel() for sample in samples]
        assert np.corrcoef(images[0], images[1])[0, 1] > 0.5


def test_captions_name_the_digit_and_vary():
    captions = [digit_sample(index, seed=0) for index in range(300)]
    assert all(sample.attributes["digit"] in sample.caption.replace(",", "").split() for sample in captions)
    forms = {sample.caption.replace(sample.attributes["digit"], "{c}") for sample in captions}
    assert forms == set(CAPTIONS)


def test_written_set(tmp_path):
    result = write_digits(tmp_path / "a", samples_per_shard=500, image_size=32)
    assert result.samples == sample_count(1) == 1797
    report = check(str(tmp_path / "a" / "train"))
    assert (report.samples, report.usable, report.problems) == (1437, 1437, [])
    assert (tmp_path / "a" / "test" / "nshards.txt").read_text() == "1\n"
    classes = (tmp_path / "a" / "classnames.txt").read_text().splitlines()
    assert classes == list(NAMES)
    with tarfile.open(tmp_path / "a" / "test" / "0.tar") as tar:
        content = {info.name: tar.extractfile(info).read() for info in tar}
    assert len(content) == 4 * 360
    for name in [name for name in content if name.endswith(".json")]:
        facts = json.loads(content[name])
        assert classes[int(content[name.replace(".json", ".cls")])] == facts["digit"]
    label_sets = json.loads((tmp_path / "a" / "label_sets.json").read_text())
    assert label_sets["digit"]["fields"] == ["digit"]
    assert label_sets["digit"]["classes"] == classes
    write_digits(tmp_path / "b", samples_per_shard=500, image_size=32)
    for path in (tmp_path / "a").rglob("*.*"):
        assert path.read_bytes() == (tmp_path / "b" / path.relative_to(tmp_path / "a")).read_bytes()
    assert write_digits(tmp_path / "a", samples_per_shard=500, image_size=32).already_complete


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"repeat": 0}, "at least once, not 0"),
        ({"image_size": 4}, "between 16 and 1024"),
        ({"seed": -1}, "seed must lie"),
        ({"samples_per_shard": 0}, "between 1 and 10,000"),
    ],
)
def test_bad_numbers_are_refused(arguments, said, tmp_path):
    with pytest.raises(UserError, match=said):
        write_digits(tmp_path / "out", **arguments)
    assert not (tmp_path / "out").exists()
