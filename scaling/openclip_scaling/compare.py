"""Do two groups scale differently? Differences of exponents with an interval over runs, and a verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from scipy import stats

from openclip_scaling.errors import UserError
from openclip_scaling.law import Array, exp
from openclip_scaling.points import Points
from openclip_scaling.uncertainty import LEVEL, MINIMUM_RUNS, Bootstrap


@dataclass(frozen=True)
class Comparison:
    """Two groups under one law, by one of its exponents.

    difference is the exponent of `first` minus that of `second`; ratio is the predicted metric of `first` over that
    of `second` at `scale`, the largest that both reached (two numbers for a law of two scales). Intervals are None
    where either group has none. No correction is made for the number of pairs.
    """

    first: str
    second: str
    law: str
    exponent: str
    difference: float
    interval: tuple[float, float] | None
    ratio: float
    ratio_interval: tuple[float, float] | None
    scale: tuple[float, ...]
    runs: tuple[int, int]
    reliable: bool
    verdict: str

    @property
    def distinguishable(self) -> bool:
        """True only when the interval excludes 0 and both groups have enough runs."""
        return self.reliable and _excludes(self.interval, 0.0)


def compare_groups(fits: Mapping[str, Bootstrap]) -> list[Comparison]:
    """Every pair of groups, in the order given, by every exponent. All must have been fitted with one law."""
    laws = {boot.fit.law.name: boot.fit.law for boot in fits.values()}
    if len(laws) > 1:
        raise UserError("Only fits of one law can be compared.")
    names = [name for law in laws.values() for name in law.exponents]
    return [_compare(pair, name, fits) for pair in combinations(fits, 2) for name in names]


def _compare(pair: tuple[str, str], exponent: str, fits: Mapping[str, Bootstrap]) -> Comparison:
    a, b = boots = fits[pair[0]], fits[pair[1]]
    scale = np.minimum(a.fit.points.x.max(axis=0), b.fit.points.x.max(axis=0))
    logs = [float(boot.fit.log_predict(scale[None])[0]) for boot in boots]
    values = [boot.fit.parameters[exponent] for boot in boots]
    interval = ratio_interval = None
    if a.intervals and b.intervals:
        own = [boot.intervals[exponent] for boot in boots]
        degrees = [boot.degrees for boot in boots]
        interval = difference_limits(values, [(one.low, one.high) for one in own], degrees)
        low, high = difference_limits(logs, [_log_limits(boot, scale) for boot in boots], degrees)
        ratio_interval = float(exp(low)), float(exp(high))
    difference = values[0] - values[1]
    return Comparison(
        first=pair[0],
        second=pair[1],
        law=a.fit.law.name,
        exponent=exponent,
        difference=difference,
        interval=interval,
        ratio=float(exp(logs[0] - logs[1])),
        ratio_interval=ratio_interval,
        scale=tuple(np.atleast_1d(scale).tolist()),
        runs=(a.runs, b.runs),
        reliable=a.reliable and b.reliable,
        verdict=_verdict(pair, exponent, interval, boots),
    )


def _log_limits(boot: Bootstrap, scale: Array) -> tuple[float, float]:
    low, high = boot.limits(lambda theta: boot.fit.log_predict(scale[None], theta)[..., 0])
    return float(low), float(high)


def difference_limits(
    estimates: Sequence[float], intervals: Sequence[tuple[float, float]], degrees: Sequence[int]
) -> tuple[float, float]:
    """The interval of first minus second from their own t intervals, with Welch's degrees of freedom.

    Each side is made of the sides of the two that lead there (Zou and Donner 2008), so that what widens one of the
    intervals, such as a floor that is not known, widens the difference.
    """
    (first, second), ((low1, high1), (low2, high2)) = estimates, intervals
    down = _together((first - low1, high2 - second), degrees)
    up = _together((high1 - first, second - low2), degrees)
    return first - second - down, first - second + up


def _together(sides: Sequence[float], degrees: Sequence[int]) -> float:
    """One side of a t interval for a sum, from those of its two parts."""
    tail = (1 + LEVEL) / 2
    variances = [(side / float(stats.t.ppf(tail, d))) ** 2 for side, d in zip(sides, degrees, strict=True)]
    total, spread = sum(variances), sum(v**2 / d for v, d in zip(variances, degrees, strict=True))
    if not (math.isfinite(total) and spread > 0):
        return math.hypot(*sides)
    return float(stats.t.ppf(tail, total**2 / spread)) * math.sqrt(total)


def _excludes(interval: tuple[float, float] | None, value: float) -> bool:
    return interval is not None and not interval[0] <= value <= interval[1]


def _verdict(
    names: tuple[str, str],
    exponent: str,
    interval: tuple[float, float] | None,
    boots: tuple[Bootstrap, Bootstrap],
) -> str:
    pair, runs = " and ".join(names), _runs(boots)
    law = boots[0].fit.law
    if len(law.exponents) > 1:
        pair += f" ({exponent})"
    named = list(zip(names, boots, strict=True))
    bare = [name for name, boot in named if not boot.intervals]
    if bare or interval is None:
        return f"{pair}: no verdict with {runs}; no interval for {' and '.join(bare)}."
    unclear = [name for name, boot in named if not boot.intervals[exponent].identified]
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
        slopes = [law.rising * boot.fit.parameters[exponent] for boot in boots]
        low, high = names if slopes[0] < slopes[1] else names[::-1]
        how = f"{high} rises faster" if min(slopes) > 0 else f"{low} falls faster"
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
        if group.scales > 1:
            raise UserError("The test of slopes takes points of one scale.")
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
