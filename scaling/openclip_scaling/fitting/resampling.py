"""Sets of runs: the units that are left out or drawn, the points that each set selects, and the fits to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from openclip_scaling.fitting.fit import Fit, enough, refit
from openclip_scaling.fitting.points import Points
from openclip_scaling.fitting.selections import Selection
from openclip_scaling.forms.law import Array


def rows_of_units(points: Points, units: Mapping[str, str] | None) -> dict[str, list[int]]:
    """The rows of every unit, sorted by its name; without units every run is one."""
    found: dict[str, list[int]] = {}
    for run, rows in points.rows_of().items():
        found.setdefault(run if units is None else units[run], []).extend(rows)
    return {name: sorted(found[name]) for name in sorted(found)}


def selected_points(
    points: Points, fit: Fit, selection: Selection, choices: Sequence[Sequence[int]]
) -> list[Points | None]:
    """The points that are selected from each choice of rows; None where they cannot fix the parameters."""
    found: list[Points | None] = []
    for rows in choices:
        selected = selection(points.take(rows)) if rows else None
        found.append(selected if selected and enough(selected, fit.law) else None)
    return found


def refits(samples: Sequence[Points | None], fit: Fit) -> Array:
    """theta of the samples that there are, shape (samples, parameters)."""
    usable = [sample for sample in samples if sample]
    return refit(usable, fit) if usable else np.empty((0, len(fit.theta)))


def drawn_runs(runs: int, draws: int, seed: int) -> Counter[tuple[int, ...]]:
    """How often each multiset of runs is drawn: with few runs there are few, and each is fitted once."""
    generator = np.random.default_rng(seed)
    picked = np.sort(generator.integers(runs, size=(draws, runs)), axis=1)
    return Counter(tuple(int(i) for i in row) for row in picked)
