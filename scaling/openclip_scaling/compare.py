"""Do two groups scale differently? Differences of exponents with a bootstrap interval, and a verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from scipy import stats

from openclip_scaling.errors import UserError
from openclip_scaling.laws import Array
from openclip_scaling.points import Points
from openclip_scaling.uncertainty import LEVEL, MINIMUM_RUNS, Bootstrap, spread


@dataclass(frozen=True)
class Comparison:
    """Two groups under one law.

    difference is the exponent of `first` minus that of `second`; ratio is the predicted metric of `first`
    over that of `second` at `scale`, the largest scale that both reached. Intervals are None where either
    group has none. No correction is made for the number of pairs.
    """

    first: str
    second: str
    law: str
    difference: float
    interval: tuple[float, float] | None
    ratio: float
    ratio_interval: tuple[float, float] | None
    scale: float
    runs: tuple[int, int]
    reliable: bool
    verdict: str

    @property
    def distinguishable(self) -> bool:
        """True only when the interval excludes 0 and both groups have enough runs."""
        return self.reliable and _excludes(self.interval, 0.0)


def compare_groups(fits: Mapping[str, Bootstrap]) -> list[Comparison]:
    """Every pair of groups, in the order given. All must have been fitted with one law."""
    if len({boot.fit.law.name for boot in fits.values()}) > 1:
        raise UserError("Only fits of one law can be compared.")
    return [_compare(first, second, fits) for first, second in combinations(fits, 2)]


def _compare(first: str, second: str, fits: Mapping[str, Bootstrap]) -> Comparison:
    a, b = fits[first], fits[second]
    difference = a.fit.parameters["a"] - b.fit.parameters["a"]
    scale = float(min(a.fit.points.x.max(), b.fit.points.x.max()))
    at = np.array([scale])
    log_ratio = float(np.log(a.fit.predict(at)[0] / b.fit.predict(at)[0]))
    interval = log_interval = None
    if a.intervals and b.intervals:
        runs = (a.runs, b.runs)
        interval = _interval(difference, a.values("a"), b.values("a"), runs)
        logs = (np.log(a.predictions(at)[:, 0]), np.log(b.predictions(at)[:, 0]))
        log_interval = _interval(log_ratio, *logs, runs)
    reliable = a.reliable and b.reliable
    return Comparison(
        first=first,
        second=second,
        law=a.fit.law.name,
        difference=difference,
        interval=interval,
        ratio=math.exp(log_ratio),
        ratio_interval=None
        if log_interval is None
        else (math.exp(log_interval[0]), math.exp(log_interval[1])),
        scale=scale,
        runs=(a.runs, b.runs),
        reliable=reliable,
        verdict=_verdict(first, second, difference, interval, (a, b)),
    )


def _interval(estimate: float, first: Array, second: Array, runs: tuple[int, int]) -> tuple[float, float]:
    """Hull of percentiles of paired independent draws and of a t interval with Welch's degrees of freedom."""
    n = min(len(first), len(second))
    # Equal multisets of runs stand side by side in the draws; a fixed shuffle makes the pairs independent.
    shuffle = np.random.default_rng(0)
    pairs = shuffle.permutation(first)[:n] - shuffle.permutation(second)[:n]
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(pairs, [tail, 1 - tail])
    variances = [float(spread(d, r)) ** 2 for d, r in zip((first, second), runs, strict=True)]
    total = sum(variances)
    if total == 0:
        return float(low), float(high)
    degrees = total**2 / sum(v**2 / (r - 1) for v, r in zip(variances, runs, strict=True))
    half = float(stats.t.ppf(1 - tail, degrees)) * math.sqrt(total)
    return min(float(low), estimate - half), max(float(high), estimate + half)


def _excludes(interval: tuple[float, float] | None, value: float) -> bool:
    return interval is not None and not interval[0] <= value <= interval[1]


def _verdict(
    first: str,
    second: str,
    difference: float,
    interval: tuple[float, float] | None,
    boots: tuple[Bootstrap, Bootstrap],
) -> str:
    pair, runs = f"{first} and {second}", _runs(boots)
    named = list(zip((first, second), boots, strict=True))
    bare = [name for name, boot in named if not boot.intervals]
    if bare or interval is None:
        return f"{pair}: no verdict with {runs}; no interval for {' and '.join(bare)}."
    unclear = [name for name, boot in named if not boot.intervals["a"].identified]
    form = "exponents of {} are" if len(unclear) > 1 else "exponent of {} is"
    unclear_text = f"the {form.format(' and '.join(unclear))} not identified" if unclear else ""
    differ = _excludes(interval, 0.0)
    if not all(boot.reliable for boot in boots):
        seen = "the exponents differ on these points" if differ else "not distinguishable"
        found = unclear_text or seen
        return (
            f"{pair}: {found}, with {runs}; intervals from fewer than {MINIMUM_RUNS} runs are not reliable."
        )
    if unclear:
        return f"{pair}: no verdict; {unclear_text}."
    if differ:
        low, high = (first, second) if difference < 0 else (second, first)
        rising = all(boot.fit.parameters["a"] > 0 for boot in boots)
        how = f"{high} rises faster" if rising else f"{low} falls faster"
        return f"{pair}: different; {how} with scale ({runs})."
    return f"{pair}: not distinguishable with {runs}."


def _runs(boots: tuple[Bootstrap, Bootstrap]) -> str:
    first, second = (boot.runs for boot in boots)
    if first == second:
        return f"{first} run{'s' if first > 1 else ''} each"
    return f"{first} and {second} runs"


@dataclass(frozen=True)
class SlopeTest:
    """F test that power laws of several groups have one exponent."""

    f: float
    degrees: tuple[int, int]
    p: float


def equal_slopes_test(groups: Mapping[str, Points]) -> SlopeTest:
    """Analysis of covariance in logs: separate lines against separate levels with one slope.

    It takes points as independent with equal noise. Checkpoints of one run are not, and points selected for
    being low are not either, so its p-value is then too small; prefer the bootstrap comparison.
    """
    if len(groups) < 2:
        raise UserError("A comparison of slopes needs at least two groups.")
    products, squares, own = 0.0, 0.0, 0.0
    within, points = 0.0, 0
    for group in groups.values():
        u, v = np.log(group.x), np.log(group.y)
        u, v = u - u.mean(), v - v.mean()
        sxx, sxy, syy = float(u @ u), float(u @ v), float(v @ v)
        if sxx == 0:
            raise UserError("A group whose points lie at one scale has no slope.")
        products, squares, within = products + sxy, squares + sxx, within + syy
        own += syy - sxy**2 / sxx
        points += len(group)
    degrees = (len(groups) - 1, points - 2 * len(groups))
    if degrees[1] < 1 or own <= 0:
        raise UserError("There are too few points for a test of slopes.")
    common = within - products**2 / squares
    f = (common - own) / degrees[0] / (own / degrees[1])
    return SlopeTest(f=f, degrees=degrees, p=float(stats.f.sf(f, *degrees)))
