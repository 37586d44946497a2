"""The best fit with one parameter held: how far a floor can go before the fit becomes clearly worse.

A fit that holds its floor at a bound does so without any one of the runs too, and then resampling says nothing about
its uncertainty. The profile does: the floor is moved away from its optimum, the rest is fitted again, and the
limit is where the objective exceeds its optimum by the factor 1 + F / d, with F the quantile of the F distribution
with 1 and d degrees of freedom. d is that of the fit, but no more than the number of runs less one, since the
checkpoints of one run are not independent.
"""

from __future__ import annotations

import numpy as np
from scipy import stats

from openclip_scaling.fitting.fit import Fit
from openclip_scaling.fitting.solver import centred_data, solve
from openclip_scaling.forms.law import Array

_STEPS = 32
_ROUNDS = 3  # each divides what is left by _STEPS
_EXACT = 1e-18  # per point: below this an objective is rounding noise


def floor_limits(fit: Fit, runs: int, level: float) -> Array:
    """theta at the lowest and at the highest floor that the points allow at `level`, shape (2, parameters).

    Empty for a law without a floor, without degrees of freedom, and for points that the fit meets exactly.
    """
    degrees = min(fit.degrees_of_freedom, runs - 1)
    if degrees < 1 or fit.law.floor is None or fit.objective < _EXACT * len(fit.points):
        return np.empty((0, len(fit.theta)))
    limit = fit.objective * (1 + float(stats.f.ppf(level, 1, degrees)) / degrees)
    low, high = fit.law.bounds(np.log(fit.points.y / fit.e0))
    # At the lowest point itself the loss in logs has no finite optimum.
    return np.stack([_limit(fit, edge, limit) for edge in (float(low[-1]), float(high[-1]) * (1 - 1e-9))])


def _limit(fit: Fit, edge: float, limit: float) -> Array:
    """theta at the floor nearest to `edge` up to which the objective stays within `limit`."""
    inside, outside, last = fit.theta, edge, len(fit.theta) - 1
    if inside[last] == edge:
        return inside
    for _ in range(_ROUNDS):
        floors = np.linspace(inside[last], outside, _STEPS + 1)[1:]
        thetas, objectives = best_with(fit, last, floors, inside)
        beyond = np.flatnonzero(objectives > limit)
        if not len(beyond):
            return np.asarray(thetas[-1])
        first = int(beyond[0])
        inside, outside = (thetas[first - 1] if first else inside), float(floors[first])
    return inside


def best_with(fit: Fit, held: int, values: Array, near: Array) -> tuple[Array, Array]:
    """The best theta with parameter number `held` at each of the values, and its objective; `near` is a start."""
    data = centred_data([fit.points], fit.c0, fit.e0)
    others = fit.law.starts(data.u[0], data.v[0])[:: max(1, fit.starts // 4)]
    ends = []
    for start in (near, *others):
        starts = np.tile(start, (len(values), 1))
        starts[:, held] = values
        ends.append(solve(fit.law, fit.centred_loss, starts, data, held=held))
    best = np.argmin([objectives for _, objectives in ends], axis=0)
    rows = np.arange(len(values))
    thetas, objectives = (np.stack(part)[best, rows] for part in zip(*ends, strict=True))
    return thetas, objectives
