"""The drawn set: the same for a seed, true to its captions and boxes, in the layouts that others read."""

import io
import json
import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from openclip_linattn.data.checks.check import check
from openclip_linattn.data.drawn import drawing
from openclip_linattn.data.drawn.shapes import (
    BACKGROUNDS,
    CAPTIONS,
    CLASSES,
    COLORS,
    LABEL_SETS,
    OFFSETS,
    RADII,
    SHAPES,
    TEST,
    caption,
    draw_sample,
    write_shapes,
)


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def members(tar: Path) -> dict[str, bytes]:
    with tarfile.open(tar) as archive:
        content = {}
        for info in archive:
            file = archive.extractfile(info)
            assert file is not None
            content[info.name] = file.read()
        return content


def test_the_same_arguments_give_the_same_bytes(tmp_path):
    for name in "ab":
        write_shapes(tmp_path / name, 30, test_samples=12, seed=5, samples_per_shard=20)
    assert files(tmp_path / "a") == files(tmp_path / "b")


def test_another_seed_gives_another_set():
    one, other = draw_sample(0, seed=1), draw_sample(0, seed=2)
    assert one.jpeg != other.jpeg


def test_a_sample_depends_on_its_seed_and_number_alone():
    alone = draw_sample(7, seed=3)
    for index in range(7):
        draw_sample(index, seed=3)
    assert draw_sample(7, seed=3) == alone
    assert draw_sample(8, seed=3).jpeg != alone.jpeg


def test_evaluation_samples_are_none_of_the_training_samples():
    train = {draw_sample(index, seed=0).jpeg for index in range(50)}
    test = {draw_sample(index, seed=0, split=TEST).jpeg for index in range(50)}
    assert len(train) == len(test) == 50
    assert not train & test


def test_layout_is_that_of_img2dataset(tmp_path):
    write_shapes(tmp_path, 25, samples_per_shard=10)
    tars = sorted(path.name for path in tmp_path.glob("*.tar"))
    assert tars == ["00000.tar", "00001.tar", "00002.tar"]
    assert json.loads((tmp_path / "sizes.json").read_text()) == dict(zip(tars, (10, 10, 5), strict=True))
    stats = json.loads((tmp_path / "00002_stats.json").read_text())
    assert (stats["count"], stats["successes"], stats["status_dict"]) == (5, 5, {"success": 5})
    names = list(members(tmp_path / "00001.tar"))
    assert names[:6] == [f"00001000{n}.{suffix}" for n in (0, 1) for suffix in ("jpg", "txt", "json")]
    report = check(str(tmp_path))
    assert (report.samples, report.usable, report.problems) == (25, 25, [])


def test_evaluation_layout_is_that_of_clip_benchmark(tmp_path):
    write_shapes(tmp_path, 5, test_samples=25, samples_per_shard=10)
    assert (tmp_path / "test" / "nshards.txt").read_text() == "3\n"
    assert sorted(path.name for path in (tmp_path / "test").glob("*.tar")) == ["0.tar", "1.tar", "2.tar"]
    classes = (tmp_path / "classnames.txt").read_text().splitlines()
    assert classes == list(CLASSES)
    assert len(classes) == 64
    templates = (tmp_path / "zeroshot_classification_templates.txt").read_text().splitlines()
    assert templates
    assert all("{c}" in template for template in templates)
    content = members(tmp_path / "test" / "1.tar")
    for key in {name.split(".")[0] for name in content}:
        facts = json.loads(content[f"{key}.json"])
        assert classes[int(content[f"{key}.cls"])] == f"{facts['color']} {facts['shape']}"
        assert facts["caption"] == content[f"{key}.txt"].decode()


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_clip_benchmark_reads_the_evaluation_set(tmp_path):
    builder = pytest.importorskip("clip_benchmark.datasets.builder")
    write_shapes(tmp_path, 1, test_samples=12, samples_per_shard=10)
    dataset = builder.build_wds_dataset("shapes", transform=lambda image: image, data_dir=str(tmp_path))
    found = list(dataset)
    assert len(found) == 12
    assert dataset.classes == list(CLASSES)
    expected = [draw_sample(index, seed=0, split=TEST) for index in range(12)]
    assert [label for _, label in found] == [sample.label for sample in expected]
    assert found[0][0].size == (64, 64)


