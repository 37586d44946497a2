"""Decides whether a sample is kept, and for what reason it is dropped."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from PIL import Image

from openclip_linattn.data.clean.settings import NSFW, SIMILARITY, Settings
from openclip_linattn.data.decoding import IMAGE_SUFFIXES, judge
from openclip_linattn.data.reading import RawSample

EMPTY_CAPTION = "empty caption"


@dataclass(frozen=True)
class Finding:
    """Why a sample is dropped (None: it is kept), and the content of its json ({} where that is no object).

    `usable` is true where image and caption are good, kept or not; `recovered` where training would have lost
    such a sample for another member.
    """

    reason: str | None
    usable: bool
    recovered: bool
    fields: Mapping[str, Any]


def assess(sample: RawSample, settings: Settings) -> Finding:
    """Judge one sample: image and caption first, as training would, then the filters.

    The first reason in this order counts: what training could not decode, an empty caption, the caption's
    length, NSFW, similarity, the image's sides. A sample that lacks a filter's field passes that filter.
    """
    verdict = judge(sample)
    fields = json_fields(sample) or {}
    if verdict.caption is None or verdict.size is None:  # the image or the caption itself is bad
        assert verdict.reason is not None
        return Finding(verdict.reason.value, False, False, fields)
    reason = (
        _caption_reason(verdict.caption.strip(), settings)
        or _nsfw_reason(fields, settings)
        or _similarity_reason(fields, settings)
        or _image_reason(verdict.size, settings)
    )
    return Finding(reason, True, not verdict.usable, fields)


def image_suffix(sample: RawSample) -> str | None:
    """Suffix of the image that OpenCLIP takes, None where there is no image."""
    return next((suffix for suffix in IMAGE_SUFFIXES if suffix in sample.members), None)


def image_of(sample: RawSample) -> bytes:
    """The image of a sample that has one."""
    suffix = image_suffix(sample)
    assert suffix is not None
    return sample.members[suffix]


def image_size(data: bytes) -> tuple[int, int]:
    """Width and height in pixels of an image that is known to decode, from its header."""
    with io.BytesIO(data) as stream, Image.open(stream) as image:
        return image.size


def json_fields(sample: RawSample, number: Callable[[str], Any] = float) -> dict[str, Any] | None:
    """The object in the json member, or None where there is none; `number` reads its fractions and NaN."""
    try:
        value = json.loads(sample.members["json"], parse_float=number, parse_constant=number)
    except (KeyError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def lacks(fields: Mapping[str, Any], name: str) -> bool:
    """Whether the json has no value under `name` that a filter could use."""
    return _number(fields) is None if name == SIMILARITY else fields.get(name) is None


def _caption_reason(caption: str, settings: Settings) -> str | None:
    if not caption and not settings.keep_empty_captions:
        return EMPTY_CAPTION
    if settings.min_caption is not None and len(caption) < settings.min_caption:
        return f"caption under {settings.min_caption} characters"
    if settings.max_caption is not None and len(caption) > settings.max_caption:
        return f"caption over {settings.max_caption} characters"
    return None


def _nsfw_reason(fields: Mapping[str, Any], settings: Settings) -> str | None:
    mark = str(fields.get(NSFW)).strip().upper()
    return f"{NSFW} is {mark}" if mark in settings.drop_nsfw and not lacks(fields, NSFW) else None


def _similarity_reason(fields: Mapping[str, Any], settings: Settings) -> str | None:
    if settings.min_similarity is None:
        return None
    value = _number(fields)
    # Written so that NaN is dropped: LAION's own cut would not have kept it.
    keeps = value is None or value >= settings.min_similarity
    return None if keeps else f"{SIMILARITY} under {settings.min_similarity:g}"


def _number(fields: Mapping[str, Any]) -> float | None:
    try:
        return float(fields[SIMILARITY])
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def _image_reason(size: tuple[int, int], settings: Settings) -> str | None:
    shorter, longer = sorted(size)
    if settings.min_side is not None and shorter < settings.min_side:
        return f"shorter side under {settings.min_side} px"
    if settings.max_aspect is not None and longer > settings.max_aspect * shorter:
        return f"aspect ratio over {settings.max_aspect:g}"
    return None
