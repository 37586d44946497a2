"""How far a floor E0 can go before the fit becomes clearly worse: the profile of the objective over the floor.

Resampled fits often sit on a bound of the floor, in every draw alike, and then say nothing about its
uncertainty. The profile does: the floor is moved away from its optimum, the rest is fitted again, and the limit
is where the objective exceeds its optimum by the factor 1 + F / d, with F the quantile of the F distribution with
1 and d degrees of freedom. d is that of the fit, but no more than the number of runs less one, since the
checkpoints of one run are not independent.
"""

from __future__ import annotations

import numpy as np
from scipy import stats
from scipy.optimize import least_squares

from openclip_scaling.fit import Fit
from openclip_scaling.laws import Array

_BISECTIONS = 25
_EXACT = 1e-18  # per point: below this an objective is rounding noise


def floor_limits(fit: Fit, runs: int, level: float) -> list[Array]:
    """theta at the lowest and at the highest floor that the points allow at `level`.

    For laws with three parameters of which the last is the floor. Empty without degrees of freedom, and for
    points that the fit meets exactly.
    """
    degrees = min(fit.degrees_of_freedom, runs - 1)
    if degrees < 1 or len(fit.theta) != 3 or fit.objective < _EXACT * len(fit.points):
        return []
    limit = fit.objective * (1 + float(stats.f.ppf(level, 1, degrees)) / degrees)
    v = np.log(fit.points.y / fit.e0)
    low, high = fit.law.bounds(v)
    # At the lowest point itself the loss in logs has no finite optimum.
    return [_limit(fit, edge, limit) for edge in (float(low[2]), float(high[2]) * (1 - 1e-9))]


def _limit(fit: Fit, edge: float, limit: float) -> Array:
    """theta at the floor nearest to `edge` whose objective stays within `limit`."""
    inside, outside = fit.theta, edge
    theta, objective = _at_floor(fit, edge, inside)
    if objective <= limit:
        return theta
    for _ in range(_BISECTIONS):
        middle = (float(inside[2]) + outside) / 2
        theta, objective = _at_floor(fit, middle, inside)
        if objective <= limit:
            inside = theta
        else:
            outside = middle
    return inside


def _at_floor(fit: Fit, floor: float, start: Array) -> tuple[Array, float]:
    """The best theta with that floor, and its objective."""
    u, v = np.log(fit.points.x / fit.c0), np.log(fit.points.y / fit.e0)
    low, high = (bound[:2] for bound in fit.law.bounds(v))

    def whole(rest: Array) -> Array:
        return np.append(rest, floor)

    def residuals(rest: Array) -> Array:
        return np.asarray(fit.law.log_predict(whole(rest), u) - v)

    def jacobian(rest: Array) -> Array:
        return fit.law.jacobian(whole(rest), u)[:, :2]

    ends = [
        least_squares(
            residuals,
            np.clip(first, low + 1e-9, high - 1e-9),
            jac=jacobian,
            bounds=(low, high),
            x_scale="jac",
            loss="linear" if fit.loss.delta is None else "huber",
            f_scale=fit.loss.delta or 1.0,
        ).x
        for first in (start[:2], _line_above(u, v, floor))
    ]
    thetas = [whole(np.asarray(end, dtype=np.float64)) for end in ends]
    totals = [fit.loss.total(v - fit.law.log_predict(theta, u)) for theta in thetas]
    best = int(np.argmin(totals))
    return thetas[best], totals[best]


def _line_above(u: Array, v: Array, floor: float) -> Array:
    """A start: level and slope of the straight line through the logs of what lies above the floor."""
    above = np.log(np.maximum(np.exp(v) - floor, 1e-9 * np.exp(v)))
    slope, level = np.polyfit(u, above, 1)
    return np.array([level, min(slope, -1e-3)])
