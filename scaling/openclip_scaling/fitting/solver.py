"""Minimises the loss of many fits at once: bounded Levenberg-Marquardt over a batch, in numpy.

Rows of the batch are starts of one fit, resamples of the runs, or values of a parameter that is held. Each step is
tried with two curvatures and the better one is kept: the loss's own (Newton), which is fast near the optimum but
blind where a small Huber delta leaves few points in the quadratic part, and that of reweighted least squares, which
never overshoots. Tolerances are relative to the objective, so a small objective does not end the search early.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from openclip_scaling.fitting.loss import Loss
from openclip_scaling.fitting.points import Points
from openclip_scaling.forms.law import Array, Law

_ITERATIONS = 500
_DECREMENT = 1e-15  # expected decrease over the objective, at which a row has arrived
_EXACT = 1e-28  # objective per point that is rounding noise
_MOST_DAMPED, _LEAST_DAMPED = 1e10, 1e-13
# A Huber delta far below the noise gives a loss of absolute values, whose optimum can be a whole stretch of
# curves; a trace of least squares picks one of them, so that the result is the same in any unit.
_TIE = 1e-6
_CHUNK = 2_000_000  # numbers in one batch of derivatives


@dataclass(frozen=True)
class Data:
    """Centred logs of one or many sets of points, with a weight per point.

    u has shape (sets, points) or (sets, points, 2), v and weights (sets, points); one set serves a whole batch.
    """

    u: Array
    v: Array
    weights: Array

    def rows(self, index: NDArray[np.intp]) -> Data:
        """The sets of some rows of the batch."""
        if len(self.v) == 1:
            return self
        return Data(self.u[index], self.v[index], self.weights[index])

    def repeated(self, times: int) -> Data:
        """The same sets over again, for another start of each."""
        index = np.tile(np.arange(len(self.v)), times)
        return Data(self.u[index], self.v[index], self.weights[index])


def centred_data(samples: Sequence[Points], c0: Array, e0: float) -> Data:
    """One row per sample; shorter samples are filled up with copies of their last point of weight 0."""
    longest = max(len(sample) for sample in samples)
    fill = [np.minimum(np.arange(longest), len(sample) - 1) for sample in samples]
    x = np.stack([sample.x[rows] for sample, rows in zip(samples, fill, strict=True)])
    y = np.stack([sample.y[rows] for sample, rows in zip(samples, fill, strict=True)])
    weights = np.stack([np.arange(longest) < len(sample) for sample in samples]).astype(np.float64)
    centre = c0 if x.ndim == 3 else c0[0]
    return Data(np.log(x / centre), np.log(y / e0), weights)


def solve(law: Law, loss: Loss, start: Array, data: Data, held: int | None = None) -> tuple[Array, Array]:
    """Optima from `start`, shape (batch, parameters), and their objectives, shape (batch,).

    The unit of the loss is that of the centred values. The parameter number `held` keeps its start.
    """
    size = max(1, _CHUNK // (data.v.shape[1] * start.shape[1]))
    pieces = [np.arange(at, min(at + size, len(start))) for at in range(0, len(start), size)]
    found = [_Batch(law, loss, start[rows], data.rows(rows), held).run() for rows in pieces]
    thetas, objectives = zip(*found, strict=True)
    return np.concatenate(thetas), np.concatenate(objectives)


class _Batch:
    """The state of one batch; rows leave it when they have arrived."""

    def __init__(self, law: Law, loss: Loss, start: Array, data: Data, held: int | None) -> None:
        self.law, self.loss, self.data, self.held = law, loss, data, held
        low, high = law.bounds(data.v)
        self.low, self.high = np.broadcast_to(low, start.shape), np.broadcast_to(high, start.shape)
        self.theta = np.clip(start, self.low, self.high)
        self.value = self._objective(self._residuals(self.theta, data), data.weights)
        self.damping = np.full((len(start), 1 if loss.delta is None else 2), 1e-3)
        self.exact = _EXACT * data.v.shape[1] * float(loss.slope(np.zeros(1))[0]) ** 2

    def run(self) -> tuple[Array, Array]:
        active = np.arange(len(self.theta))
        for _ in range(_ITERATIONS):
            active = active[~self._step(active)]
            if not len(active):
                break
        rho = self.loss.rho(self._residuals(self.theta, self.data))
        return self.theta, np.asarray((self.data.weights * rho).sum(axis=-1))

    def _residuals(self, theta: Array, data: Data) -> Array:
        """Predicted less observed."""
        with np.errstate(over="ignore"):  # a wild step ends in infinity and is refused
            predicted = self.loss.values(self.law.log_predict(theta, data.u))
        return np.asarray(predicted - self.loss.values(data.v))

    def _objective(self, residuals: Array, weights: Array) -> Array:
        with np.errstate(over="ignore", invalid="ignore"):
            rho = self.loss.rho(residuals)
            if self.loss.delta is not None:
                rho = rho + 0.5 * _TIE * residuals**2
            return np.asarray((weights * rho).sum(axis=-1))

    def _step(self, active: NDArray[np.intp]) -> NDArray[np.bool_]:
        """Move the active rows once; returns which of them have arrived."""
        data, theta, start = self.data.rows(active), self.theta[active], self.value[active]
        low, high = self.low[active], self.high[active]
        gradient, curvatures = self._model(theta, data, (low, high))
        best, value = theta.copy(), start.copy()
        arrived = np.zeros(len(active), dtype=bool)
        for kind, curvature in enumerate(curvatures):
            step = _damped_step(curvature, curvatures[-1], gradient, self.damping[active, kind])
            candidate = np.clip(theta + step, low, high)
            reached = self._objective(self._residuals(candidate, data), data.weights)
            closer, better = reached < start, reached < value
            best[better], value[better] = candidate[better], reached[better]
            # Each curvature is trusted by its own success.
            trusted = self.damping[active, kind] <= 1
            self.damping[active, kind] *= np.where(closer, 0.1, 4.0)
            if kind == 0:
                arrived = trusted & (np.abs((gradient * step).sum(axis=-1)) <= _DECREMENT * start)
        self.theta[active], self.value[active] = best, value
        self.damping[active] = np.maximum(self.damping[active], _LEAST_DAMPED)
        stuck = self.damping[active].min(axis=-1) > _MOST_DAMPED
        return np.asarray(arrived | stuck | (value < self.exact))

    def _model(self, theta: Array, data: Data, bounds: tuple[Array, Array]) -> tuple[Array, list[Array]]:
        """Gradient of the objective and its curvatures; a parameter that may not move has neither."""
        residuals, delta = self._residuals(theta, data), self.loss.delta
        slope = self.loss.slope(self.law.log_predict(theta, data.u))
        jacobian = slope[..., None] * self.law.jacobian(theta, data.u)
        size = np.abs(residuals)
        if delta is None:
            factors = [np.ones_like(size)]
        else:
            near = size <= delta
            factors = [near + _TIE, np.where(near, 1.0, delta / np.maximum(size, delta)) + _TIE]
        pull = data.weights * factors[-1] * residuals
        gradient = (jacobian * pull[..., None]).sum(axis=-2)
        fixed = ((theta <= bounds[0]) & (gradient > 0)) | ((theta >= bounds[1]) & (gradient < 0))
        if self.held is not None:
            fixed[:, self.held] = True
        jacobian = np.where(fixed[:, None, :], 0.0, jacobian)
        transposed = np.swapaxes(jacobian, -1, -2)
        curvatures = [transposed @ ((data.weights * factor)[..., None] * jacobian) for factor in factors]
        return np.where(fixed, 0.0, gradient), curvatures


def _damped_step(curvature: Array, positive: Array, gradient: Array, damping: Array) -> Array:
    """The step to the minimum of the damped quadratic model, in parameters scaled by a positive curvature."""
    diagonal = np.einsum("bii->bi", positive)
    floor = 1e-12 * diagonal.max(axis=-1, keepdims=True) + 1e-290
    scale = 1 / np.sqrt(np.maximum(diagonal, floor))
    scaled = curvature * scale[:, :, None] * scale[:, None, :]
    count = range(curvature.shape[-1])
    scaled[:, count, count] += np.where(diagonal > floor, damping[:, None], 1.0)
    return np.asarray(-scale * np.linalg.solve(scaled, (gradient * scale)[..., None])[..., 0])
