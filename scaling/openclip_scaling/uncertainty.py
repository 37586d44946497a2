"""Intervals by resampling whole runs, and an honest word about what they are worth.

The checkpoints of one run share its seed, data order and schedule, so runs are drawn with replacement and all
their checkpoints with them; a selection such as the frontier is made again in every draw.

With few runs the percentile interval of a bootstrap is too narrow: the draws can only mix the runs at hand.
The interval given here is therefore the hull of the percentile interval and of estimate +- t(G - 1) x s, where
s is half the central 68 % of the draws times sqrt(G / (G - 1)) for G runs. Where every point is a run of its own
and the fit is by least squares, the ordinary t interval of the regression is taken in too; for a law with a
floor, so is its profile (see profile), since resamples that all sit on a bound show no spread. A curve that passes
through all points has no interval. Below MINIMUM_RUNS even that is no more than a hint, and is marked as not
reliable.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from dataclasses import dataclass

import numpy as np
from scipy import stats

from openclip_scaling.errors import UserError
from openclip_scaling.fit import Fit, predict_centred, refit
from openclip_scaling.laws import Array
from openclip_scaling.points import Points, Selection, all_points
from openclip_scaling.profile import floor_limits

MINIMUM_RUNS = 5
LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """Bounds of one parameter at LEVEL; identified is False where they leave the parameter open."""

    low: float
    high: float
    identified: bool


@dataclass(frozen=True)
class Bootstrap:
    """Refits of one fit to resampled runs.

    thetas has shape (draws that could be fitted, parameters), centred like the fit. failed counts the draws
    with too few different scales. reliable is False below MINIMUM_RUNS runs. intervals is empty for a single
    run, and where the curve passes through all points.
    """

    fit: Fit
    thetas: Array
    runs: int
    failed: int
    seed: int
    intervals: dict[str, Interval]

    @property
    def reliable(self) -> bool:
        return self.runs >= MINIMUM_RUNS and bool(self.intervals)

    @property
    def notice(self) -> str | None:
        """Why the intervals are not to be relied on, or None."""
        if not self.intervals:
            if self.runs < 2:
                return "no interval: one run does not show how runs differ"
            if self.fit.degrees_of_freedom < 1:
                return "no interval: a curve through all points shows no scatter"
            return f"no interval: most resamples of {self.runs} runs have too few different scales"
        if not self.reliable:
            return f"the intervals are not reliable with {self.runs} runs (fewer than {MINIMUM_RUNS})"
        return None

    def values(self, name: str) -> Array:
        """The draws of one parameter of the formula."""
        fit = self.fit
        return np.array([fit.law.natural(theta, fit.c0, fit.e0)[name] for theta in self.thetas])

    def predictions(self, c: Array) -> Array:
        """E at the scales c for every draw, shape (draws, scales)."""
        fit = self.fit
        return np.array([predict_centred(fit.law, theta, fit.c0, fit.e0, c) for theta in self.thetas])

    def band(self, c: Array) -> tuple[Array, Array] | None:
        """Pointwise interval of E at the scales c, made like the intervals in ln E; None for a single run."""
        if not self.intervals:
            return None
        draws = np.log(self.predictions(c))
        centre = np.log(self.fit.predict(c))
        low, high = hull(centre, draws, self.runs)
        with np.errstate(over="ignore"):  # an open interval may end beyond every number
            return np.exp(low), np.exp(high)


def bootstrap(
    points: Points, fit: Fit, selection: Selection = all_points, draws: int = 1000, seed: int = 0
) -> Bootstrap:
    """Resample the runs of `points` (before selection), select and refit. Raises UserError when draws < 100.

    The result depends on the seed and the data, not on the order of the rows.
    """
    if draws < 100:
        raise UserError(f"{draws} bootstrap draws are too few for an interval; use at least 100.")
    names = points.runs
    rows = {name: [i for i, run in enumerate(points.run) if run == name] for name in names}
    thetas: list[Array] = []
    failed = 0
    for chosen, count in _draws(len(names), draws, seed).items():
        sample = points.take([row for index in chosen for row in rows[names[index]]])
        try:
            theta = refit(selection(sample), fit)
        except UserError:
            failed += count
            continue
        thetas += [theta] * count
    array = np.array(thetas).reshape(len(thetas), len(fit.law.parameters))
    found = Bootstrap(fit, array, len(names), failed, seed, {})
    usable = len(names) > 1 and fit.degrees_of_freedom > 0 and len(thetas) >= draws / 2
    return Bootstrap(fit, array, len(names), failed, seed, _intervals(found) if usable else {})


def _draws(runs: int, draws: int, seed: int) -> Counter[tuple[int, ...]]:
    """How often each multiset of runs is drawn: with few runs there are few, and each is fitted once."""
    generator = np.random.default_rng(seed)
    picked = np.sort(generator.integers(runs, size=(draws, runs)), axis=1)
    return Counter(tuple(int(i) for i in row) for row in picked)


def seed_for(name: str, seed: int) -> int:
    """A seed of its own for every group, so that the draws of two groups are independent."""
    return (zlib.crc32(name.encode()) + seed) % 2**32


def hull(centre: Array, draws: Array, runs: int) -> tuple[Array, Array]:
    """The wider of the percentile and the t interval, along the first axis of draws."""
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(draws, [tail, 1 - tail], axis=0)
    half = stats.t.ppf(1 - tail, runs - 1) * spread(draws, runs)
    return np.minimum(low, centre - half), np.maximum(high, centre + half)


def spread(draws: Array, runs: int) -> Array:
    """Standard error from draws of `runs` runs: half their central 68 %, times sqrt(G / (G - 1)).

    Quantiles, because a draw of a few points at nearly one scale can have any exponent, and would rule a
    standard deviation.
    """
    low, high = np.quantile(draws, [0.1587, 0.8413], axis=0)
    return np.asarray((high - low) / 2 * math.sqrt(runs / (runs - 1)))


def _intervals(found: Bootstrap) -> dict[str, Interval]:
    fit = found.fit
    intervals = {}
    limits = [fit.law.natural(theta, fit.c0, fit.e0) for theta in floor_limits(fit, found.runs, LEVEL)]
    for name in fit.law.parameters:
        estimate = fit.parameters[name]
        draws = found.values(name)
        if name == "b":  # positive, and over many decades: in logs
            with np.errstate(over="ignore"):  # infinity is "not identified"
                low, high = np.exp(hull(np.log(estimate), np.log(draws), found.runs))
        else:
            low, high = hull(np.array(estimate), draws, found.runs)
        low, high = _with_regression(found, name, float(low), float(high))
        low, high = min([low, *(at[name] for at in limits)]), max([high, *(at[name] for at in limits)])
        if name == "E0":
            low, high = max(low, 0.0), min(high, float(fit.points.y.min()))
        if name == "a" and fit.law.name != "power":
            high = min(high, 0.0)
        intervals[name] = Interval(low, high, _identified(fit, name, low, high))
    return intervals


def _with_regression(found: Bootstrap, name: str, low: float, high: float) -> tuple[float, float]:
    """Take in the t interval of the regression where points are independent runs fitted by least squares."""
    fit = found.fit
    independent = len(set(fit.points.run)) == len(fit.points)
    if fit.loss.delta is not None or not independent or fit.standard_errors is None or name == "b":
        return low, high
    half = stats.t.ppf((1 + LEVEL) / 2, fit.degrees_of_freedom) * fit.standard_errors[name]
    return min(low, fit.parameters[name] - half), max(high, fit.parameters[name] + half)


def _identified(fit: Fit, name: str, low: float, high: float) -> bool:
    """An exponent is identified when its interval excludes 0 and is narrower than twice its size.

    A floor is identified when its interval is narrower than half of the lowest observed value; an amplitude
    when its interval spans less than a factor of 100.
    """
    if not (math.isfinite(low) and math.isfinite(high)):
        return False
    if name == "a":
        return low * high > 0 and high - low < 2 * abs(fit.parameters["a"])
    if name == "E0":
        return high - low < 0.5 * float(fit.points.y.min())
    return low > 0 and high / low < 100
