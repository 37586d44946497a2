"""Laws of two scales, a model size N (parameters, or cost per sample) and a number of samples D.

Given the exponents, floor and amplitudes are linear: starts take a grid of exponents and solve for the rest by
non-negative least squares (variable projection).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from itertools import product

import numpy as np
from scipy.optimize import nnls

from openclip_scaling.forms.law import Array, Law, Parameter
from openclip_scaling.forms.power_laws import floor_bounds

_SMALLEST = 1e-2  # amplitude of a start, of the geometric mean of E
_GRID = (0.1, 0.25, 0.5, 1.0)


class TwoScaleLaw(Law):
    """E = E + A / N^alpha + B / D^beta; subclasses say which exponents are free."""

    rising = -1
    scales = 2

    @abstractmethod
    def split(self, theta: Array) -> tuple[Array, Array, Array, Array, Array]:
        """alpha, beta, ln A, ln B and the floor of theta, each with a last dimension of 1."""

    @abstractmethod
    def grid(self) -> list[tuple[float, ...]]:
        """The exponents of the starts."""

    def log_predict(self, theta: Array, u: Array) -> Array:
        alpha, beta, a, b, floor = self.split(theta)
        model, data = np.exp(a - alpha * u[..., 0]), np.exp(b - beta * u[..., 1])
        return np.asarray(np.log(floor + model + data))

    def terms(self, theta: Array, u: Array) -> tuple[Array, Array, Array]:
        """The shares of model and data in E, and 1 / E."""
        alpha, beta, a, b, floor = self.split(theta)
        model, data = np.exp(a - alpha * u[..., 0]), np.exp(b - beta * u[..., 1])
        inverse = 1 / (floor + model + data)
        return model * inverse, data * inverse, inverse

    def starts(self, u: Array, v: Array) -> Array:
        count = len(self.exponents)
        found = []
        for exponents in self.grid():
            alpha, beta = exponents[0], exponents[-1]
            columns = np.column_stack([np.exp(-alpha * u[:, 0]), np.exp(-beta * u[:, 1]), np.ones(len(v))])
            a, b, floor = nnls(columns * np.exp(-v)[:, None], np.ones(len(v)))[0]
            logs = np.log(np.maximum([a, b], _SMALLEST))
            found.append([*exponents[:count], *logs, floor])
        return np.array(found)


class ChinchillaLaw(TwoScaleLaw):
    """E + A / N^alpha + B / D^beta (Hoffmann et al. 2022), all parameters non-negative."""

    name = "chinchilla"
    formula = "E + A/N^alpha + B/D^beta"
    latex = r"E + A/N^\alpha + B/D^\beta"
    roles = (
        Parameter("alpha", "exponent", axis=0),
        Parameter("beta", "exponent", axis=1),
        Parameter("A", "amplitude", axis=0, exponent="alpha"),
        Parameter("B", "amplitude", axis=1, exponent="beta"),
        Parameter("E", "floor"),
    )

    def split(self, theta: Array) -> tuple[Array, Array, Array, Array, Array]:
        return theta[..., 0:1], theta[..., 1:2], theta[..., 2:3], theta[..., 3:4], theta[..., 4:5]

    def grid(self) -> list[tuple[float, ...]]:
        return list(product(_GRID, _GRID))

    def jacobian(self, theta: Array, u: Array) -> Array:
        model, data, inverse = self.terms(theta, u)
        return np.stack([-model * u[..., 0], -data * u[..., 1], model, data, inverse], axis=-1)

    def bounds(self, v: Array) -> tuple[Array, Array]:
        return floor_bounds([(0.0, 20.0), (0.0, 20.0), (-60.0, 60.0), (-60.0, 60.0)], v)

    def predict(self, parameters: Mapping[str, float], c: Array) -> Array:
        p = parameters
        return np.asarray(p["E"] + p["A"] * c[..., 0] ** -p["alpha"] + p["B"] * c[..., 1] ** -p["beta"])


class TiedLaw(TwoScaleLaw):
    """E + A / N^alpha + B / D^alpha: one exponent for both scales (Gadre et al. 2024)."""

    name = "tied"
    formula = "E + A/N^alpha + B/D^alpha"
    latex = r"E + A/N^\alpha + B/D^\alpha"
    roles = (
        Parameter("alpha", "exponent"),
        Parameter("A", "amplitude", axis=0, exponent="alpha"),
        Parameter("B", "amplitude", axis=1, exponent="alpha"),
        Parameter("E", "floor"),
    )

    def split(self, theta: Array) -> tuple[Array, Array, Array, Array, Array]:
        return theta[..., 0:1], theta[..., 0:1], theta[..., 1:2], theta[..., 2:3], theta[..., 3:4]

    def grid(self) -> list[tuple[float, ...]]:
        return [(exponent,) for exponent in (0.05, *_GRID)]

    def jacobian(self, theta: Array, u: Array) -> Array:
        model, data, inverse = self.terms(theta, u)
        return np.stack([-model * u[..., 0] - data * u[..., 1], model, data, inverse], axis=-1)

    def bounds(self, v: Array) -> tuple[Array, Array]:
        return floor_bounds([(0.0, 20.0), (-60.0, 60.0), (-60.0, 60.0)], v)

    def predict(self, parameters: Mapping[str, float], c: Array) -> Array:
        p = parameters
        return np.asarray(p["E"] + p["A"] * c[..., 0] ** -p["alpha"] + p["B"] * c[..., 1] ** -p["alpha"])
