"""Fits one law to one set of points: summed loss, many starts, tight tolerance.

Every start runs to its end, and how many reach the best objective is reported: a share far below one says that the
optimum is hard to find, and may have been missed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from openclip_scaling.errors import UserError
from openclip_scaling.fitting.loss import Loss
from openclip_scaling.fitting.points import Points
from openclip_scaling.fitting.solver import centred_data, solve
from openclip_scaling.forms.law import Array, Law, exp

_SAME_OPTIMUM = 1e-6
_AT_BOUND = 1e-4
_RARE = 0.1  # share of starts at the optimum, up to which it may not be the best
_ILL_CONDITIONED = 1e3  # of the scaled Jacobian: some direction of the parameters is 1000 times less certain


@dataclass(frozen=True)
class Fit:
    """A fitted law.

    parameters are in the units of the data; theta, c0 and e0 the centred form (see law). standard_errors
    assume independent points with equal noise, and are None without degrees of freedom. aic is that of a
    Gaussian in the residuals of the loss, comparable between laws on the same points; condition that of the
    scaled Jacobian. rmse is that of ln E, whatever the loss.
    """

    law: Law
    loss: Loss
    parameters: dict[str, float]
    theta: Array
    c0: Array
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

    @property
    def centred_loss(self) -> Loss:
        """The loss for values in units of e0."""
        return replace(self.loss, unit=self.e0)

    def centred(self, c: Array | Sequence[float]) -> Array:
        """ln(C / C0) of scales."""
        c = np.asarray(c, dtype=np.float64)
        return np.log(c / (self.c0 if self.law.scales > 1 else self.c0[0]))

    def log_predict(self, c: Array | Sequence[float], theta: Array | None = None) -> Array:
        """ln E at the scales c, for the fitted theta or for others of shape (..., parameters)."""
        theta = self.theta if theta is None else theta
        return np.asarray(math.log(self.e0) + self.law.log_predict(theta, self.centred(c)))

    def predict(self, c: Array | Sequence[float]) -> Array:
        """E at the scales c."""
        return exp(self.log_predict(c))

    @property
    def residuals(self) -> Array:
        """ln E_i - ln E(C_i), in the order of `points`."""
        return np.asarray(np.log(self.points.y) - self.log_predict(self.points.x))


def fit_law(points: Points, law: Law, loss: Loss | None = None) -> Fit:
    """Fit `law` to `points`. Raises UserError when there are fewer different scales than parameters."""
    loss = loss or Loss()
    check_enough(points, law)
    c0, e0 = points.centre, float(np.exp(np.log(points.y).mean()))
    centred = replace(loss, unit=e0)
    data = centred_data([points], c0, e0)
    u, v = data.u[0], data.v[0]
    ends, objectives = solve(law, centred, law.starts(u, v), data)
    best = int(np.argmin(objectives))
    theta = ends[best]
    # Residuals of an exact fit are rounding noise, so the optimum is also met within an absolute margin.
    margin = 1e-16 * len(points) * float(centred.slope(np.zeros(1))[0]) ** 2
    reached = objectives <= objectives[best] * (1 + _SAME_OPTIMUM) + margin
    predicted = law.log_predict(theta, u)
    jacobian = centred.slope(predicted)[:, None] * law.jacobian(theta, u)
    residuals = centred.values(v) - centred.values(predicted)
    condition = _condition(jacobian)
    return Fit(
        law=law,
        loss=loss,
        parameters=dict(zip(law.parameters, law.natural(theta, c0, e0).tolist(), strict=True)),
        theta=theta,
        c0=c0,
        e0=e0,
        points=points,
        objective=float(objectives[best]),
        rmse=float(np.sqrt(((v - predicted) ** 2).mean())),
        aic=_aic(residuals, len(law.parameters), margin),
        standard_errors=_standard_errors(jacobian, residuals, law.natural_jacobian(theta, c0, e0), law),
        degrees_of_freedom=len(points) - len(law.parameters),
        starts=len(ends),
        starts_at_optimum=int(reached.sum()),
        condition=condition,
        notices=(
            *_notices(points, law, condition),
            *_start_notices(int(reached.sum()), len(ends)),
            *_bound_notices(law, theta, u, v),
        ),
    )


def refit(samples: Sequence[Points], fit: Fit) -> Array:
    """theta of the same law on other sets of points, shape (samples, parameters), in the centre of `fit`.

    For resampling: each set is started at the optimum of `fit` and at two of its starts; bounds follow the new
    points. Every set must have `enough` scales.
    """
    own = centred_data([fit.points], fit.c0, fit.e0)
    spread = fit.law.starts(own.u[0], own.v[0])
    starts = np.stack([fit.theta, spread[len(spread) // 3], spread[2 * len(spread) // 3]])
    data = centred_data(samples, fit.c0, fit.e0)
    ends, objectives = solve(
        fit.law, fit.centred_loss, np.repeat(starts, len(samples), axis=0), data.repeated(len(starts))
    )
    best = objectives.reshape(len(starts), -1).argmin(axis=0)
    return np.asarray(ends.reshape(len(starts), len(samples), -1)[best, np.arange(len(samples))])


def check_enough(points: Points, law: Law) -> None:
    """Raise UserError unless there are as many scales as the law takes, and as many different as parameters."""
    if points.scales != law.scales:
        wanted = "two scales, a model size and a number of samples" if law.scales == 2 else "one scale"
        raise UserError(f"The law {law.name} needs {wanted}, but the points have {points.scales}.")
    if not enough(points, law):
        needed = len(law.parameters)
        raise UserError(
            f"{len(points)} points at {_different(points)} different scales cannot fix the {needed} parameters of "
            f"{law.formula}; at least {needed} different scales are needed."
        )


def enough(points: Points, law: Law) -> bool:
    """Whether there are as many different scales as the law has parameters."""
    return _different(points) >= len(law.parameters)


def _different(points: Points) -> int:
    return len(np.unique(points.x, axis=0))


def _condition(jacobian: Array) -> float:
    """Condition number with the columns scaled to one: how nearly two parameters do the same."""
    norms = np.linalg.norm(jacobian, axis=0)
    if not np.all(norms > 0):
        return math.inf
    singular = np.linalg.svd(jacobian / norms, compute_uv=False)
    return float(singular[0] / singular[-1]) if singular[-1] > 0 else math.inf


def _aic(residuals: Array, parameters: int, margin: float) -> float | None:
    """AIC of a Gaussian with its variance as one more parameter; None for an exact fit."""
    n, sse = len(residuals), float((residuals**2).sum())
    if sse < 1e-4 * margin:
        return None
    return n * (math.log(2 * math.pi * sse / n) + 1) + 2 * (parameters + 1)


def _standard_errors(jacobian: Array, residuals: Array, slope: Array, law: Law) -> dict[str, float] | None:
    degrees = len(residuals) - len(law.parameters)
    if degrees < 1:
        return None
    covariance = np.linalg.pinv(jacobian.T @ jacobian) * float((residuals**2).sum()) / degrees
    with np.errstate(
        over="ignore", invalid="ignore"
    ):  # a very steep law has an amplitude without finite error
        variances = np.diag(slope @ covariance @ slope.T)
    return {
        name: float(np.sqrt(max(value, 0.0))) for name, value in zip(law.parameters, variances, strict=True)
    }


def _start_notices(reached: int, starts: int) -> tuple[str, ...]:
    if reached > max(1, _RARE * starts):
        return ()
    return (f"{reached} of {starts} starts reached this optimum, so a better one may have been missed",)


def _bound_notices(law: Law, theta: Array, u: Array, v: Array) -> tuple[str, ...]:
    """A word where a parameter is held by a bound of the law, or next to it, and so is no optimum."""
    low, high = law.bounds(v)
    found = []
    for index, role in enumerate(law.roles):
        edges = [edge for edge in (low[index], high[index]) if abs(theta[index] - edge) < _AT_BOUND]
        if role.kind == "exponent" and edges == [0.0]:
            along = " with its scale" if law.scales > 1 else ""
            return (
                f"{role.name} is held at 0: the metric does not fall{along} on these points, so this law says "
                "nothing about it",
            )
        if role.kind == "exponent" and edges:
            found.append(f"{role.name} ran to its bound of {edges[0]:g}, where the law is a step")
        if role.logarithmic and edges:
            found.append(f"{role.name} ran to a bound, so its value and its interval say nothing")
        if role.kind == "position" and not u.min() <= theta[index] <= u.max():
            found.append(f"{role.name} lies outside of the points, which show no break")
        if role.kind == "floor" and high[index] - theta[index] < _AT_BOUND * high[index]:
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
