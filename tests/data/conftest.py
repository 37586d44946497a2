"""Small shards, good and broken, written for each test that asks for them."""

import io
import json
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from PIL import Image

Members = list[tuple[str, bytes]]


def image_bytes(number: int, kind: str = "JPEG", mode: str = "RGB") -> bytes:
    """An image whose color depends on `number`."""
    color = (number * 37 % 256, number * 91 % 256, number * 13 % 256)
    buffer = io.BytesIO()
    Image.new("RGB", (24, 20), color).convert(mode).save(buffer, kind)
    return buffer.getvalue()


def sample(key: str, number: int = 0, **members: bytes | None) -> Members:
    """jpg, txt and json members under `key`; keywords replace a member, and None removes it."""
    content: dict[str, bytes | None] = {
        "jpg": image_bytes(number),
        "txt": f"photo {key}".encode(),
        "json": json.dumps({"key": key}).encode(),
        **members,
    }
    return [(f"{key}.{suffix}", data) for suffix, data in content.items() if data is not None]


def write_tar(path: Path, members: Iterable[tuple[str, bytes]], mode: str = "w") -> Path:
    """Write the members to a tar at `path`, making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def broken(kind: str, key: str, number: int) -> Members:
    """A sample with one fault, or with one oddity that OpenCLIP can read."""
    jpg = image_bytes(number)
    changes: dict[str, dict[str, bytes | None]] = {
        "good": {},
        "cut image": {"jpg": jpg[: len(jpg) // 2]},
        "html for an image": {"jpg": b"<html>not found</html>"},
        "no caption": {"txt": None},
        "broken json": {"json": b"{'single': quotes}"},
        "latin-1 caption": {"txt": "café".encode("latin-1")},
        "empty caption": {"txt": b""},
        "upper case": {"jpg": None, "JPG": jpg},
        "gray": {"jpg": image_bytes(number, mode="L")},
        "png": {"jpg": None, "png": image_bytes(number, "PNG", "RGBA")},
    }
    return sample(key, number, **changes[kind])


LOST = ("cut image", "html for an image", "no caption", "broken json", "latin-1 caption")
USABLE = ("good", "empty caption", "upper case", "gray", "png")


@pytest.fixture
def good_set(tmp_path: Path) -> Path:
    """Four shards of ten good samples."""
    for shard in range(4):
        members = [m for n in range(10) for m in sample(f"{shard:05d}{n:04d}", n)]
        write_tar(tmp_path / "good" / f"{shard:05d}.tar", members)
    return tmp_path / "good"


@pytest.fixture
def broken_set(tmp_path: Path) -> Path:
    """Three shards of ten samples, one of each kind: half of them lost for five reasons."""
    for shard in range(3):
        kinds = enumerate(LOST + USABLE)
        members = [m for n, kind in kinds for m in broken(kind, f"{shard:05d}{n:04d}", n)]
        write_tar(tmp_path / "broken" / f"{shard:05d}.tar", members)
    return tmp_path / "broken"


@pytest.fixture
def captionless_set(tmp_path: Path) -> Path:
    """Two shards of five samples without a txt member."""
    for shard in range(2):
        members = [m for n in range(5) for m in sample(f"{shard:05d}{n:04d}", n, txt=None)]
        write_tar(tmp_path / "captionless" / f"{shard:05d}.tar", members)
    return tmp_path / "captionless"


@pytest.fixture
def make_sample() -> Callable[..., Members]:
    """The function `sample`, for tests that put shards together themselves."""
    return sample


@pytest.fixture
def make_tar() -> Callable[..., Path]:
    """The function `write_tar`."""
    return write_tar


@pytest.fixture
def make_image() -> Callable[..., bytes]:
    """The function `image_bytes`."""
    return image_bytes
