"""Decides whether OpenCLIP's training can use a sample, by decoding every member as it does.

`wds.decode("pilrgb")` decodes all members of a sample, and one that fails loses the whole sample.
"""

from __future__ import annotations

import gzip
import io
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from PIL import Image

from openclip_linattn.data.reading import RawSample

IMAGE_SUFFIXES = ("jpg", "png", "jpeg", "webp")  # in the order in which OpenCLIP prefers them
_TEXT = ("txt", "text", "transcript")
_JSON = ("json", "jsn")
_INTEGER = ("cls", "cls2", "index", "inx", "id")
# fmt: off
_OTHER_IMAGES = frozenset(
    (
        "blp", "bmp", "dib", "bufr", "cur", "pcx", "dcx", "dds", "ps", "eps", "fit", "fits", "fli", "flc",
        "ftc", "ftu", "gbr", "gif", "grib", "h5", "hdf", "apng", "jp2", "j2k", "jpc", "jpf", "jpx", "j2c",
        "icns", "ico", "im", "iim", "tif", "tiff", "jfif", "jpe", "mpg", "mpeg", "msp", "pcd", "pxr", "pbm",
        "pgm", "ppm", "pnm", "psd", "bw", "rgb", "rgba", "sgi", "ras", "tga", "icb", "vda", "vst", "wmf",
        "emf", "xbm", "xpm",
    )
)
# fmt: on
# Decoded by the training with unpickling or with optional packages: the check does not run them.
UNCHECKED = frozenset(["pyd", "pickle", "pth", "ten", "tb", "mp", "msg", "npz", "cbor"])

_MAGIC = (b"\xff\xd8", b"\x89PNG", b"RIFF", b"GIF8", b"BM", b"II*\x00", b"MM\x00*")


class Reason(str, Enum):
    """Why a sample is lost; the value is the table's and the report's word for it."""

    MISSING_IMAGE = "missing image"
    MISSING_CAPTION = "missing caption"
    DAMAGED_IMAGE = "damaged image"
    NOT_AN_IMAGE = "not an image"
    IMAGE_BOMB = "image bomb"
    CAPTION_NOT_UTF8 = "caption not UTF-8"
    BROKEN_JSON = "broken json"
    BROKEN_MEMBER = "broken member"


@dataclass(frozen=True)
class Verdict:
    """What becomes of a sample: lost for `reason`, or usable (None); its caption empty; its core intact.

    `recoverable` is true where image and caption are good and only another member is not. `size` is the image's
    (width, height), `caption` its text; each is None where the sample is lost before it is decoded. `pixels`
    counts those of an image bomb.
    """

    reason: Reason | None
    empty_caption: bool = False
    recoverable: bool = False
    size: tuple[int, int] | None = None
    caption: str | None = None
    pixels: int = 0

    @property
    def usable(self) -> bool:
        """Whether OpenCLIP trains on the sample."""
        return self.reason is None


def judge(sample: RawSample) -> Verdict:
    """Verdict for one sample; where several members are bad, the image comes first, then the caption."""
    image = next((suffix for suffix in IMAGE_SUFFIXES if suffix in sample.members), None)
    if image is None:
        return Verdict(Reason.MISSING_IMAGE)
    if "txt" not in sample.members:
        return Verdict(Reason.MISSING_CAPTION)
    look = _look_at(sample.members[image])
    faults: dict[str, Reason] = {}
    for suffix, data in sample.members.items():
        reason = look.reason if suffix == image else _fault(suffix, data)
        if reason is not None:
            faults[suffix] = reason
    if image in faults or "txt" in faults:
        return Verdict(faults.get(image) or faults["txt"], size=look.size, pixels=look.pixels)
    caption = sample.members["txt"].decode("utf-8")
    empty = not caption.strip()
    other = next(iter(faults.values()), None)
    return Verdict(
        other,
        empty_caption=empty,
        recoverable=other is not None and not empty,
        size=look.size,
        caption=caption,
    )


def decode_image(data: bytes) -> Image.Image:
    """The RGB image as OpenCLIP decodes it; raises what Pillow raises."""
    with io.BytesIO(data) as stream:
        image = Image.open(stream)
        image.load()
        # Converting an RGB image to RGB would only copy it.
        return image if image.mode == "RGB" else image.convert("RGB")


@dataclass(frozen=True)
class _Look:
    """What decoding an image member gave: why it failed or its (width, height); the pixels of a bomb."""

    reason: Reason | None
    size: tuple[int, int] | None = None
    pixels: int = 0


def _look_at(data: bytes) -> _Look:
    # OpenCLIP drops the sample whatever the decoder raises, and Pillow's readers raise almost anything.
    try:
        return _Look(None, decode_image(data).size)
    except Image.DecompressionBombError as error:
        # Pillow names the pixels in its message only.
        pixels = re.search(r"\d+", str(error))
        return _Look(Reason.IMAGE_BOMB, pixels=int(pixels.group()) if pixels else 0)
    except Exception:
        return _Look(Reason.DAMAGED_IMAGE if data.startswith(_MAGIC) else Reason.NOT_AN_IMAGE)


def _fault(suffix: str, data: bytes) -> Reason | None:
    """Why the member cannot be decoded, or None; the part after the last dot names the decoder."""
    if suffix.startswith("__"):
        return None
    extension = re.sub(r".*[.]", "", suffix)
    if extension == "gz" and "." + suffix != ".gz":
        return _compressed_fault(suffix, data)
    if extension in IMAGE_SUFFIXES or extension in _OTHER_IMAGES:
        return _look_at(data).reason
    for extensions, decode, reason in _DECODERS:
        if extension in extensions and not _works(decode, data):
            return reason if suffix in ("txt", *_JSON) else Reason.BROKEN_MEMBER
    return None


def _compressed_fault(suffix: str, data: bytes) -> Reason | None:
    try:
        plain = gzip.decompress(data)
    except (OSError, EOFError, ValueError):
        return Reason.BROKEN_MEMBER
    fault = _fault(suffix[: -len(".gz")], plain)
    return Reason.BROKEN_MEMBER if fault else None


def _works(decode: Callable[[bytes], Any], data: bytes) -> bool:
    try:
        decode(data)
    except Exception:
        return False
    return True


def _load_npy(data: bytes) -> None:
    from numpy.lib.format import read_array

    read_array(io.BytesIO(data))  # type: ignore[no-untyped-call]


_DECODERS: tuple[tuple[tuple[str, ...], Callable[[bytes], Any], Reason], ...] = (
    (_TEXT, lambda data: data.decode("utf-8"), Reason.CAPTION_NOT_UTF8),
    (_JSON, json.loads, Reason.BROKEN_JSON),
    (_INTEGER, int, Reason.BROKEN_MEMBER),
    (("npy",), _load_npy, Reason.BROKEN_MEMBER),
)
