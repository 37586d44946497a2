"""What a fit needs to know about a scaling law, and nothing about data, losses or solvers.

E is a loss or an error, C any positive measure of scale (training FLOP, samples, parameters); a law of two scales
takes one column of C for each. Fits work on centred logs, u = ln(C / C0) and v = ln(E / E0) with C0, E0 the
geometric means of the data, so that no unit matters. All functions take leading dimensions: many starts, or many
resamples, are computed at once. A new law is a subclass, and one line in laws.LAWS.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Kind = Literal["exponent", "amplitude", "floor", "shift", "position", "width"]
_LOG_RANGE = 700.0  # of a float


@dataclass(frozen=True)
class Parameter:
    """One parameter of a formula, and how it follows from its centred form t.

    exponent: t. amplitude: exp(t), in the unit that its `exponent` gives it. floor: t E0. shift: t C0.
    position: exp(t) C0. width: exp(t). axis says which scale it belongs to.
    """

    name: str
    kind: Kind
    axis: int = 0
    exponent: str = ""

    @property
    def logarithmic(self) -> bool:
        """Whether its centred form is its logarithm, so that intervals are made there."""
        return self.kind in ("amplitude", "position", "width")


class Law(ABC):
    """A form E(C; parameters). theta, the centred parameters, has shape (..., parameters), in their order.

    rising is 1 where exponents are written C^a (the metric falls with a < 0), -1 where they are written C^-a.
    A floor, if there is one, is the last parameter.
    """

    name: str
    formula: str
    latex: str
    roles: tuple[Parameter, ...]
    rising: int
    scales = 1

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(role.name for role in self.roles)

    @property
    def exponents(self) -> tuple[str, ...]:
        return tuple(role.name for role in self.roles if role.kind == "exponent")

    @property
    def floor(self) -> str | None:
        """The name of what is left of E at infinite scale, if the law has such a parameter."""
        return self.roles[-1].name if self.roles[-1].kind == "floor" else None

    @abstractmethod
    def log_predict(self, theta: Array, u: Array) -> Array:
        """ln(E / E0), shape (..., points), at u of shape (..., points) or, for two scales, (..., points, 2)."""

    @abstractmethod
    def jacobian(self, theta: Array, u: Array) -> Array:
        """Derivatives of `log_predict`, shape (..., points, parameters)."""

    @abstractmethod
    def bounds(self, v: Array) -> tuple[Array, Array]:
        """Lowest and highest theta, given the observed v = ln(E / E0) of shape (..., points)."""

    @abstractmethod
    def starts(self, u: Array, v: Array) -> Array:
        """Starting points spread over what the data allow, shape (starts, parameters), for one set of points."""

    @abstractmethod
    def predict(self, parameters: Mapping[str, float], c: Array) -> Array:
        """E at the scales c, from the formula's own parameters."""

    def natural(self, theta: Array, c0: Array, e0: float) -> Array:
        """The parameters of the formula in the units of the data, shape (..., parameters)."""
        values = [self._natural(role, index, theta, c0, e0) for index, role in enumerate(self.roles)]
        return np.stack(values, axis=-1)

    def _natural(self, role: Parameter, index: int, theta: Array, c0: Array, e0: float) -> Array:
        value = theta[..., index]
        if role.kind == "amplitude":
            # Kept inside the range of floats where a resampled fit has gone astray.
            exponent = theta[..., self.parameters.index(role.exponent)]
            log = np.log(e0) + value - self.rising * exponent * np.log(c0[role.axis])
            return np.asarray(np.exp(np.clip(log, -_LOG_RANGE, _LOG_RANGE)))
        if role.kind in ("position", "width"):
            value = np.exp(value)
        units = {"floor": e0, "shift": c0[role.axis], "position": c0[role.axis]}
        return np.asarray(value * units.get(role.kind, 1.0))

    def natural_jacobian(self, theta: Array, c0: Array, e0: float) -> Array:
        """Derivatives of `natural` by one theta, shape (parameters, parameters), for standard errors."""
        values = self.natural(theta, c0, e0)
        found = np.zeros((len(self.roles), len(self.roles)))
        for index, role in enumerate(self.roles):
            if role.logarithmic:
                found[index, index] = values[index]
            else:
                found[index, index] = {"floor": e0, "shift": c0[role.axis]}.get(role.kind, 1.0)
            if role.kind == "amplitude":
                other = self.parameters.index(role.exponent)
                found[index, other] = -self.rising * values[index] * np.log(c0[role.axis])
        return found


def exp(logs: Array | float) -> Array:
    """e to the power of logs; infinite, without a warning, where that is beyond every float."""
    with np.errstate(over="ignore"):
        return np.asarray(np.exp(logs))


def inverse(logs: Array) -> Array:
    """e to the power of -logs, kept inside the range of floats where a fit goes astray on its way."""
    return np.asarray(np.exp(np.minimum(-logs, _LOG_RANGE)))


def line(u: Array, v: Array) -> tuple[float, float]:
    """Slope and intercept of the least-squares line; slope 0 where all u are equal."""
    centre = u.mean()
    spread = float(((u - centre) ** 2).sum())
    slope = float(((u - centre) * (v - v.mean())).sum()) / spread if spread > 0 else 0.0
    return slope, float(v.mean() - slope * centre)
