"""The broken power law with one break of Caballero et al. (2022, arXiv 2210.14891)."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

import numpy as np

from openclip_scaling.forms.law import Array, Law, Parameter, inverse, line
from openclip_scaling.forms.power_laws import above_floor, floor_bounds


class BrokenLaw(Law):
    """E = E0 + b C^-c0 (1 + (C / d1)^(1 / f1))^(-c1 f1).

    The exponent is -c0 well below the scale d1 and -(c0 + c1) well above it; f1 is the width of the break in ln C.
    Either may be negative, so that the metric may rise on one side.
    """

    name = "broken"
    formula = "E = E0 + b C^-c0 (1 + (C/d1)^(1/f1))^(-c1 f1)"
    latex = r"E = E_0 + b\,C^{-c_0}(1 + (C/d_1)^{1/f_1})^{-c_1 f_1}"
    rising = -1
    roles = (
        Parameter("c0", "exponent"),
        Parameter("c1", "exponent"),
        Parameter("b", "amplitude", exponent="c0"),
        Parameter("d1", "position"),
        Parameter("f1", "width"),
        Parameter("E0", "floor"),
    )
    _widths = (0.03, 0.2, 1.0)
    _breaks = (0.25, 0.5, 0.75)  # quantiles of the scales
    _floors = (0.0, 0.5, 0.9)

    def log_predict(self, theta: Array, u: Array) -> Array:
        return above_floor(self._parts(theta, u)[0], theta[..., 5:6])

    def _parts(self, theta: Array, u: Array) -> tuple[Array, Array, Array]:
        """ln of the power, distance from the break in widths, and ln(1 + exp(that distance))."""
        width = np.exp(theta[..., 4:5])
        distance = (u - theta[..., 3:4]) / width
        bent = np.logaddexp(0.0, distance)
        power = theta[..., 2:3] - theta[..., 0:1] * u - theta[..., 1:2] * width * bent
        return power, distance, bent

    def jacobian(self, theta: Array, u: Array) -> Array:
        power, distance, bent = self._parts(theta, u)
        c1, width = theta[..., 1:2], np.exp(theta[..., 4:5])
        total = above_floor(power, theta[..., 5:6])
        share = np.exp(power - total)
        beyond = np.exp(distance - bent)  # the logistic function of the distance
        columns = [
            -share * u,
            -share * width * bent,
            share,
            share * c1 * beyond,
            -share * c1 * width * (bent - beyond * distance),
            inverse(total),
        ]
        return np.stack(np.broadcast_arrays(*columns), axis=-1)

    def bounds(self, v: Array) -> tuple[Array, Array]:
        edges = [(-20.0, 20.0), (-20.0, 20.0), (-60.0, 60.0), (-60.0, 60.0), (np.log(1e-3), np.log(30.0))]
        return floor_bounds(edges, v)

    def starts(self, u: Array, v: Array) -> Array:
        """A line on either side of each possible break, above each possible floor."""
        values = np.exp(v)
        found = []
        for share, quantile, width in product(self._floors, self._breaks, self._widths):
            floor, at = float(share * values.min()), float(np.quantile(u, quantile))
            above = np.log(values - floor)
            before, level = line(u[u <= at], above[u <= at])
            after, _ = line(u[u >= at], above[u >= at])
            found.append([-before, before - after, level, at, np.log(width), floor])
        return np.array(found)

    def predict(self, parameters: Mapping[str, float], c: Array) -> Array:
        p = parameters
        bent = np.logaddexp(0.0, np.log(c / p["d1"]) / p["f1"])
        return np.asarray(p["E0"] + np.exp(np.log(p["b"]) - p["c0"] * np.log(c) - p["c1"] * p["f1"] * bent))
