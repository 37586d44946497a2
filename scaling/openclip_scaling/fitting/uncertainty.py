"""Intervals over runs: what would another set of runs have given?

The checkpoints of one run share its seed, data order and schedule, so everything here leaves out or draws whole runs,
and a selection such as the frontier is made again every time.

The interval is estimate +- t s. s is the jackknife's standard error, from the fits that leave one run out; positive
parameters and predictions are taken in logs. t has as many degrees of freedom as there are runs, less two for a level
and a slope; what further parameters cost is in the jackknife already. In simulations of known laws (see coverage)
this contains the true parameter in 93 to 97 % of cases from 9 runs on, and more often beside a floor that is hardly
seen, since a truth next to a bound can be missed on one side only; the percentiles of a bootstrap, which can only mix
the runs at hand, give about 90 %.

Two cases need more. The choice of points by their low values is not smooth, so there the interval takes in the
percentiles of the bootstrap as well. A floor at its bound shows no spread, so there it takes in what the one-sided
limits of its profile give (see profile).

A curve through all points has no interval, and one that needs every single run has none either. Below MINIMUM_RUNS
even this is no more than a hint, and is marked as not reliable.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import stats

from openclip_scaling.errors import UserError
from openclip_scaling.fitting.fit import Fit
from openclip_scaling.fitting.points import Points
from openclip_scaling.fitting.profile import floor_limits
from openclip_scaling.fitting.resampling import drawn_runs, refits, rows_of_units, selected_points
from openclip_scaling.fitting.selections import Selection, all_points, by_value
from openclip_scaling.forms.law import Array, Parameter, exp

MINIMUM_RUNS = 5
LEVEL = 0.95
_FAR = 1e300  # stands for infinity where quantiles are taken
_MOST_DRAWS = 100_000
_ONE_SIDED = 2 * LEVEL - 1  # a floor at its bound can err to one side only
_AT_BOUND = 1e-6  # of the lowest value observed


@dataclass(frozen=True)
class Interval:
    """Bounds of one parameter at LEVEL; identified is False where they leave the parameter open."""

    low: float
    high: float
    identified: bool


@dataclass(frozen=True)
class Bootstrap:
    """Refits of one fit to other sets of runs.

    left_out has shape (runs, parameters): each without one run; empty where some run cannot be spared. thetas has
    shape (draws that could be fitted, parameters): runs drawn with replacement; failed counts the draws with too
    few different scales. profile has shape (0 or 2, parameters): where the floor is held at a bound, theta at the
    limits of its profile. All are centred like the fit. reselected says that points were chosen by their values.
    reliable is False below MINIMUM_RUNS runs. intervals is empty where there is none. experiments are the names of
    what is left out, in the order of left_out, where they mean the same in every group; else empty.
    """

    fit: Fit
    left_out: Array
    thetas: Array
    profile: Array
    runs: int
    failed: int
    seed: int
    reselected: bool
    intervals: dict[str, Interval]
    experiments: tuple[str, ...] = ()

    @property
    def reliable(self) -> bool:
        return self.runs >= MINIMUM_RUNS and bool(self.intervals)

    @property
    def degrees(self) -> int:
        """Degrees of freedom of the t interval, from the runs among the fitted points."""
        return degrees_left(len(self.fit.points.runs))

    @property
    def notice(self) -> str | None:
        """Why the intervals are not to be relied on, or None."""
        if not self.intervals:
            if self.runs < 2:
                return "no interval: one run does not show how runs differ"
            if self.fit.degrees_of_freedom < 1:
                return "no interval: a curve through all points shows no scatter"
            return f"no interval: without one of the {self.runs} runs there are too few different scales"
        if not self.reliable:
            return f"the intervals are not reliable with {self.runs} runs (fewer than {MINIMUM_RUNS})"
        return None

    def standard_error(self, function: Callable[[Array], Array]) -> Array:
        """Jackknife standard error of a function of theta, which takes (..., parameters)."""
        values = function(self.left_out)
        with np.errstate(over="ignore", invalid="ignore"):
            deviations = values - values.mean(axis=0)
            return np.asarray(np.sqrt((self.runs - 1) / self.runs * (deviations**2).sum(axis=0)))

    def limits(self, function: Callable[[Array], Array]) -> tuple[Array, Array]:
        """Bounds of a function of theta at LEVEL, infinite where it is so for some set of runs.

        Only where there are intervals.
        """
        tail = (1 - LEVEL) / 2
        estimate = function(self.fit.theta)
        half = np.nan_to_num(self.standard_error(function), nan=np.inf, posinf=np.inf)
        half = stats.t.ppf(1 - tail, self.degrees) * half
        low, high = estimate - half, estimate + half
        if self.reselected and len(self.thetas):
            drawn = middle(function(self.thetas))
            low, high = np.minimum(low, drawn[0]), np.maximum(high, drawn[1])
        for at_limit in function(self.profile):
            low, high = np.fmin(low, at_limit), np.fmax(high, at_limit)
        return np.asarray(low), np.asarray(high)

    def band(self, c: Array | Sequence[float]) -> tuple[Array, Array] | None:
        """Pointwise interval of E at the scales c, made in ln E; None where there is none."""
        if not self.intervals:
            return None
        low, high = self.limits(lambda theta: self.fit.log_predict(c, theta))
        return exp(low), exp(high)

    def percentiles(self) -> dict[str, list[float]]:
        """The middle 95 % of the draws of every parameter: too narrow for an interval, but often published."""
        if not len(self.thetas):
            return {}
        names = self.fit.law.parameters
        return {name: middle(self.parameter(name, self.thetas)).tolist() for name in names}

    def parameter(self, name: str, thetas: Array) -> Array:
        """One parameter of the formula at each theta."""
        fit = self.fit
        return np.asarray(fit.law.natural(thetas, fit.c0, fit.e0)[..., fit.law.parameters.index(name)])


def middle(drawn: Array) -> Array:
    """The ends of the middle LEVEL of draws along the first axis; beside an infinite draw the end is infinite."""
    tail = (1 - LEVEL) / 2
    # A quantile is interpolated, which infinite numbers do not allow and very large ones do.
    ends = np.quantile(np.clip(drawn, -_FAR, _FAR), [tail, 1 - tail], axis=0)
    return np.asarray(np.where(np.abs(ends) > _FAR / 1e50, np.copysign(np.inf, ends), ends))


def degrees_left(runs: int) -> int:
    """Degrees of freedom of a t interval over runs, at least 1: a level and a slope take two.

    Further parameters, such as a floor, widen the jackknife's standard error itself, since it leaves out runs that
    hold them; taking them off once more makes intervals too wide (see coverage).
    """
    return max(1, runs - 2)


def bootstrap(
    points: Points,
    fit: Fit,
    selection: Selection = all_points,
    draws: int = 1000,
    seed: int = 0,
    units: Mapping[str, str] | None = None,
) -> Bootstrap:
    """Leave out and resample the runs of `points` (before selection), select and refit.

    units are the names of the experiments that the runs belong to (see experiments): runs of one, which differ in
    their learning rate only, are left out and drawn together. Without draws (0) runs are only left out, which is all
    that intervals need unless points are selected by their values. The result depends on the seed and the data, not
    on the order of the rows. Raises UserError for draws that are needed and missing, fewer than 100 or more than
    100,000.
    """
    if draws < 100 and (draws or by_value(selection)):
        raise UserError(f"{draws} bootstrap draws are too few for an interval; use at least 100.")
    if draws > _MOST_DRAWS:
        raise UserError(f"{draws} bootstrap draws are too many to hold; use at most {_MOST_DRAWS}.")
    grouped = rows_of_units(points, units)
    rows = list(grouped.values())
    every = range(len(rows))
    spared = selected_points(
        points, fit, selection, [[r for j in every if j != i for r in rows[j]] for i in every]
    )
    complete = len(rows) > 1 and all(spared)
    drawn = drawn_runs(len(rows), draws, seed)
    samples = selected_points(points, fit, selection, [[r for i in runs for r in rows[i]] for runs in drawn])
    counts = [count if sample else 0 for count, sample in zip(drawn.values(), samples, strict=True)]
    thetas = refits(samples, fit)
    found = Bootstrap(
        fit=fit,
        left_out=refits(spared if complete else [], fit),
        thetas=np.repeat(thetas, [count for count in counts if count], axis=0),
        profile=floor_limits(fit, len(rows), _ONE_SIDED)
        if _floor_held(fit)
        else np.empty((0, len(fit.theta))),
        runs=len(rows),
        failed=draws - sum(counts),
        seed=seed,
        reselected=by_value(selection),
        intervals={},
        experiments=() if units is None else tuple(grouped),
    )
    shown = complete and fit.degrees_of_freedom > 0
    return replace(found, intervals=_intervals(found)) if shown else found


def seed_for(name: str, seed: int) -> int:
    """A seed of its own for every group, so that the draws of two groups are independent."""
    return (zlib.crc32(name.encode()) + seed) % 2**32


def _intervals(found: Bootstrap) -> dict[str, Interval]:
    fit = found.fit
    edges = dict(
        zip(fit.law.parameters, zip(*fit.law.bounds(np.log(fit.points.y)), strict=True), strict=True)
    )
    intervals = {}
    for role in fit.law.roles:
        low, high = _parameter_limits(found, role)
        if role.kind in ("exponent", "floor"):  # whose bounds are the same in the units of the data
            low, high = max(low, float(edges[role.name][0])), min(high, float(edges[role.name][1]))
        if role.kind == "shift":
            low = max(low, 0.0)
        intervals[role.name] = Interval(low, high, _identified(fit, role, low, high))
    return intervals


def _parameter_limits(found: Bootstrap, role: Parameter) -> tuple[float, float]:
    def value(theta: Array) -> Array:
        values = found.parameter(role.name, theta)
        return np.log(values) if role.logarithmic else values

    low, high = (float(edge) for edge in found.limits(value))
    return (float(exp(low)), float(exp(high))) if role.logarithmic else (low, high)


def _floor_held(fit: Fit) -> bool:
    """Whether the floor lies on a bound, or so near that the fits without a run may all be there."""
    if fit.law.floor is None:
        return False
    floor, lowest = fit.parameters[fit.law.floor], float(fit.points.y.min())
    return floor < _AT_BOUND * lowest or lowest - floor < _AT_BOUND * lowest


def _identified(fit: Fit, role: Parameter, low: float, high: float) -> bool:
    """Whether an interval tells something.

    An exponent or a shift: it excludes 0 and is narrower than twice the estimate. A floor: it is narrower than half
    of the lowest observed value. What is positive: it spans less than a factor of 100.
    """
    if not (math.isfinite(low) and math.isfinite(high)):
        return False
    if role.kind == "floor":
        return high - low < 0.5 * float(fit.points.y.min())
    if role.logarithmic:
        return low > 0 and high / low < 100
    return low * high > 0 and high - low < 2 * abs(fit.parameters[role.name])
