"""The best model size and number of samples for a budget, under a law of two scales.

With FLOP = k N D, the minimum of A / N^alpha + B / D^beta lies where alpha A / N^alpha = beta B / D^beta (Hoffmann et
al. 2022, eq. 4). Model size and samples are taken in logs for their intervals.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from openclip_scaling.errors import UserError
from openclip_scaling.law import Array
from openclip_scaling.uncertainty import Bootstrap


def best_split(boot: Bootstrap, budget: float, factor: float) -> dict[str, Any]:
    """The split of `budget` = factor x first x second with the lowest predicted metric, JSON-ready.

    first and second are the scales; growth is the exponent of the first in the budget. Intervals are None where
    the fit has none. Raises UserError for a law of one scale, and for numbers that are not positive.
    """
    law = boot.fit.law
    if law.scales != 2:
        raise UserError(
            f"The law {law.name} has one scale, so there is nothing to split; use chinchilla or tied."
        )
    for name, value in (("budget", budget), ("flop-factor", factor)):
        if not (math.isfinite(value) and value > 0):
            raise UserError(f"--{name} must be a positive number, not {value:g}.")

    def found(theta: Array) -> Array:
        return _log_first(boot, theta, math.log(budget / factor))

    def predicted(theta: Array) -> Array:
        first = found(theta)
        scales = np.exp(np.stack([first, math.log(budget / factor) - first], axis=-1))
        return np.log(boot.fit.predict(scales[..., None, :], theta))[..., 0]

    log_first = float(found(boot.fit.theta))
    both = math.log(budget / factor)
    result: dict[str, Any] = {
        "budget": budget,
        "first": math.exp(log_first),
        "second": math.exp(both - log_first),
        "predicted": math.exp(float(predicted(boot.fit.theta))),
        "growth": float(_growth(boot, boot.fit.theta)),
        "first_interval95": None,
        "second_interval95": None,
        "predicted_interval95": None,
        "growth_interval95": None,
        "reliable": boot.reliable,
    }
    if boot.intervals:
        low, high = (float(edge) for edge in boot.limits(found))
        result["first_interval95"] = _exp(low), _exp(high)
        result["second_interval95"] = _exp(both - high), _exp(both - low)
        result["predicted_interval95"] = tuple(_exp(float(edge)) for edge in boot.limits(predicted))
        result["growth_interval95"] = tuple(
            float(edge) for edge in boot.limits(lambda theta: _growth(boot, theta))
        )
    return result


def _exponents(boot: Bootstrap, theta: Array) -> tuple[Array, Array]:
    names = boot.fit.law.exponents
    return boot.parameter(names[0], theta), boot.parameter(names[-1], theta)


def _growth(boot: Bootstrap, theta: Array) -> Array:
    """d ln N / d ln FLOP along the best splits."""
    alpha, beta = _exponents(boot, theta)
    return np.asarray(beta / (alpha + beta))


def _log_first(boot: Bootstrap, theta: Array, log_product: float) -> Array:
    alpha, beta = _exponents(boot, theta)
    amplitudes = np.log(alpha * boot.parameter("A", theta)) - np.log(beta * boot.parameter("B", theta))
    return np.asarray((amplitudes + beta * log_product) / (alpha + beta))


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))
