"""Results as JSON-ready values, plain numbers with None for what is not finite, and metrics as names of files."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from openclip_scaling.fitting.analysis import Analysis


def json_ready(value: Any) -> Any:
    """The same value with NaN and infinities as None, and numpy scalars as Python's."""
    if isinstance(value, dict):
        return {str(key): json_ready(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_ready(item) for item in value]
    if isinstance(value, np.generic):
        return json_ready(value.item())
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a table, JSON-ready."""
    return [
        {str(key): None if pd.isna(value) else json_ready(value) for key, value in row.items()}
        for row in frame.to_dict("records")
    ]


def predictions(analysis: Analysis, scales: Sequence[Sequence[float]]) -> list[dict[str, Any]]:
    """The metric that every fit predicts at every scale, JSON-ready; decades_beyond is 0 among the points.

    A scale has a number for every column of x; beyond is that of the column which leads furthest.
    """
    columns = np.asarray(scales, dtype=np.float64)
    at = columns[:, 0] if columns.shape[1] == 1 else columns
    rows = []
    for item in analysis.fits:
        values, band = item.fit.predict(at), item.boot.band(at)
        x = item.fit.points.x.reshape(len(item.fit.points), -1)
        logs, reached = np.log10(columns), np.log10([x.min(axis=0), x.max(axis=0)])
        beyond = np.maximum(reached[0] - logs, logs - reached[1]).max(axis=1)
        for index, scale in enumerate(at):
            interval = None if band is None else (float(band[0][index]), float(band[1][index]))
            rows.append(
                {"group": item.group, "law": item.fit.law.name, "scale": scale.tolist(),
                 "predicted": float(values[index]), "interval95": interval,
                 "decades_beyond": max(0.0, float(beyond[index])), "reliable": item.boot.reliable}
            )  # fmt: skip
    return rows


def slug(name: str) -> str:
    """A metric's name as a file name; letters of every script stay."""
    return re.sub(r"[\W_]+", "-", name).strip("-").lower() or "metric"


def slugs(names: Iterable[str]) -> dict[str, str]:
    """A file name for each of several metrics, with a number behind it where another has it already."""
    found: dict[str, str] = {}
    for name in dict.fromkeys(names):
        stem = slug(name)
        tries = (stem if count == 1 else f"{stem}-{count}" for count in itertools.count(1))
        found[name] = next(text for text in tries if text not in found.values())
    return found
