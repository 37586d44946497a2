"""`openclip-linattn bench reading`: the whole measurement at smoke size, and what it refuses."""

import io
import json
import statistics

import pytest
from PIL import Image

from openclip_linattn.bench.photos import photo, write_photo_shards
from openclip_linattn.data.checks.check import check

# webdataset leaves a shard open that is not read to its end.
pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
PARTS = ["tar", "image decoding", "other members", "RandomResizedCrop", "MaybeConvertMode", "MaybeToTensor"]
PARTS += ["Normalize", "tokenizer", "batch"]


def test_tiny(command, tmp_path):
    result = command("bench", "reading", "--tiny", "--out", tmp_path)
    assert result.status == 0, result.err
    assert {path.name for path in tmp_path.iterdir()} == {"reading.json", "reading.png", "reading.svg"}
    report = json.loads((tmp_path / "reading.json").read_text())
    assert [row["part"] for row in report["parts"]] == PARTS
    assert sum(row["share"] for row in report["parts"]) == pytest.approx(1)
    for row in report["parts"]:
        assert row["seconds"] == statistics.median(row["times"]) > 0
        assert row["part"] in result.out
    alone = 1 / sum(row["seconds"] for row in report["parts"])
    assert [row["workers"] for row in report["loaders"]] == [0, 1]
    for row in report["loaders"]:
        assert row["samples_per_s"] == statistics.median(row["rates"])
        assert row["of_parts"] == pytest.approx(row["samples_per_s"] / alone)
    assert report["preflight"]["seconds"] > 0


def test_the_drawn_images_cost_what_laion_s_do(tmp_path):
    sizes = [len(photo(seed)) for seed in range(20)]
    assert 20_000 < statistics.mean(sizes) < 28_000
    with Image.open(io.BytesIO(photo(0))) as image:
        assert min(image.size) == 256
    write_photo_shards(tmp_path, shards=2, per_shard=3, side=32)
    report = check(str(tmp_path))
    assert (report.samples, report.usable, report.errors) == (6, 6, [])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--workers", "3"], "--workers 3 is more than the 2 shards"),
        (["--workers", "one"], "--workers must be whole numbers"),
        (["--rounds", "0"], "at least 1"),
    ],
)
def test_wrong_input_is_a_sentence(command, tmp_path, options, message):
    write_photo_shards(tmp_path / "set", shards=2, per_shard=2, side=32)
    small = ["--model", "ViT-T32-8-linear", "--samples", 2, "--batch-size", 2]
    result = command("bench", "reading", tmp_path / "set", *small, *options, "--out", tmp_path / "out")
    assert result.status == 2
    assert message in result.err
