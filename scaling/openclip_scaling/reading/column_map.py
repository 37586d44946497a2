"""Which column of a published table is which column of ours, and in what unit: a YAML file.

    run: name                                            # the column `name`
    attention: {value: softmax}                          # the same for all rows
    samples_seen: {column: samples, unit: millions}
    gmac_per_pair: {column: gflops, unit: GFLOP}         # GFLOP are 2 x GMAC
    imagenet/top1: {column: acc, unit: "%"}
    "{dataset}/error": err1                              # a column of ours for each value of the column `dataset`

`factor: 1e6` multiplies what no unit says. Names that are not columns of ours are metrics, or labels to group by.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from openclip_scaling.errors import UserError
from openclip_scaling.flops import FLOP_PER_MAC, TRAINING_FACTOR
from openclip_scaling.reading.runs import CHECKPOINT_COLUMNS

_COUNTS = {"thousands": 1e3, "millions": 1e6, "billions": 1e9, "trillions": 1e12}
_HOURS = {"seconds": 1 / 3600, "minutes": 1 / 60, "hours": 1.0, "days": 24.0}
_MACS = {"MAC": 1e-9, "MMAC": 1e-3, "GMAC": 1.0, "TMAC": 1e3}
_FLOPS = {"FLOP": 1.0, "GFLOP": 1e9, "TFLOP": 1e12, "PFLOP": 1e15, "EFLOP": 1e18, "ZFLOP": 1e21}
_FORWARD = TRAINING_FACTOR * FLOP_PER_MAC
# Of each column, what one of the unit is in the unit of the table.
_UNITS: dict[str, dict[str, float]] = {
    **dict.fromkeys(
        ("samples_seen", "unique_samples_bound", "image_parameters", "text_parameters", "parameters", "batch",
         "val_batch", "step"), _COUNTS),
    **dict.fromkeys(("hours", "gpu_hours"), _HOURS),
    "gmac_per_pair": {**_MACS, **{unit: size / FLOP_PER_MAC / 1e9 for unit, size in _FLOPS.items()}},
    "train_flop": {
        **_FLOPS,
        "PFLOP-days": 8.64e19,
        **{f"forward {unit}": _FORWARD * 1e9 * size for unit, size in _MACS.items()},
        **{f"forward {unit}": TRAINING_FACTOR * size for unit, size in _FLOPS.items()},
    },
}  # fmt: skip
_METRIC_UNITS = {"fraction": 1.0, "%": 0.01}
_PLACE = re.compile(r"\{([^{}]+)\}")


# Columns of ours whose values are texts (or true and false), and those whose values are numbers.
TEXTS = {"run", "model", "attention", "text_attention", "lr_schedule", "diverged"}
NUMBERS = {"val_loss", *CHECKPOINT_COLUMNS} - TEXTS


@dataclass(frozen=True)
class Source:
    """Where the values of one of our columns come from: a column times a factor, or one value for all rows."""

    column: str | None
    factor: float | None = None
    value: Any = None


def named_columns(target: str) -> list[str]:
    """The columns whose values stand in the name of one of ours, as in "{dataset}/error"."""
    return _PLACE.findall(target)


def read_column_map(path: Path) -> dict[str, Source]:
    """Our columns and their sources. Raises UserError where the file is not such a map."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(content, dict) or not content:
        raise UserError(
            f"{path} must map columns of the table to columns of the CSV, as in `samples_seen: samples`."
        )
    return {str(target): _source(path, str(target), entry) for target, entry in content.items()}


def _source(path: Path, target: str, entry: Any) -> Source:
    if isinstance(entry, str):
        return Source(entry)
    where = f"{path}, {target}"
    if not isinstance(entry, dict) or not entry.keys() <= {"column", "value", "unit", "factor"}:
        raise UserError(f"{where}: give the name of a column, or {{column, unit, factor}}, or {{value}}.")
    if ("column" in entry) == ("value" in entry) or ("value" in entry and len(entry) > 1):
        raise UserError(f"{where}: give a column (with a unit or a factor), or a value alone.")
    if "value" in entry:
        return Source(None, value=_constant(where, target, entry["value"]))
    return Source(str(entry["column"]), _factor(where, target, entry))


def _constant(where: str, target: str, value: Any) -> Any:
    if target in NUMBERS:
        try:
            return float(value)  # YAML reads 1e6 as text
        except (TypeError, ValueError):
            raise UserError(f"{where}: {value!r} is not a number.") from None
    if target == "diverged" and not isinstance(value, bool):
        raise UserError(f"{where}: {value!r} is neither true nor false.")
    if not isinstance(value, (str, int, float)):
        raise UserError(f"{where}: {value!r} is neither a text nor a number.")
    return str(value) if target in TEXTS - {"diverged"} else value


def _factor(where: str, target: str, entry: Mapping[str, Any]) -> float | None:
    if "unit" not in entry and "factor" not in entry:
        return None
    units = _UNITS.get(target, _METRIC_UNITS)
    unit = str(entry.get("unit", ""))
    if "unit" in entry and unit not in units:
        raise UserError(f"{where}: the unit {unit!r} is unknown; use {', '.join(units)}, or a factor.")
    try:
        factor = float(entry.get("factor", 1.0))
    except (TypeError, ValueError):
        factor = math.nan
    if not (math.isfinite(factor) and factor > 0):
        raise UserError(f"{where}: the factor {entry['factor']!r} is not a positive number.")
    return factor * units.get(unit, 1.0)
