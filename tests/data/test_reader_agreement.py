"""Our verdicts against OpenCLIP's own reading pipeline, sample by sample."""

import io
import os
import random
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from openclip_linattn.data.decoding import Reason, judge
from openclip_linattn.data.reading import RawSample, ShardLog, read_samples

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


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def unusual_images(usual: bytes) -> dict[str, bytes]:
    """Images as they are found on the web, by suffix and what is odd about them."""
    noise = Image.effect_noise((40, 30), 60)
    frames = [noise, noise.rotate(90, expand=False)]
    exif = Image.Exif()
    exif[0x010E] = "a description " * 20
    described = encoded(noise.convert("RGB"), "JPEG", exif=exif)
    size = described.index(b"Exif") - 2
    wide = Image.frombytes("I;16", (40, 30), bytes(range(240)) * 10)
    return {
        "jpg cmyk": encoded(noise.convert("CMYK"), "JPEG"),
        "jpg with exif": described,
        "jpg whose exif is cut": described[:80],
        "jpg whose exif is longer than it": described[:size] + b"\xff\xf0" + described[size + 2 :],
        "jpg whose exif is garbage": described.replace(b"MM\x00*", b"\x00\x01\x02\x03").replace(
            b"II*\x00", b"\x07" * 4
        ),
        "jpg progressive": encoded(noise, "JPEG", progressive=True),
        "jpg progressive and cut": encoded(noise, "JPEG", progressive=True)[:-300],
        "jpg with bytes after its end": usual + b"\x00" * 500,
        "jpg without its end marker": usual[:-2],
        "png of 16 bits": encoded(wide, "PNG"),
        "png of one bit": encoded(noise.convert("1"), "PNG"),
        "png with a palette": encoded(noise.convert("P"), "PNG"),
        "png with transparency": encoded(noise.convert("LA"), "PNG"),
        "png animated": encoded(noise, "PNG", save_all=True, append_images=frames),
        "png with a wrong checksum": encoded(noise, "PNG").replace(b"IDAT", b"IDAX"),
        "png cut": encoded(noise, "PNG")[:-30],
        "webp animated": encoded(noise, "WEBP", save_all=True, append_images=frames),
        "webp cut": encoded(noise, "WEBP")[:-100],
        "jpg that is a gif": encoded(noise, "GIF", save_all=True, append_images=frames),
        "jpg that is a tiff of floats": encoded(noise.convert("F"), "TIFF"),
        "jpg of one pixel": encoded(Image.new("RGB", (1, 1)), "JPEG"),
        "png that is large": one_bit_png(10_000, 9_000),
        "png that is a bomb": one_bit_png(20_000, 9_000),
        "jpg that is a bomb": one_bit_png(60_000, 60_000),
    }


def one_bit_png(width: int, height: int) -> bytes:
    """A PNG of a few kilobytes that claims many pixels, and has them."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    row = b"\0" * (1 + (width + 7) // 8)
    packer = zlib.compressobj(9)
    # Pillow refuses an image of too many pixels before it reads any.
    rows = min(height, 9_000)
    data = b"".join([*(packer.compress(row) for _ in range(rows)), packer.flush()])
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.filterwarnings("ignore:Corrupt EXIF data:UserWarning")
def test_agrees_on_unusual_images(tmp_path, make_sample, make_tar, make_image):
    images = unusual_images(make_image(1))
    members = []
    for name, data in images.items():
        members += make_sample(name, **{"jpg": None, name.split()[0]: data})
    path = make_tar(tmp_path / "0.tar", members)
    ours = our_keys(path)
    assert ours == openclip_keys(path)
    lost = {
        name: judge(sample).reason for sample in read_samples(str(path), ShardLog()) for name in [sample.key]
    }
    assert {name for name, reason in lost.items() if reason is Reason.IMAGE_BOMB} == {
        "png that is a bomb",
        "jpg that is a bomb",
    }
    damaged = {name for name, reason in lost.items() if reason is Reason.DAMAGED_IMAGE}
    assert {"png cut", "webp cut", "jpg whose exif is cut"} <= damaged
    assert {"png that is large", "jpg cmyk", "png of 16 bits", "webp animated", "png animated"} <= set(ours)


def test_a_large_image_is_warned_of_in_training_and_a_larger_one_is_lost(make_image):
    large, bomb = one_bit_png(10_000, 9_000), one_bit_png(20_000, 9_000)
    with pytest.warns(Image.DecompressionBombWarning, match="90000000 pixels"):
        verdict = judge(RawSample("a", {"png": large, "txt": b"a"}))
    assert (verdict.reason, verdict.size) == (None, (10_000, 9_000))
    verdict = judge(RawSample("a", {"png": bomb, "txt": b"a"}))
    assert (verdict.reason, verdict.pixels, verdict.size) == (Reason.IMAGE_BOMB, 180_000_000, None)
    verdict = judge(RawSample("a", {"jpg": make_image(1), "seg.png": bomb, "txt": b"a"}))
    assert (verdict.reason, verdict.recoverable) == (Reason.IMAGE_BOMB, True)


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
