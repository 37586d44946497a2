"""What two groups need to be equally good: the scales at which their fitted curves reach one value of the metric."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from openclip_scaling.comparing.difference import Function, difference_of
from openclip_scaling.fitting.uncertainty import Bootstrap
from openclip_scaling.forms.law import Array, exp

_FARTHEST = 300.0  # of ln C from the middle of the points, where the search ends
_HALVINGS = 60


@dataclass(frozen=True)
class EqualLoss:
    """How much more scale the first of two groups needs than the second for the metric `level`.

    scales are what each needs, infinite where its curve never comes so low. ratio is first over second, None where
    it is not defined; interval is None where one of the groups has none. beyond says for each by how many decades
    its scale lies outside of its points.
    """

    level: float
    scales: tuple[float, float]
    ratio: float | None
    interval: tuple[float, float] | None
    beyond: tuple[float, float]

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready numbers."""
        return {
            "level": self.level,
            "scales": self.scales,
            "ratio": self.ratio,
            "interval95": self.interval,
            "decades_beyond": self.beyond,
        }


def equal_loss(boots: Sequence[Bootstrap], level: float | None = None) -> EqualLoss | None:
    """Two groups at one level; without it at the best that the curves of both reach inside their points.

    None for a law of two scales, and where a fitted curve does not fall.
    """
    if boots[0].fit.law.scales > 1 or not all(_falls(boot) for boot in boots):
        return None
    if level is None:
        level = max(float(boot.fit.predict(boot.fit.points.x.max()[None])[0]) for boot in boots)
    scales = [exp(log_scale_at(boot, level, boot.fit.theta)) for boot in boots]
    known = all(0 < scale < math.inf for scale in scales)
    interval = None
    if known and all(boot.intervals for boot in boots):
        first, second = (_reaching(boot, level) for boot in boots)
        low, high = difference_of(boots, (first, second))
        interval = float(exp(low)), float(exp(high))
    return EqualLoss(
        level=level,
        scales=(float(scales[0]), float(scales[1])),
        ratio=float(scales[0] / scales[1]) if known else None,
        interval=interval,
        beyond=(_beyond(boots[0], scales[0]), _beyond(boots[1], scales[1])),
    )


def _reaching(boot: Bootstrap, level: float) -> Function:
    return lambda theta: log_scale_at(boot, level, theta)


def _falls(boot: Bootstrap) -> bool:
    x = boot.fit.points.x
    first, last = boot.fit.log_predict(np.array([x.min(), x.max()]))
    return bool(last < first)


def log_scale_at(boot: Bootstrap, level: float, theta: Array) -> Array:
    """ln C at which the curve of each theta falls to `level`: infinite where it stays above, -infinite where below."""
    fit = boot.fit
    target = math.log(level / fit.e0)
    low = np.full((*theta.shape[:-1], 1), -_FARTHEST)
    high = -low
    above, below = (fit.law.log_predict(theta, edge) > target for edge in (low, high))
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        over = fit.law.log_predict(theta, middle) > target
        low, high = np.where(over, middle, low), np.where(over, high, middle)
    found = np.where(below, np.inf, np.where(above, (low + high) / 2, -np.inf))[..., 0]
    return np.asarray(found + math.log(fit.c0[0]))


def _beyond(boot: Bootstrap, scale: Array) -> float:
    x = boot.fit.points.x
    with np.errstate(divide="ignore"):
        logs = np.log10([x.min(), x.max(), scale])
    return max(0.0, float(logs[0] - logs[2]), float(logs[2] - logs[1]))
