"""Which runs are the same experiment at other learning rates, and which correspond between groups.

An experiment is a model size, a number of samples, a batch size and a seed. The runs of a group that differ in their
learning rate only are a sweep; runs of two groups that are the same experiment share their data and its order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from openclip_scaling.forms.law import Array

_SAME = 1.01  # sizes and samples up to this factor apart are one: kinds of attention add a few parameters


@dataclass(frozen=True)
class Experiment:
    """What a run is but for its group; seed and rate are None where they are not known."""

    cell: str
    seed: int | None
    rate: float | None


@dataclass(frozen=True)
class Plan:
    """The experiments of one group, by run; of nothing where size or samples are not known."""

    group: str
    runs: Mapping[str, Experiment]

    @property
    def rates(self) -> dict[str, list[float]]:
        """The learning rates of every cell, ascending."""
        found: dict[str, set[float]] = {}
        for run in self.runs.values():
            found.setdefault(run.cell, set()).update([] if run.rate is None else [run.rate])
        return {cell: sorted(rates) for cell, rates in found.items()}

    @property
    def swept(self) -> bool:
        return any(len(rates) > 1 for rates in self.rates.values())

    def units(self) -> dict[str, str] | None:
        """The name of the experiment of every run; None where runs cannot be told apart by it.

        Names of known seeds are the same in every group. In a sweep without seeds the runs at one rate are
        numbered instead, and their names hold the group.
        """
        if not self.runs:
            return None
        if all(run.seed is not None for run in self.runs.values()):
            names = {name: f"{run.cell}, seed {run.seed}" for name, run in self.runs.items()}
            at_rates = Counter((names[name], run.rate) for name, run in self.runs.items())
            if max(at_rates.values()) == 1 and (self.swept or len(set(names.values())) == len(names)):
                return names
        return self._numbered() if self.swept else None

    def _numbered(self) -> dict[str, str]:
        count: Counter[tuple[str, float | None]] = Counter()
        names = {}
        for name, run in sorted(self.runs.items()):
            names[name] = f"{self.group}, {run.cell}, number {count[run.cell, run.rate]}"
            count[run.cell, run.rate] += 1
        return names


def plans_of(rows: pd.DataFrame) -> dict[str, Plan]:
    """The plan of every group, from rows with group, run and, where known, size, samples, batch, seed and rate."""
    known = {"size", "samples"} <= set(rows.columns)
    if known:
        ends = rows.groupby(["group", "run"], sort=True).agg(
            {
                name: "max"
                for name in ("size", "samples", "batch", "val_batch", "seed", "rate")
                if name in rows.columns
            }
        )
        known = bool(ends[["size", "samples"]].notna().all(axis=None))
    if not known:
        return {str(group): Plan(str(group), {}) for group in rows["group"].unique()}
    cells = _cells(ends)
    found: dict[str, dict[str, Experiment]] = {}
    records = ends.reset_index().to_dict("records")
    for cell, row in zip(cells, records, strict=True):
        seed = _number(row.get("seed"))
        found.setdefault(str(row["group"]), {})[str(row["run"])] = Experiment(
            cell, None if seed is None else int(seed), _number(row.get("rate"))
        )
    return {group: Plan(group, runs) for group, runs in found.items()}


def _number(value: Any) -> float | None:
    return None if value is None or pd.isna(value) else float(value)


def _cells(ends: pd.DataFrame) -> list[str]:
    size = ends["size"]
    if pd.api.types.is_numeric_dtype(size):
        sizes = [f"{value:.4g} parameters" for value in _first_of_each(size.to_numpy(dtype=np.float64))]
    else:
        sizes = [str(value) for value in size]
    samples = _first_of_each(ends["samples"].to_numpy(dtype=np.float64))
    cells = [f"{name}, {count:,.0f} samples" for name, count in zip(sizes, samples, strict=True)]
    if "batch" in ends.columns and ends["batch"].nunique() > 1:
        cells = [f"{cell}, batch {batch:g}" for cell, batch in zip(cells, ends["batch"], strict=True)]
    return cells


def _first_of_each(values: Array) -> Array:
    """Every value replaced by the lowest of those that it is the same as."""
    ordered = np.unique(values)
    steps = np.flatnonzero(np.r_[True, ordered[1:] > _SAME * ordered[:-1]])
    return np.asarray(ordered[steps[np.searchsorted(steps, np.searchsorted(ordered, values), "right") - 1]])
