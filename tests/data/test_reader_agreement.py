"""Our verdicts against OpenCLIP's own reading pipeline, sample by sample."""

import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from openclip_linattn.data.decoding import judge
from openclip_linattn.data.reading import ShardLog, read_samples

wds = pytest.importorskip("webdataset")

# webdataset leaves the files that it opens to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def openclip_keys(path: Path) -> list[str]:
    """Keys that survive the steps of OpenCLIP's `get_wds_dataset`, up to its image transform."""
    from open_clip_train.data import (
        filter_no_caption_or_no_image,
        log_and_continue,
        tarfile_to_samples_nothrow,
    )

    pipeline = wds.DataPipeline(
        wds.SimpleShardList([str(path)]),
        tarfile_to_samples_nothrow,
        wds.select(filter_no_caption_or_no_image),
        wds.decode("pilrgb", handler=log_and_continue),
        wds.rename(image="jpg;png;jpeg;webp", text="txt"),
    )
    found = []
    for sample in pipeline:
        assert sample["image"].mode == "RGB"
        assert isinstance(sample["text"], str)
        found.append(sample["__key__"])
    return found


def our_keys(path: Path) -> list[str]:
    return [sample.key for sample in read_samples(str(path), ShardLog()) if judge(sample).usable]


def npy() -> bytes:
    import io

    buffer = io.BytesIO()
    np.save(buffer, np.arange(3))
    return buffer.getvalue()


ODDITIES = {
    "suffix with a dot": {"jpg": None, "input.jpg": b"IMAGE"},
    "extra image that is good": {"seg.png": b"PNG"},
    "extra image that is broken": {"seg.png": b"no image"},
    "jpeg and webp": {"jpg": None, "jpeg": b"IMAGE", "webp": b"no image"},
    "gif only": {"jpg": None, "gif": b"IMAGE"},
    "empty image": {"jpg": b""},
    "class": {"cls": b"3\n"},
    "class in words": {"cls": b"cat"},
    "null json": {"json": b"null"},
    "empty json": {"json": b""},
    "utf-16 json": {"json": '{"a": 1}'.encode("utf-16")},
    "deep json": {"json": b"[" * 100_000},
    "compressed json": {"json": None, "json.gz": b"GZIP"},
    "compressed json, broken": {"json.gz": b"no gzip"},
    "array": {"npy": b"NPY"},
    "array, broken": {"npy": b"\x93NUMPY no"},
    "text beside txt": {"text": b"\xff"},
    "unknown suffix": {"xyz": b"\x00\xff"},
    "json before the image": {"jsn": b"{"},
    "meta suffix": {"__note__": b"x"},
    "marked as bad": {"__bad__": b"1"},
    "empty suffix": {"": b"x"},
    "upper-case txt": {"txt": None, "TXT": b"CAPTION"},
    "byte order mark": {"txt": b"\xef\xbb\xbfhello"},
}


@pytest.mark.parametrize("oddity", ODDITIES)
def test_agrees_on_odd_members(oddity, tmp_path, make_sample, make_tar, make_image):
    import gzip

    known = {
        b"IMAGE": make_image(1),
        b"PNG": make_image(1, "PNG"),
        b"GZIP": gzip.compress(b"{}"),
        b"NPY": npy(),
    }
    changes = {suffix: known.get(data, data) for suffix, data in ODDITIES[oddity].items()}
    members = [*make_sample("a/000", 1, **changes), *make_sample("a/001", 2)]
    path = make_tar(tmp_path / "0.tar", members)
    assert our_keys(path) == openclip_keys(path)
    assert "a/001" in our_keys(path)


def test_agrees_on_order_and_names(tmp_path, make_sample, make_tar):
    first, second, third = (make_sample(key) for key in ("000", "001", "002"))
    members = [
        *first,
        *first,  # written twice
        *[member for pair in zip(second, third, strict=True) for member in pair],  # interleaved
        ("._003.jpg", b"mac"),
        ("__meta__/003.txt", b"meta"),
        ("nosuffix", b"x"),
        *make_sample("dir.with.dots/004"),
        *make_sample("005"),
    ]
    path = make_tar(tmp_path / "0.tar", members)
    assert our_keys(path) == openclip_keys(path)
    assert our_keys(path) == ["000", "000", "dir.with.dots/004", "005"]


@pytest.mark.parametrize("mode", ["w:gz", "w:bz2", "w:xz"])
def test_agrees_on_compressed_shards(mode, tmp_path, make_sample, make_tar):
    path = make_tar(tmp_path / "0.tar", [m for n in range(3) for m in make_sample(f"{n:03d}", n)], mode)
    assert our_keys(path) == openclip_keys(path) == ["000", "001", "002"]
    whole, cut = path.read_bytes(), tmp_path / "1.tar"
    for length in (1, 2, 5, 11, 20, len(whole) // 4, len(whole) // 2, len(whole) - 40, len(whole) - 1):
        cut.write_bytes(whole[:length])
        assert our_keys(cut) == openclip_keys(cut)
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 255
    cut.write_bytes(damaged)
    assert our_keys(cut) == openclip_keys(cut)


def test_agrees_on_cut_and_damaged_shards(tmp_path, make_sample, make_tar):
    whole = make_tar(
        tmp_path / "0.tar", [m for n in range(4) for m in make_sample(f"{n:03d}", n)]
    ).read_bytes()
    random_ = random.Random(0)
    lengths = [0, 1, 511, 512, 513, *(random_.randrange(len(whole)) for _ in range(30))]
    variants = [whole[:length] for length in lengths]
    for _ in range(60):
        damaged = bytearray(whole)
        # Half of the damage falls into headers, which stand at multiples of 512.
        header = random_.randrange(len(whole) // 512) * 512 + random_.randrange(300)
        place = random_.choice([header, random_.randrange(len(whole))])
        damaged[place : place + 8] = random_.randbytes(8)
        variants.append(bytes(damaged))
    path = tmp_path / "1.tar"
    results = []
    for variant in variants:
        path.write_bytes(variant)
        ours, theirs = our_keys(path), openclip_keys(path)
        results.append(ours == theirs)
        assert ours == theirs
    assert len(results) == 95


def test_agrees_on_every_kind_of_broken_sample(broken_set):
    for path in sorted(broken_set.glob("*.tar")):
        ours = our_keys(path)
        assert ours == openclip_keys(path)
        assert len(ours) == 5


def test_agrees_on_the_reference_folders(tmp_path):
    material = os.environ.get("OPENCLIP_LINATTN_SHARED")
    script = Path(material or "") / "cases" / "make_broken_shards.py"
    if not material or not script.exists():
        pytest.skip("the reference material is not here")
    subprocess.run([sys.executable, str(script.resolve())], cwd=tmp_path, check=True, timeout=60)
    usable = {}
    for folder in ("good", "bad", "notxt", "trunc"):
        usable[folder] = 0
        for path in sorted((tmp_path / folder).glob("*.tar")):
            ours = our_keys(path)
            assert ours == openclip_keys(path)
            usable[folder] += len(ours)
    assert usable == {"good": 80, "bad": 40, "notxt": 0, "trunc": usable["trunc"]}
    assert 40 <= usable["trunc"] < 60
