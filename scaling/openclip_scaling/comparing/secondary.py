"""Secondary tests beside the verdict: do several groups share an exponent, or the whole law? F tests and AICc.

Least squares of ln E. Three models are fitted to all points: a law of its own for every group, laws with one
exponent, and one law for all. For the power law the first test is the analysis of covariance. Points are taken as
independent with equal noise, which checkpoints of one run, and points selected for being low, are not: the p values
are then too small, and AICc favours the larger model. The verdict is that of the intervals over runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from openclip_scaling.errors import UserError
from openclip_scaling.fitting.fit import Fit, fit_law
from openclip_scaling.fitting.loss import Loss
from openclip_scaling.fitting.points import Points
from openclip_scaling.fitting.profile import best_with
from openclip_scaling.forms.law import Law
from openclip_scaling.forms.laws import LAWS

_STEPS, _ROUNDS = 32, 3  # of the search for the common exponent, each round within two steps of the last


@dataclass(frozen=True)
class FTest:
    """The F statistic of a model with fewer parameters, its degrees of freedom and p value."""

    f: float
    degrees: tuple[int, int]
    p: float

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready numbers."""
        return {"F": self.f, "df": self.degrees, "p": self.p}


@dataclass(frozen=True)
class SecondaryTests:
    """Under one law: tests against laws of their own for all groups, and AICc of the three models.

    aicc is less that of separate laws, so that below 0 the simpler model is the better one; None where there are
    too few points.
    """

    law: str
    groups: tuple[str, ...]
    equal_exponents: FTest
    one_law: FTest
    aicc_shared_exponent: float | None
    aicc_one_law: float | None

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready numbers."""
        return {
            "law": self.law,
            "groups": self.groups,
            "equal_exponents": self.equal_exponents.as_dict(),
            "one_law": self.one_law.as_dict(),
            "aicc_over_separate": {
                "shared exponent": self.aicc_shared_exponent,
                "one law": self.aicc_one_law,
            },
        }


def equal_slopes_test(groups: Mapping[str, Points]) -> FTest:
    """Analysis of covariance in logs: separate lines against separate levels with one slope."""
    return secondary_tests(groups, LAWS["power"]).equal_exponents


def secondary_tests(groups: Mapping[str, Points], law: Law) -> SecondaryTests:
    """Tests of one law of one scale and one exponent for two groups or more.

    Raises UserError for other laws, and where there are too few points, or curves through all of them.
    """
    if len(groups) < 2:
        raise UserError("A comparison of slopes needs at least two groups.")
    if law.scales > 1 or len(law.exponents) != 1:
        raise UserError(f"The tests of equal exponents take laws of one exponent, which {law.name} is not.")
    fits = [fit_law(points, law, Loss()) for points in groups.values()]
    points, parameters = sum(len(fit.points) for fit in fits), len(law.parameters)
    own, count = sum(fit.objective for fit in fits), len(fits) * parameters
    if points <= count or any(fit.aic is None for fit in fits):
        raise UserError("There are too few points for a test of slopes.")
    shared, one = _with_one_exponent(fits), fit_law(_pooled(list(groups.values())), law, Loss()).objective
    # The same optimum is met up to rounding only.
    shared, one = max(shared, own), max(one, own)
    separate = _aicc(own, points, count)
    return SecondaryTests(
        law=law.name,
        groups=tuple(groups),
        equal_exponents=_f_test(shared, own, len(fits) - 1, points - count),
        one_law=_f_test(one, own, count - parameters, points - count),
        aicc_shared_exponent=_less(_aicc(shared, points, count - len(fits) + 1), separate),
        aicc_one_law=_less(_aicc(one, points, parameters), separate),
    )


def _f_test(smaller: float, larger: float, dropped: int, degrees: int) -> FTest:
    f = (smaller - larger) / dropped / (larger / degrees)
    return FTest(f=f, degrees=(dropped, degrees), p=float(stats.f.sf(f, dropped, degrees)))


def _with_one_exponent(fits: Sequence[Fit]) -> float:
    """The objective of all groups with the exponent that suits them best together."""
    index = fits[0].law.parameters.index(fits[0].law.exponents[0])
    own = [float(fit.theta[index]) for fit in fits]
    low, high = min(own), max(own)
    if low == high:
        return sum(fit.objective for fit in fits)
    for _ in range(_ROUNDS):
        exponents = np.linspace(low, high, _STEPS + 1)
        objectives = sum(best_with(fit, index, exponents, fit.theta)[1] for fit in fits)
        best = int(np.argmin(objectives))
        low, high = float(exponents[max(best - 1, 0)]), float(exponents[min(best + 1, _STEPS)])
    return float(np.min(objectives))


def _pooled(groups: Sequence[Points]) -> Points:
    runs = tuple(f"{number} {run}" for number, group in enumerate(groups) for run in group.run)
    return Points(np.concatenate([g.x for g in groups]), np.concatenate([g.y for g in groups]), runs)


def _aicc(objective: float, points: int, parameters: int) -> float | None:
    """Corrected AIC of a Gaussian, whose variance is one more parameter; objective is half the sum of squares."""
    k = parameters + 1
    if points <= k + 1:
        return None
    plain = points * (math.log(2 * math.pi * 2 * objective / points) + 1) + 2 * k
    return plain + 2 * k * (k + 1) / (points - k - 1)


def _less(value: float | None, other: float | None) -> float | None:
    return None if value is None or other is None else value - other


def fit_aicc(fit: Fit) -> float | None:
    """Corrected AIC of a fit; None without an AIC, and with too few points."""
    k = len(fit.law.parameters) + 1
    if fit.aic is None or len(fit.points) <= k + 1:
        return None
    return fit.aic + 2 * k * (k + 1) / (len(fit.points) - k - 1)
