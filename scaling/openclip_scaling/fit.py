"""Fits one law to one set of points: residuals in logs, summed loss, many starts, tight tolerance.

The objective is the SUM (not the mean) over points of rho(ln E_i - ln E(C_i)), with rho(r) = r^2/2 for least
squares or the Huber function: with the mean of a small Huber loss, default tolerances stop the optimiser long
before the optimum. Every start runs to the end and the share that reaches the best objective is reported.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares

from openclip_scaling.errors import UserError
from openclip_scaling.laws import Array, Law
from openclip_scaling.points import Points

_TOLERANCE = 1e-14
_SAME_OPTIMUM = 1e-6
_TIE = 1e-6  # weight of least squares beside a Huber loss
_AT_BOUND = 1e-4  # in the exponent
_ILL_CONDITIONED = 1e3  # of the scaled Jacobian: some direction of the parameters is 1000 times less certain


@dataclass(frozen=True)
class Loss:
    """Least squares (delta None), or Huber with its corner at delta, in units of the natural log of E."""

    delta: float | None = None

    def __post_init__(self) -> None:
        if self.delta is not None and not (math.isfinite(self.delta) and self.delta > 0):
            raise UserError(f"The Huber delta must be a positive number, not {self.delta!r}.")

    @property
    def name(self) -> str:
        return "least squares" if self.delta is None else f"Huber (delta {self.delta:g})"

    def total(self, residuals: Array) -> float:
        """Sum of rho over the residuals."""
        size = np.abs(residuals)
        if self.delta is None:
            return float(0.5 * (size**2).sum())
        rho = np.where(size <= self.delta, 0.5 * size**2, self.delta * (size - 0.5 * self.delta))
        return float(rho.sum())


@dataclass(frozen=True)
class Fit:
    """A fitted law.

    parameters are in the units of the data; theta, c0 and e0 the centred form (see laws). standard_errors
    assume independent points with equal noise in logs, and are None without degrees of freedom. aic is that
    of a Gaussian in ln E, comparable between laws on the same points; condition that of the scaled Jacobian.
    """

    law: Law
    loss: Loss
    parameters: dict[str, float]
    theta: Array
    c0: float
    e0: float
    points: Points
    objective: float
    rmse: float
    aic: float | None
    standard_errors: dict[str, float] | None
    degrees_of_freedom: int
    starts: int
    starts_at_optimum: int
    condition: float
    notices: tuple[str, ...]

    def predict(self, c: Array | Sequence[float]) -> Array:
        """E at the scales c."""
        return predict_centred(self.law, self.theta, self.c0, self.e0, np.asarray(c, dtype=np.float64))

    @property
    def residuals(self) -> Array:
        """ln E_i - ln E(C_i), in the order of `points`."""
        return np.asarray(np.log(self.points.y) - np.log(self.predict(self.points.x)))


def predict_centred(law: Law, theta: Array, c0: float, e0: float, c: Array) -> Array:
    """E at the scales c, from centred parameters."""
    return np.asarray(e0 * np.exp(law.log_predict(theta, np.log(c / c0))))


def fit_law(points: Points, law: Law, loss: Loss | None = None) -> Fit:
    """Fit `law` to `points`. Raises UserError when there are fewer different scales than parameters."""
    loss = loss or Loss()
    check_enough(points, law)
    c0, e0 = _geometric_mean(points.x), _geometric_mean(points.y)
    u, v = np.log(points.x / c0), np.log(points.y / e0)
    ends = [_descend(law, loss, start, u, v) for start in law.starts(u, v)]
    objectives = np.array([loss.total(v - law.log_predict(theta, u)) for theta in ends])
    best = int(np.argmin(objectives))
    theta = _polish(law, loss, ends[best], u, v)
    # Residuals of an exact fit are rounding noise, so the optimum is also met within an absolute margin.
    reached = objectives <= objectives[best] * (1 + _SAME_OPTIMUM) + 1e-16 * len(points)
    residuals = v - law.log_predict(theta, u)
    condition = _condition(law.jacobian(theta, u))
    return Fit(
        law=law,
        loss=loss,
        parameters=law.natural(theta, c0, e0),
        theta=theta,
        c0=c0,
        e0=e0,
        points=points,
        objective=loss.total(residuals),
        rmse=float(np.sqrt((residuals**2).mean())),
        aic=_aic(residuals, len(law.parameters)),
        standard_errors=_standard_errors(law, theta, u, residuals, (c0, e0)),
        degrees_of_freedom=len(points) - len(law.parameters),
        starts=len(ends),
        starts_at_optimum=int(reached.sum()),
        condition=condition,
        notices=(*_notices(points, law, condition), *_bound_notices(law, theta, v)),
    )


def refit(points: Points, fit: Fit) -> Array:
    """theta of the same law on other points, in the centre of `fit`, started at its optimum and elsewhere.

    For resampling: bounds follow the new points. Raises UserError as `fit_law` does.
    """
    check_enough(points, fit.law)
    u, v = np.log(points.x / fit.c0), np.log(points.y / fit.e0)
    exact = fit.law.exact(u, v) if fit.loss.delta is None else None
    if exact is not None:
        return exact
    low, high = fit.law.bounds(v)
    starts = [np.clip(fit.theta, low, high), *fit.law.starts(u, v)[3::9]]
    ends = [_descend(fit.law, fit.loss, start, u, v) for start in starts]
    best = min(ends, key=lambda theta: fit.loss.total(v - fit.law.log_predict(theta, u)))
    return _polish(fit.law, fit.loss, best, u, v)


def check_enough(points: Points, law: Law) -> None:
    """Raise UserError unless there are at least as many different scales as parameters."""
    different = len(np.unique(points.x))
    needed = len(law.parameters)
    if different < needed:
        raise UserError(
            f"{len(points)} points at {different} different scales cannot fix the {needed} parameters of "
            f"{law.formula}; at least {needed} different scales are needed."
        )


def _geometric_mean(values: Array) -> float:
    return float(np.exp(np.log(values).mean()))


def _descend(law: Law, loss: Loss, start: Array, u: Array, v: Array) -> Array:
    low, high = law.bounds(v)
    # The solver wants a start strictly inside; a bound that is also the optimum is reached all the same.
    margin = 1e-9 * np.where(np.isfinite(high - low), high - low, 1.0)

    def residuals(theta: Array) -> Array:
        return np.asarray(law.log_predict(theta, u) - v)

    def jacobian(theta: Array) -> Array:
        return law.jacobian(theta, u)

    result = least_squares(
        residuals,
        np.clip(start, low + margin, high - margin),
        jac=jacobian,
        bounds=(low, high),
        x_scale="jac",
        loss="linear" if loss.delta is None else "huber",
        f_scale=loss.delta or 1.0,
        ftol=_TOLERANCE,
        xtol=_TOLERANCE,
        gtol=_TOLERANCE,
        max_nfev=2000,
    )
    return np.asarray(result.x, dtype=np.float64)


def _polish(law: Law, loss: Loss, theta: Array, u: Array, v: Array) -> Array:
    """Newton steps to the optimum of a Huber loss, where few points are left in its quadratic part.

    With a delta far below the noise the loss is one of absolute values, whose optimum can be a whole stretch of
    curves; a trace of least squares (TIE) picks one of them, so that the result is the same in any unit.
    Parameters held by a bound stay there.
    """
    if loss.delta is None:
        return theta
    low, high = law.bounds(v)

    def value(candidate: Array) -> float:
        residuals = v - law.log_predict(candidate, u)
        return loss.total(residuals) + 0.5 * _TIE * float(residuals @ residuals)

    reached = value(theta)
    for _ in range(100):
        step = _newton_step(law, loss.delta, theta, u, v)
        candidates = (np.clip(theta + step * 0.5**k, low, high) for k in range(40))
        better = next((candidate for candidate in candidates if value(candidate) < reached), None)
        if better is None:
            break
        theta, reached = better, value(better)
    return theta


def _newton_step(law: Law, delta: float, theta: Array, u: Array, v: Array) -> Array:
    low, high = law.bounds(v)
    residuals, jacobian = law.log_predict(theta, u) - v, law.jacobian(theta, u)
    gradient = jacobian.T @ (np.clip(residuals, -delta, delta) + _TIE * residuals)
    held = ((theta <= low) & (gradient > 0)) | ((theta >= high) & (gradient < 0))
    weights = (np.abs(residuals) <= delta) + _TIE
    jacobian = jacobian[:, ~held]
    step = np.zeros_like(theta)
    step[~held] = -np.linalg.lstsq(jacobian.T @ (weights[:, None] * jacobian), gradient[~held])[0]
    return step


def _condition(jacobian: Array) -> float:
    """Condition number with the columns scaled to one: how nearly two parameters do the same."""
    norms = np.linalg.norm(jacobian, axis=0)
    if not np.all(norms > 0):
        return math.inf
    singular = np.linalg.svd(jacobian / norms, compute_uv=False)
    return float(singular[0] / singular[-1]) if singular[-1] > 0 else math.inf


def _aic(residuals: Array, parameters: int) -> float | None:
    """AIC of a Gaussian in ln E with its variance as one more parameter; None for an exact fit."""
    n, sse = len(residuals), float((residuals**2).sum())
    if sse < 1e-20 * n:
        return None
    return n * (math.log(2 * math.pi * sse / n) + 1) + 2 * (parameters + 1)


def _standard_errors(
    law: Law, theta: Array, u: Array, residuals: Array, centre: tuple[float, float]
) -> dict[str, float] | None:
    degrees = len(u) - len(law.parameters)
    if degrees < 1:
        return None
    jacobian = law.jacobian(theta, u)
    covariance = np.linalg.pinv(jacobian.T @ jacobian) * float((residuals**2).sum()) / degrees
    slope = law.natural_jacobian(theta, *centre)
    with np.errstate(
        over="ignore", invalid="ignore"
    ):  # the amplitude of a very steep law has no finite error
        variances = np.diag(slope @ covariance @ slope.T)
    return {
        name: float(np.sqrt(max(value, 0.0))) for name, value in zip(law.parameters, variances, strict=True)
    }


def _bound_notices(law: Law, theta: Array, v: Array) -> tuple[str, ...]:
    """A word where a parameter is held by a bound of the law, or next to it, and so is no optimum."""
    low, high = law.bounds(v)
    if math.isfinite(high[1]) and high[1] - theta[1] < _AT_BOUND:
        return ("the metric does not fall on these points, so this law says nothing about it",)
    found = []
    if math.isfinite(low[1]) and theta[1] - low[1] < _AT_BOUND:
        found.append(f"the exponent ran to its bound of {low[1]:g}: the metric drops at once to its floor")
    if len(theta) > 2 and high[2] - theta[2] < _AT_BOUND * high[2]:
        found.append(
            "the floor is held at the lowest value observed, the highest it may be; its interval ends there"
        )
    return tuple(found)


def _notices(points: Points, law: Law, condition: float) -> tuple[str, ...]:
    notices = []
    if len(points) == len(law.parameters):
        notices.append(
            f"{len(points)} points for {len(law.parameters)} parameters: the curve passes through all"
        )
    if points.decades < 1:
        notices.append(f"the points span only {points.decades:.2f} decades of scale")
    if float(np.ptp(np.log(points.y))) < 1e-9:
        notices.append("the metric is constant: it shows no scaling")
    elif condition > _ILL_CONDITIONED:
        notices.append("the parameters can hardly be told apart on these points")
    return tuple(notices)
