"""Logistic regression on features, its L2 strength chosen on held-out images (Radford et al. 2021, appendix A.3)."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression

from openclip_linattn.errors import UserError
from openclip_linattn.zeroshot.watching import Advance

MOST_FITS = 16
HELD_OUT = 0.2
_MOST_HELD_SHOTS = 4
_STEPS_PER_DECADE = 8
_LOWEST, _HIGHEST = -6, 6
_LAST = (_HIGHEST - _LOWEST) * _STEPS_PER_DECADE
_COARSE = 2 * _STEPS_PER_DECADE
_ITERATIONS = 1000
_ROWS_PER_STEP = 4096

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Parts:
    """Rows of the training features: to fit on while C is chosen, to choose it by, and to fit on at last."""

    fit: Ints
    held: Ints
    final: Ints


class Regression:
    """Multinomial logistic regression with L2 penalty |W|^2 / 2 + C * sum of losses, by L-BFGS.

    Features are centred and divided by one number, the root of their mean variance. As the intercept has no
    penalty, that is the same family of solutions as without (C there is C here over the variance), better
    conditioned and with one range of C for every model. Single features are not standardised.
    """

    def __init__(self, features: Floats, labels: Ints, C: float) -> None:
        self._mean = features.mean(axis=0)
        self._scale = float(np.sqrt(features.var(axis=0).mean())) or 1.0
        self._model: Any = LogisticRegression(C=C, max_iter=_ITERATIONS)
        self.converged = _fit(self._model, self._scaled(features), labels)

    def scores(self, features: Floats, classes: int) -> Floats:
        """Return scores (n, classes); a class that was not trained has -inf."""
        found = self._model.decision_function(self._scaled(features))
        if found.ndim == 1:
            found = np.stack([-found, found], axis=1)
        scores = np.full((len(features), classes), -np.inf)
        scores[:, self._model.classes_] = found
        return scores

    def best(self, features: Floats, classes: int, most: int) -> Ints:
        """Return the best `most` classes (n, most), best first; of equal ones the lower index comes first."""
        steps = range(0, len(features), _ROWS_PER_STEP)
        parts = [self.scores(features[first : first + _ROWS_PER_STEP], classes) for first in steps]
        return np.concatenate([np.argsort(-scores, axis=1, kind="stable")[:, :most] for scores in parts])

    def _scaled(self, features: Floats) -> Floats:
        scaled: Floats = (features - self._mean) / self._scale
        return scaled


def _fit(model: Any, features: Floats, labels: Ints) -> bool:
    """Fit and return whether L-BFGS converged; other warnings are passed on."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(features, labels)
    others = [each for each in caught if not issubclass(each.category, ConvergenceWarning)]
    for each in others:
        warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
    return len(others) == len(caught)


@dataclass(frozen=True)
class Sweep:
    """The strengths that were tried: (C, accuracy on the held-out images, whether the fit converged)."""

    tried: tuple[tuple[float, float, bool], ...]
    C: float


def sweep(features: Floats, labels: Ints, parts: Parts, classes: int, advance: Advance) -> Sweep:
    """Choose C between 1e-6 and 1e6: seven strengths, then halved steps about the best, to 8 per decade.

    Of equally good strengths the smallest C, which is the strongest penalty, is taken.
    """
    converged: dict[int, bool] = {}

    def accuracy(position: int) -> float:
        regression = Regression(features[parts.fit], labels[parts.fit], strength(position))
        converged[position] = regression.converged
        advance(1)
        best = regression.best(features[parts.held], classes, 1)[:, 0]
        return float((best == labels[parts.held]).mean())

    found = find_peak(accuracy)
    peak = _best(found)
    tried = ((strength(each), found[each], converged[each]) for each in sorted(found))
    return Sweep(tuple(tried), strength(peak))


def strength(position: int) -> float:
    """Return C at a position of the grid, 0 to 96."""
    return float(10.0 ** (_LOWEST + position / _STEPS_PER_DECADE))


def find_peak(value: Callable[[int], float]) -> dict[int, float]:
    """Return the values at the positions visited: every 16th of 0 to 96, then halved steps about the best."""
    found = {position: value(position) for position in range(0, _LAST + 1, _COARSE)}
    step = _COARSE // 2
    while step:
        peak = _best(found)
        for position in (peak - step, peak + step):
            if 0 <= position <= _LAST and position not in found:
                found[position] = value(position)
        step //= 2
    return found


def _best(found: dict[int, float]) -> int:
    return min(found, key=lambda position: (-found[position], position))


def split(labels: Ints, *, shots: int | None, seed: int, names: tuple[str, ...]) -> Parts:
    """Divide the training rows by class, in an order that `seed` draws.

    Without `shots` a fifth of each class is held out, and the last fit is on all. With `shots` the fits are
    on so many rows of each class, and C is chosen on others of it, as many, but at most 4. Raises UserError
    where a class has fewer than `shots`, or where no class has a row to hold out.
    """
    if shots is not None and shots < 1:
        raise UserError(f"the number of shots is {shots}; it must be at least 1 image per class")
    rng = np.random.default_rng(seed)
    fit: list[Ints] = []
    held: list[Ints] = []
    for label in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == label))
        if shots is not None and len(rows) < shots:
            raise UserError(
                f"class {names[label]!r} has {len(rows)} training images, fewer than the {shots} shots; "
                "lower the number of shots"
            )
        out = max(1, round(HELD_OUT * len(rows))) if len(rows) > 1 else 0
        kept = len(rows) - out if shots is None else shots
        out = out if shots is None else min(shots, _MOST_HELD_SHOTS)
        fit.append(rows[:kept])
        held.append(rows[kept : kept + out])
    chosen, rest = np.concatenate(fit), np.concatenate(held)
    if not len(rest):
        raise UserError(
            "no class has a training image to choose the penalty by; it needs more than it is fitted on"
        )
    return Parts(chosen, rest, np.concatenate([chosen, rest]) if shots is None else chosen)