def test_label_sets_name_fields_of_the_records():
    facts = draw_sample(0, seed=0).attributes
    for label_set in LABEL_SETS.values():
        assert " ".join(str(facts[field]) for field in label_set["fields"]) in label_set["classes"]
        assert all("{c}" in template for template in label_set["templates"])


def test_captions_name_color_and_shape_and_all_templates_occur():
    used = Counter()
    for index in range(200):
        sample = draw_sample(index, seed=0, image_size=16)
        facts = sample.attributes
        assert facts["color"] in sample.caption.split()
        assert facts["shape"] in sample.caption.replace(",", " ").split()
        names = {name: facts[name] for name in ("shape", "color", "size", "position", "background")}
        used.update(n for n in range(len(CAPTIONS)) if caption(n, names) == sample.caption)
    assert set(used) == set(range(len(CAPTIONS)))


def test_captions_use_the_right_article():
    names = {"shape": "ring", "color": "orange", "size": "small", "position": "top", "background": "white"}
    assert caption(2, names) == "a photo of an orange ring"
    assert caption(0, names) == "a small orange ring on a white background"


def test_all_attributes_occur_about_equally_often():
    facts = [draw_sample(index, seed=0, image_size=16).attributes for index in range(1600)]
    for field, names in {
        "shape": SHAPES,
        "color": COLORS,
        "size": RADII,
        "position": OFFSETS,
        "background": BACKGROUNDS,
    }.items():
        counts = Counter(fact[field] for fact in facts)
        assert set(counts) == set(names)
        expected = 1600 / len(names)
        assert all(abs(count - expected) < 5 * expected**0.5 for count in counts.values())


@pytest.mark.parametrize("image_size", [48, 64, 100])
@pytest.mark.parametrize("shape", SHAPES)
def test_box_is_tight_around_the_drawn_pixels(shape, image_size):
    """The pixels covered by half or more lie in the box and touch each of its sides."""
    for angle in (0.0, 0.2):
        center = (0.45 * image_size, 0.55 * image_size)
        mask = drawing.coverage(shape, center, 0.25 * image_size, angle, image_size)
        alpha = np.asarray(mask) / 255
        rows, columns = np.nonzero(alpha >= 0.5)
        box = drawing.bounding_box(mask)
        assert box == (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)
        assert box[0] < center[0] < box[2]
        assert 0.2 * image_size < box[2] - box[0] < 0.7 * image_size


def test_boxes_of_samples_hold_the_colored_pixels():
    """In the JPEG itself, noise and all: what differs strongly from the background lies within the box."""
    checked = 0
    for index in range(60):
        sample = draw_sample(index, seed=1)
        facts = sample.attributes
        if facts["color"] not in ("red", "green", "blue") or facts["background"] not in ("white", "black"):
            continue
        pixels = np.asarray(Image.open(io.BytesIO(sample.jpeg))).astype(float)
        background = np.array(BACKGROUNDS[facts["background"]])
        rows, columns = np.nonzero(np.linalg.norm(pixels - background, axis=-1) > 100)
        x0, y0, x1, y1 = facts["bbox"]
        for value, bound in (
            (columns.min(), x0),
            (rows.min(), y0),
            (columns.max() + 1, x1),
            (rows.max() + 1, y1),
        ):
            assert abs(value - bound) <= 2
        checked += 1
    assert checked >= 5


def test_colors_are_true_to_their_names():
    for index in range(40):
        sample = draw_sample(index, seed=2)
        facts = sample.attributes
        if facts["shape"] == "ring":
            continue
        x0, y0, x1, y1 = facts["bbox"]
        pixels = np.asarray(Image.open(io.BytesIO(sample.jpeg))).astype(float)
        x, y = (x0 + x1) // 2, (y0 + y1) // 2
        mean = pixels[y - 2 : y + 3, x - 2 : x + 3].mean(axis=(0, 1))
        nearest = min(COLORS, key=lambda name: np.linalg.norm(mean - np.array(COLORS[name])))
        assert np.linalg.norm(mean - np.array(COLORS[facts["color"]])) < 60
        if facts["color"] in ("red", "green", "blue"):
            assert nearest == facts["color"]


def test_images_are_square_and_noisy():
    image = Image.open(io.BytesIO(draw_sample(0, seed=0, image_size=48).jpeg))
    assert (image.size, image.mode) == ((48, 48), "RGB")
    corner = np.asarray(image)[:6, :6].astype(float)
    assert corner.std() > 2
