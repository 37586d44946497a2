"""Upsampling factors: checked before OpenCLIP, which asserts late, and spread over what a source becomes."""

from __future__ import annotations

import math

from openclip_linattn.data.sources import as_pattern
from openclip_linattn.errors import UserError

FLAG = "--train-data-upsampling-factors"


def settle_factors(factors: str, source: str, *, resampled: bool) -> str:
    """The factors for the parts of `as_pattern(source)`, from one for each part of `source` or of that.

    A folder or a list file may become several patterns, which then all get its factor. Raises UserError where the
    factors are not as many as the parts, are no numbers from 0 on, or are all 0; and without --dataset-resampled.
    """
    if not resampled:
        raise UserError(
            f"{FLAG} weights shards that are drawn with replacement: give --dataset-resampled too."
        )
    texts = factors.split("::")
    values = [_value(text) for text in texts]
    if not any(values):
        raise UserError(f"{FLAG} {factors}: all factors are 0, so nothing would be drawn.")
    parts = [as_pattern(part).split("::") for part in source.split("::")]
    if len(texts) == len(parts):
        return "::".join(text for text, patterns in zip(texts, parts, strict=True) for _ in patterns)
    if len(texts) == sum(map(len, parts)):
        return factors
    raise UserError(
        f"{FLAG} {factors}: there are {len(texts)} factors for the {len(parts)} parts of {source}; give one for each, "
        "joined by `::` as the parts are."
    )


def _value(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise UserError(
            f"{FLAG}: {text!r} is not a number from 0 on; factors are joined by `::`, as in 2::1."
        )
    return value
