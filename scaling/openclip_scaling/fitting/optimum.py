"""The best model size and number of samples for a budget, under a law of two scales.

With FLOP = k N D, the minimum of A / N^alpha + B / D^beta lies where alpha A / N^alpha = beta B / D^beta (Hoffmann et
al. 2022, eq. 4). Model size and samples are taken in logs for their intervals.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from openclip_scaling.errors import UserError
from openclip_scaling.fitting.uncertainty import Bootstrap
from openclip_scaling.forms.law import Array, exp


def best_split(boot: Bootstrap, budget: float, factor: float) -> dict[str, Any]:
    """The split of `budget` = factor x first x second with the lowest predicted metric, JSON-ready.

    first and second are the scales; growth is the exponent of the first in the budget. Intervals are None where
    the fit has none. Raises UserError for a law of one scale, for numbers that are not positive, and where no split
    is best because the metric does not fall with one of the scales.
    """
    law = boot.fit.law
    if law.scales != 2:
        raise UserError(
            f"The law {law.name} has one scale, so there is nothing to split; use chinchilla or tied."
        )
    check_budgets([budget], factor)
    both = math.log(budget) - math.log(factor)

    def found(theta: Array) -> Array:
        return _log_first(boot, theta, both)

    def predicted(theta: Array) -> Array:
        first = found(theta)
        centred = np.stack([first, both - first], axis=-1) - np.log(boot.fit.c0)
        with np.errstate(over="ignore", invalid="ignore"):
            return math.log(boot.fit.e0) + law.log_predict(theta, centred[..., None, :])[..., 0]

    first, value = float(found(boot.fit.theta)), float(predicted(boot.fit.theta))
    if not all(map(math.isfinite, (float(exp(first)), float(exp(both - first)), value))):
        raise UserError(
            "The fitted metric does not fall with both scales, so no split of a budget is the best."
        )
    result: dict[str, Any] = {
        "budget": budget,
        "first": math.exp(first),
        "second": math.exp(both - first),
        "predicted": float(exp(value)),
        "growth": float(_growth(boot, boot.fit.theta)),
        "first_interval95": None,
        "second_interval95": None,
        "predicted_interval95": None,
        "growth_interval95": None,
        "reliable": boot.reliable,
    }
    if boot.intervals:
        low, high = boot.limits(found)
        result["first_interval95"] = float(exp(low)), float(exp(high))
        result["second_interval95"] = float(exp(both - high)), float(exp(both - low))
        low, high = boot.limits(predicted)
        result["predicted_interval95"] = float(exp(low)), float(exp(high))
        low, high = boot.limits(lambda theta: _growth(boot, theta))
        result["growth_interval95"] = max(0.0, float(low)), min(1.0, float(high))
    return result


def check_budgets(budgets: Sequence[float], factor: float) -> None:
    """Raise UserError for numbers that are not positive."""
    for name, value in (*(("budget", budget) for budget in budgets), ("flop-factor", factor)):
        if not (math.isfinite(value) and value > 0):
            raise UserError(f"--{name} must be a positive number, not {value:g}.")


def _exponents(boot: Bootstrap, theta: Array) -> tuple[Array, Array]:
    names = boot.fit.law.exponents
    return boot.parameter(names[0], theta), boot.parameter(names[-1], theta)


def _growth(boot: Bootstrap, theta: Array) -> Array:
    """d ln N / d ln FLOP along the best splits; NaN where neither scale matters."""
    alpha, beta = _exponents(boot, theta)
    with np.errstate(invalid="ignore"):
        return np.asarray(beta / (alpha + beta))


def _log_first(boot: Bootstrap, theta: Array, log_product: float) -> Array:
    """ln of the best first scale; infinite or NaN where the metric does not fall with a scale."""
    alpha, beta = _exponents(boot, theta)
    with np.errstate(divide="ignore", invalid="ignore"):
        amplitudes = np.log(alpha * boot.parameter("A", theta)) - np.log(beta * boot.parameter("B", theta))
        return np.asarray((amplitudes + beta * log_product) / (alpha + beta))
