"""Which number of the table a fit is about: its column, whether 1 - accuracy is meant, and its label."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from openclip_scaling.errors import UserError
from openclip_scaling.forms.law import Array
from openclip_scaling.reading.runs import CHECKPOINT_COLUMNS

ERROR_PREFIX = "error:"
_ACCURACY = re.compile(
    r"(top-?\d+|acc\d*|accuracy|recall(@?\d+)?|mean_per_class\w*|mean_average_precision|R@\d+)$",
    re.IGNORECASE,
)
# Losses of a batch: their value depends on how many negatives the batch holds.
LOSSES = {"val_loss": ("batch", "val_batch"), "train_loss": ("batch",)}
_LABELS = {
    "train_flop": "training compute (FLOP)",
    "samples_seen": "image-text pairs seen",
    "unique_samples_bound": "different image-text pairs seen, at most",
    "hours": "wall-clock time (hours)",
    "gpu_hours": "GPU-hours",
    "parameters": "parameters",
    "gmac_per_pair": "forward cost per pair (GMAC)",
    "step": "optimizer steps",
    "epoch": "epochs",
    "val_loss": "validation loss (nats)",
    "train_loss": "training loss (nats)",
}


@dataclass(frozen=True)
class Metric:
    """A column to be fitted; with `complement` the error that belongs to its accuracy (1 - value)."""

    column: str
    complement: bool
    whole: float = 1.0  # what an accuracy of all right is in the table: 1, or 100 for percentages

    @property
    def label(self) -> str:
        """Name with unit, for an axis or a table."""
        if not self.complement:
            return axis_label(self.column)
        return f"{self.column}, error " + ("(1 - accuracy)" if self.whole == 1 else "(100 - accuracy, %)")

    def on(self, frame: pd.DataFrame, notices: list[str]) -> Metric:
        """The same metric in the unit of a table: accuracies above 1 are percentages.

        Raises UserError for accuracies above 100 or below 0.
        """
        if not self.complement:
            return self
        raw = numbers(frame, self.column)
        raw = raw[np.isfinite(raw)]
        highest = float(raw.max(initial=0.0))
        if highest > 100 or (raw < 0).any():
            raise UserError(
                f"{self.column} is no accuracy: its values reach from {raw.min():g} to {highest:g}."
            )
        if highest <= 1:
            return self
        text = f"{self.column} is taken as percentages (its highest value is {highest:g})"
        if float(np.median(raw)) <= 1:
            text += ", but half of its values are at most 1: make sure that they are no fractions"
        notices.append(text)
        return replace(self, whole=100.0)

    @property
    def batch_columns(self) -> tuple[str, ...]:
        """The batch sizes that must not be mixed in one fit of this metric."""
        return LOSSES.get(self.column, ())

    def values(self, frame: pd.DataFrame) -> Array:
        """The metric of every row; NaN where there is none."""
        raw = numbers(frame, self.column)
        return np.asarray(self.whole - raw) if self.complement else raw


def axis_label(column: str) -> str:
    """The column's name with its unit, where it is known."""
    return _LABELS.get(column, column)


def value_label(column: str) -> str:
    """The label of the column's own values, not of the error that a fit makes of an accuracy."""
    return f"{column} (accuracy)" if _ACCURACY.search(column) else axis_label(column)


def numbers(frame: pd.DataFrame, column: str) -> Array:
    """A column as floats; NaN for what is not a number. Raises UserError when the column is absent."""
    if column not in frame.columns:
        known = ", ".join(str(name) for name in frame.columns)
        raise UserError(f"The table has no column {column!r}; its columns: {known}.")
    return pd.to_numeric(frame[column], errors="coerce").to_numpy(dtype=np.float64)


def metric_named(name: str) -> Metric:
    """`val_loss`, `train_loss` or any column; an accuracy, or `error:COLUMN`, is fitted as its error."""
    if name.startswith(ERROR_PREFIX):
        return Metric(name[len(ERROR_PREFIX) :], complement=True)
    return Metric(name, complement=_ACCURACY.search(name) is not None)


def metric_columns(frame: pd.DataFrame) -> list[str]:
    """The metrics of a table that have a value: losses first, then the others in their order."""
    others = [str(c) for c in frame.columns if c not in CHECKPOINT_COLUMNS and c not in LOSSES]
    return [name for name in (*LOSSES, *others) if name in frame.columns and _has_values(frame, [name])]


def _has_values(frame: pd.DataFrame, columns: Iterable[str]) -> bool:
    return any(bool(np.isfinite(numbers(frame, column)).any()) for column in columns)
