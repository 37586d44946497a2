"""The interval of a difference between two groups, from the intervals of both.

Each side is made of the sides of the two that lead there (Zou and Donner 2008), so that what widens one of the
intervals, such as a floor that is not known, widens the difference. Experiments that both groups have (same size,
samples and seed) are left out of both at once, and what they move in common does not count (a paired jackknife).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from scipy import stats

from openclip_scaling.fitting.uncertainty import LEVEL, Bootstrap
from openclip_scaling.forms.law import Array

Function = Callable[[Array], Array]  # of theta
_TAIL = (1 + LEVEL) / 2


def paired_runs(boots: Sequence[Bootstrap]) -> list[tuple[int, int]]:
    """The rows of `left_out` in both groups that leave out the same experiment; empty where none is known to be."""
    first, second = ({name: row for row, name in enumerate(boot.experiments)} for boot in boots)
    return [(first[name], second[name]) for name in first if name in second]


def correlation(boots: Sequence[Bootstrap], functions: Sequence[Function]) -> float:
    """Of a function of each group's theta, over the experiments that both have; 0 where there is none."""
    pairs = paired_runs(boots)
    if not pairs:
        return 0.0
    scaled = []
    for boot, function in zip(boots, functions, strict=True):
        values = function(boot.left_out)
        with np.errstate(invalid="ignore"):
            scaled.append((values - values.mean()) * math.sqrt((boot.runs - 1) / boot.runs))
    (first, second), rows = scaled, np.array(pairs)
    with np.errstate(invalid="ignore", divide="ignore"):
        value = first[rows[:, 0]] @ second[rows[:, 1]] / math.sqrt(first @ first * (second @ second))
    return float(value) if math.isfinite(value) else 0.0


def difference_limits(
    estimates: Sequence[float],
    intervals: Sequence[tuple[float, float]],
    degrees: Sequence[int],
    paired: float | None = None,
) -> tuple[float, float]:
    """The interval of first minus second from their own t intervals.

    paired is their correlation where experiments correspond. The degrees of freedom are then the fewer of the two,
    less one for the correlation, which comes from the same runs; else they are those of Welch.
    """
    (first, second), ((low1, high1), (low2, high2)) = estimates, intervals
    down = _together((first - low1, high2 - second), degrees, paired)
    up = _together((high1 - first, second - low2), degrees, paired)
    return first - second - down, first - second + up


def _together(sides: Sequence[float], degrees: Sequence[int], paired: float | None) -> float:
    """One side of a t interval for a difference, from those of its two parts."""
    errors = [side / float(stats.t.ppf(_TAIL, d)) for side, d in zip(sides, degrees, strict=True)]
    if not math.isfinite(sum(errors)):
        return math.inf
    total = math.hypot(*errors)
    if paired is not None:
        rest = max(0.0, total**2 - 2 * paired * errors[0] * errors[1])
        return float(stats.t.ppf(_TAIL, max(1, min(degrees) - 1))) * math.sqrt(rest)
    spread = sum(error**4 / d for error, d in zip(errors, degrees, strict=True))
    return float(stats.t.ppf(_TAIL, total**4 / spread)) * total if spread > 0 else total


def difference_of(
    boots: Sequence[Bootstrap],
    functions: Sequence[Function],
    intervals: Sequence[tuple[float, float]] | None = None,
) -> tuple[float, float]:
    """The interval of a function of the first group's theta less one of the second's; both groups have intervals.

    intervals are those of the two functions where they are known already.
    """
    estimates = [float(function(boot.fit.theta)) for boot, function in zip(boots, functions, strict=True)]
    if intervals is None:
        limits = [boot.limits(function) for boot, function in zip(boots, functions, strict=True)]
        intervals = [(float(low), float(high)) for low, high in limits]
    paired = correlation(boots, functions) if paired_runs(boots) else None
    return difference_limits(estimates, intervals, [boot.degrees for boot in boots], paired)
