"""Laws of one scale made of one power: alone, above a floor, and with a shifted scale above a floor."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from openclip_scaling.forms.law import Array, Law, Parameter, inverse, line

_FLOORS = (0.0, 0.3, 0.6, 0.8, 0.9, 0.97, 0.999)  # of the lowest value observed


class PowerLaw(Law):
    """E = b C^a; falls when a < 0."""

    name = "power"
    formula = "E = b C^a"
    latex = r"E = b\,C^a"
    rising = 1
    roles = (Parameter("a", "exponent"), Parameter("b", "amplitude", exponent="a"))

    def log_predict(self, theta: Array, u: Array) -> Array:
        return np.asarray(theta[..., 1:2] + theta[..., 0:1] * u)

    def jacobian(self, theta: Array, u: Array) -> Array:
        u = np.broadcast_to(u, np.broadcast_shapes(u.shape, (*theta.shape[:-1], 1)))
        return np.stack([u, np.ones_like(u)], axis=-1)

    def bounds(self, v: Array) -> tuple[Array, Array]:
        edge = np.full((*v.shape[:-1], 2), np.inf)
        return -edge, edge

    def starts(self, u: Array, v: Array) -> Array:
        slope, level = line(u, v)
        return np.array([[slope, level], [slope / 2, level], [2 * slope, level], [0.0, float(np.median(v))]])

    def predict(self, parameters: Mapping[str, float], c: Array) -> Array:
        return np.asarray(np.exp(np.log(parameters["b"]) + parameters["a"] * np.log(c)))


class SaturatingLaw(Law):
    """E = E0 + b C^a with a <= 0, b >= 0 and 0 <= E0 <= the lowest observed E."""

    name = "saturating"
    formula = "E = E0 + b C^a"
    latex = r"E = E_0 + b\,C^a"
    rising = 1
    roles = (
        Parameter("a", "exponent"),
        Parameter("b", "amplitude", exponent="a"),
        Parameter("E0", "floor"),
    )

    def log_predict(self, theta: Array, u: Array) -> Array:
        return above_floor(theta[..., 1:2] + theta[..., 0:1] * u, theta[..., 2:3])

    def jacobian(self, theta: Array, u: Array) -> Array:
        power = theta[..., 1:2] + theta[..., 0:1] * u
        total = above_floor(power, theta[..., 2:3])
        share = np.exp(power - total)
        return np.stack([share * u, share, inverse(total)], axis=-1)

    def bounds(self, v: Array) -> tuple[Array, Array]:
        return floor_bounds([(-20.0, 0.0), (-60.0, 60.0)], v)

    def starts(self, u: Array, v: Array) -> Array:
        """Given a floor, the rest is a straight line in logs: a start per floor, and two neighbours in a."""
        found = []
        for floor, slope, level in lines_above_floors(u, v):
            found += [[slope * factor, level, floor] for factor in (1.0, 0.5, 2.0)]
        return np.array(found)

    def predict(self, parameters: Mapping[str, float], c: Array) -> Array:
        power = np.exp(np.log(max(parameters["b"], 1e-300)) + parameters["a"] * np.log(c))
        return np.asarray(parameters["E0"] + power)


class OffsetLaw(Law):
    """E = b (C + c)^a + E0 with a <= 0, b >= 0, c >= 0: flat below the scale c, then a power above a floor."""

    name = "offset"
    formula = "E = b (C + c)^a + E0"
    latex = r"E = b\,(C + c)^a + E_0"
    rising = 1
    roles = (
        Parameter("a", "exponent"),
        Parameter("b", "amplitude", exponent="a"),
        Parameter("c", "shift"),
        Parameter("E0", "floor"),
    )
    _shifts = (0.0, 0.3, 3.0)  # of the geometric mean of the scales

    def log_predict(self, theta: Array, u: Array) -> Array:
        shifted = np.log(np.exp(u) + theta[..., 2:3])
        return above_floor(theta[..., 1:2] + theta[..., 0:1] * shifted, theta[..., 3:4])

    def jacobian(self, theta: Array, u: Array) -> Array:
        shifted = np.log(np.exp(u) + theta[..., 2:3])
        power = theta[..., 1:2] + theta[..., 0:1] * shifted
        total = above_floor(power, theta[..., 3:4])
        share = np.exp(power - total)
        return np.stack(
            [share * shifted, share, share * theta[..., 0:1] * np.exp(-shifted), inverse(total)], axis=-1
        )

    def bounds(self, v: Array) -> tuple[Array, Array]:
        return floor_bounds([(-20.0, 0.0), (-60.0, 60.0), (0.0, 1e6)], v)

    def starts(self, u: Array, v: Array) -> Array:
        found = []
        for shift in self._shifts:
            shifted = np.log(np.exp(u) + shift)
            for floor, slope, level in lines_above_floors(shifted, v):
                found.append([slope, level, shift, floor])
        return np.array(found)

    def predict(self, parameters: Mapping[str, float], c: Array) -> Array:
        shifted = np.log(c + parameters["c"])
        power = np.exp(np.log(max(parameters["b"], 1e-300)) + parameters["a"] * shifted)
        return np.asarray(parameters["E0"] + power)


def above_floor(log_power: Array, floor: Array) -> Array:
    """ln(exp(log_power) + floor); a floor of 0 is -inf in logs, as it should be."""
    with np.errstate(divide="ignore"):
        return np.asarray(np.logaddexp(log_power, np.log(floor)))


def floor_bounds(edges: list[tuple[float, float]], v: Array) -> tuple[Array, Array]:
    """Fixed bounds of the first parameters, then a floor between 0 and the lowest value observed."""
    lowest = np.exp(v.min(axis=-1))[..., None]
    low, high = (
        np.broadcast_to(np.array(side), (*v.shape[:-1], len(edges))) for side in zip(*edges, strict=True)
    )
    return np.concatenate([low, np.zeros_like(lowest)], axis=-1), np.concatenate([high, lowest], axis=-1)


def lines_above_floors(u: Array, v: Array) -> list[tuple[float, float, float]]:
    """Floor, slope (falling) and level of the straight line through the logs of what lies above each floor."""
    values = np.exp(v)
    found = []
    for share in _FLOORS:
        floor = float(share * values.min())
        slope, level = line(u, np.log(values - floor))
        found.append((floor, min(slope, -1e-3), level))
    return found
