"""Scaling laws E(C) as objects: what a fit needs to know about a form, and nothing about data or losses.

E is a loss or an error, C any positive measure of scale (training FLOP, GMAC x samples, samples). Fits work
on centred logs, u = ln(C / C0) and v = ln(E / E0) with C0, E0 the geometric means of the data, so that
neither unit matters. A new law is a subclass and one line in LAWS.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from openclip_scaling.errors import UserError

Array = NDArray[np.float64]


class Law(ABC):
    """A form E(C; parameters). theta are the centred parameters that the fit moves."""

    name: str
    formula: str
    parameters: tuple[str, ...]

    @abstractmethod
    def log_predict(self, theta: Array, u: Array) -> Array:
        """ln(E / E0) at u = ln(C / C0)."""

    @abstractmethod
    def jacobian(self, theta: Array, u: Array) -> Array:
        """Derivatives of `log_predict`, shape (points, parameters)."""

    @abstractmethod
    def bounds(self, v: Array) -> tuple[Array, Array]:
        """Lowest and highest theta, given the observed v = ln(E / E0)."""

    @abstractmethod
    def starts(self, u: Array, v: Array) -> list[Array]:
        """Starting points spread over what the data allow."""

    def exact(self, u: Array, v: Array) -> Array | None:
        """The least-squares theta in closed form, or None where there is none."""
        del u, v
        return None

    @abstractmethod
    def natural(self, theta: Array, c0: float, e0: float) -> dict[str, float]:
        """The parameters of the formula, in the units of the data."""

    @abstractmethod
    def natural_jacobian(self, theta: Array, c0: float, e0: float) -> Array:
        """Derivatives of `natural` (in the order of `parameters`) by theta, for standard errors."""

    @abstractmethod
    def predict(self, parameters: Mapping[str, float], c: Array) -> Array:
        """E at the scales c, from the formula's own parameters."""


class PowerLaw(Law):
    """E = b C^a; falls when a < 0. theta = (ln b', a)."""

    name = "power"
    formula = "E = b C^a"
    parameters = ("a", "b")

    def log_predict(self, theta: Array, u: Array) -> Array:
        return np.asarray(theta[0] + theta[1] * u)

    def jacobian(self, theta: Array, u: Array) -> Array:
        del theta
        return np.column_stack([np.ones_like(u), u])

    def bounds(self, v: Array) -> tuple[Array, Array]:
        del v
        return np.array([-np.inf, -np.inf]), np.array([np.inf, np.inf])

    def starts(self, u: Array, v: Array) -> list[Array]:
        line = _line(u, v)
        return [
            line,
            line * np.array([1.0, 0.5]),
            line * np.array([1.0, 2.0]),
            np.array([float(np.median(v)), 0.0]),
        ]

    def exact(self, u: Array, v: Array) -> Array | None:
        return _line(u, v)

    def natural(self, theta: Array, c0: float, e0: float) -> dict[str, float]:
        return {"a": float(theta[1]), "b": _amplitude(theta, c0, e0)}

    def natural_jacobian(self, theta: Array, c0: float, e0: float) -> Array:
        b = self.natural(theta, c0, e0)["b"]
        return np.array([[0.0, 1.0], [b, -b * np.log(c0)]])

    def predict(self, parameters: Mapping[str, float], c: Array) -> Array:
        return np.asarray(np.exp(np.log(parameters["b"]) + parameters["a"] * np.log(c)))


class SaturatingLaw(Law):
    """E = E0 + b C^a with a <= 0, b >= 0 and 0 <= E0 <= the lowest observed E. theta = (ln b', a, E0')."""

    name = "saturating"
    formula = "E = E0 + b C^a"
    parameters = ("a", "b", "E0")
    _floors = (0.0, 0.3, 0.6, 0.8, 0.9, 0.97, 0.999)

    def log_predict(self, theta: Array, u: Array) -> Array:
        with np.errstate(divide="ignore"):  # a floor of 0 is -inf in logs, as it should be
            return np.asarray(np.logaddexp(theta[0] + theta[1] * u, np.log(theta[2])))

    def jacobian(self, theta: Array, u: Array) -> Array:
        log_total = self.log_predict(theta, u)
        share = np.exp(theta[0] + theta[1] * u - log_total)
        return np.column_stack([share, share * u, np.exp(-log_total)])

    def bounds(self, v: Array) -> tuple[Array, Array]:
        return np.array([-60.0, -20.0, 0.0]), np.array([60.0, 0.0, float(np.exp(v.min()))])

    def starts(self, u: Array, v: Array) -> list[Array]:
        """Given a floor, the rest is a straight line in logs: a start per floor, and two neighbours in a."""
        values = np.exp(v)
        found: list[Array] = []
        for share in self._floors:
            floor = share * values.min()
            level, slope = _line(u, np.log(values - floor))
            falling = min(slope, -1e-3)
            found += [np.array([level, falling * factor, floor]) for factor in (1.0, 0.5, 2.0)]
        return found

    def natural(self, theta: Array, c0: float, e0: float) -> dict[str, float]:
        b = _amplitude(theta, c0, e0)
        return {"a": float(theta[1]), "b": b, "E0": float(theta[2] * e0)}

    def natural_jacobian(self, theta: Array, c0: float, e0: float) -> Array:
        b = self.natural(theta, c0, e0)["b"]
        return np.array([[0.0, 1.0, 0.0], [b, -b * np.log(c0), 0.0], [0.0, 0.0, e0]])

    def predict(self, parameters: Mapping[str, float], c: Array) -> Array:
        power = np.exp(np.log(max(parameters["b"], 1e-300)) + parameters["a"] * np.log(c))
        return np.asarray(parameters["E0"] + power)


def _amplitude(theta: Array, c0: float, e0: float) -> float:
    """b in the units of the data; kept inside the range of floats where a resampled fit has gone astray."""
    return float(np.exp(np.clip(np.log(e0) + theta[0] - theta[1] * np.log(c0), -700.0, 700.0)))


def _line(u: Array, v: Array) -> Array:
    """Intercept and slope of the least-squares line; slope 0 where all u are equal."""
    centre = u.mean()
    spread = float(((u - centre) ** 2).sum())
    slope = float(((u - centre) * (v - v.mean())).sum()) / spread if spread > 0 else 0.0
    return np.array([v.mean() - slope * centre, slope])


LAWS: dict[str, Law] = {law.name: law for law in (PowerLaw(), SaturatingLaw())}


def law_named(name: str) -> Law:
    """The law of that name. Raises UserError on a foreign name."""
    if name not in LAWS:
        raise UserError(f"Unknown law {name!r}; known laws: {', '.join(LAWS)}.")
    return LAWS[name]
