"""Do two groups scale differently? Differences of exponents and ratios with intervals over runs, and a verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from openclip_scaling.comparing.difference import Function, difference_of, paired_runs
from openclip_scaling.comparing.equal_loss import EqualLoss, equal_loss
from openclip_scaling.comparing.verdict import excludes, verdict
from openclip_scaling.errors import UserError
from openclip_scaling.fitting.uncertainty import Bootstrap
from openclip_scaling.forms.law import Array, exp


@dataclass(frozen=True)
class Comparison:
    """Two groups under one law, by one of its exponents.

    difference is the exponent of `first` minus that of `second`; ratio is the predicted metric of `first` over that
    of `second` at `scale`, the largest that both reached (two numbers for a law of two scales). equal_losses are how
    much more scale `first` needs than `second` for the same metric, one for every level. Intervals are None where
    either group has none. pairs is how many experiments of both correspond and were left out together. No correction
    is made for the number of pairs of groups.
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
    pairs: int
    reliable: bool
    verdict: str
    equal_losses: tuple[EqualLoss, ...]

    @property
    def distinguishable(self) -> bool:
        """True only when the interval excludes 0 and both groups have enough runs."""
        return self.reliable and excludes(self.interval, 0.0)

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready numbers."""
        return {
            "first": self.first,
            "second": self.second,
            "law": self.law,
            "exponent_difference": self.difference,
            "interval95": self.interval,
            "predicted_ratio": self.ratio,
            "ratio_interval95": self.ratio_interval,
            "equal_loss": [item.as_dict() for item in self.equal_losses],
            "exponent": self.exponent,
            "scale": self.scale[0] if len(self.scale) == 1 else self.scale,
            "runs": self.runs,
            "pairs": self.pairs,
            "reliable": self.reliable,
            "distinguishable": self.distinguishable,
            "verdict": self.verdict,
        }


def compare_groups(fits: Mapping[str, Bootstrap], levels: Sequence[float] = ()) -> list[Comparison]:
    """Every pair of groups, in the order given, by every exponent. All must have been fitted with one law.

    levels are those of the metric at which the scales are compared; without any, the best that both reach.
    """
    laws = {boot.fit.law.name: boot.fit.law for boot in fits.values()}
    if len(laws) > 1:
        raise UserError("Only fits of one law can be compared.")
    names = [name for law in laws.values() for name in law.exponents]
    return [_compare(pair, name, fits, levels) for pair in combinations(fits, 2) for name in names]


def _compare(
    pair: tuple[str, str], exponent: str, fits: Mapping[str, Bootstrap], levels: Sequence[float]
) -> Comparison:
    a, b = boots = fits[pair[0]], fits[pair[1]]
    scale = np.minimum(a.fit.points.x.max(axis=0), b.fit.points.x.max(axis=0))
    exponents = [_exponent(boot, exponent) for boot in boots]
    predictions = [_log_metric(boot, scale) for boot in boots]
    difference, log_ratio = (
        float(first(a.fit.theta) - second(b.fit.theta)) for first, second in (exponents, predictions)
    )
    interval = ratio_interval = None
    if a.intervals and b.intervals:
        own = [(boot.intervals[exponent].low, boot.intervals[exponent].high) for boot in boots]
        interval = difference_of(boots, exponents, own)
        low, high = difference_of(boots, predictions)
        ratio_interval = float(exp(low)), float(exp(high))
    pairs = len(paired_runs(boots))
    reached = [equal_loss(boots, level) for level in levels or (None,)]
    return Comparison(
        first=pair[0],
        second=pair[1],
        law=a.fit.law.name,
        exponent=exponent,
        difference=difference,
        interval=interval,
        ratio=float(exp(log_ratio)),
        ratio_interval=ratio_interval,
        scale=tuple(np.atleast_1d(scale).tolist()),
        runs=(a.runs, b.runs),
        pairs=pairs,
        reliable=a.reliable and b.reliable,
        verdict=verdict(pair, exponent, interval, boots, pairs),
        equal_losses=tuple(item for item in reached if item),
    )


def _exponent(boot: Bootstrap, name: str) -> Function:
    return lambda theta: boot.parameter(name, theta)


def _log_metric(boot: Bootstrap, scale: Array) -> Function:
    return lambda theta: boot.fit.log_predict(scale[None], theta)[..., 0]
