"""What is written of a kept sample: its image, its caption, and a json that can be read.

Training decodes every member that a sample carries, so members that it does not use are left out: they cost
time, and a broken one costs the sample.
"""

from __future__ import annotations

import io
import json
import math
from dataclasses import dataclass
from typing import Any

from PIL import Image

from openclip_linattn.data.clean.filters import image_size, image_suffix, json_fields
from openclip_linattn.data.decoding import decode_image
from openclip_linattn.data.reading import RawSample

JPEG_QUALITY = 95  # img2dataset's default
JPEG_SIDE = 65_500  # pixels: libjpeg encodes no longer side


@dataclass(frozen=True)
class Repaired:
    """Members of one sample as (name, content), what was changed, and the suffixes that were left out."""

    members: list[tuple[str, bytes]]
    resized: bool
    json_made: bool
    left_out: list[str]


def repair(sample: RawSample, key: str, resize: int | None) -> Repaired:
    """The members to write for `sample` under `key`.

    The caption's bytes stay, and so do the image's unless its shorter side is over `resize` pixels: then it
    becomes an RGB JPEG, if its longer side then fits into one. A tag of orientation is not applied, as OpenCLIP
    does not either, and goes with the rest of the EXIF data where the image is written anew. The json keeps its
    fields; `key` is the new key, `original_key` the first one that the sample ever had, and NaN becomes null.
    """
    suffix = image_suffix(sample)
    assert suffix is not None
    image, size = resized(sample.members[suffix], resize)
    fields = json_fields(sample, number=_finite)
    record: dict[str, Any] = fields if fields is not None else {"caption": sample.members["txt"].decode()}
    record.setdefault("original_key", sample.key)
    record["key"] = key
    if size is not None:
        record["width"], record["height"] = size
    name = "jpg" if size is not None or suffix == "jpeg" else suffix
    members = [
        (f"{key}.{name}", image),
        (f"{key}.txt", sample.members["txt"]),
        (f"{key}.json", json.dumps(record, allow_nan=False).encode()),
    ]
    left_out = [name for name in sample.members if name not in (suffix, "txt", "json")]
    return Repaired(members, size is not None, fields is None, left_out)


def resized(data: bytes, side: int | None) -> tuple[bytes, tuple[int, int] | None]:
    """The image with its shorter side at most `side` pixels, and its new size, or None where it is as it was."""
    if side is None:
        return data, None
    width, height = image_size(data)
    shorter = min(width, height)
    size = (round(width * side / shorter), round(height * side / shorter))
    if shorter <= side or max(size) > JPEG_SIDE:
        return data, None
    smaller = decode_image(data).resize(size, Image.Resampling.LANCZOS)
    with io.BytesIO() as stream:
        smaller.save(stream, "JPEG", quality=JPEG_QUALITY)
        return stream.getvalue(), size


def _finite(text: str) -> float | None:
    """The number, or None for NaN and infinity, which are no JSON."""
    value = float(text)
    return value if math.isfinite(value) else None
