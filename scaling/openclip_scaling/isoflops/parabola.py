"""A parabola through ln E against ln size, where it is lowest, and how well that is known."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import stats

from openclip_scaling.fitting.points import Points
from openclip_scaling.fitting.uncertainty import LEVEL, MINIMUM_RUNS
from openclip_scaling.forms.law import Array, exp

_STRAIGHT = 1e-9  # of ln E over all sizes: less bend than that is rounding


@dataclass(frozen=True)
class Minimum:
    """Where a curve of equal compute is lowest: the size, the metric there, and the interval of the size.

    interval is None where there is none; reliable is False where it rests on fewer than MINIMUM_RUNS runs.
    """

    size: float
    value: float
    interval: tuple[float, float] | None
    reliable: bool

    @property
    def label(self) -> str:
        """The size with its interval, and a word where that is not to be relied on."""
        if self.interval is None:
            return f"{self.size:.3g} (no interval)"
        text = f"{self.size:.3g} [{self.interval[0]:.3g}, {self.interval[1]:.3g}]"
        return text if self.reliable else f"{text}, not reliable"


@dataclass(frozen=True)
class Parabola:
    """ln E = c + b u + a u^2 with u = ln(size / centre), by least squares; covariance is that of (a, b, c).

    covariance is None without degrees of freedom, as with three points.
    """

    centre: float
    a: float
    b: float
    c: float
    covariance: Array | None
    degrees: int

    def predict(self, sizes: Array) -> Array:
        """E at the sizes."""
        u = np.log(sizes / self.centre)
        return np.asarray(np.exp(self.c + self.b * u + self.a * u**2))

    @property
    def vertex(self) -> float | None:
        """The size at which it is lowest, infinite beyond every float; None where it bends down or is straight."""
        return self.centre * float(exp(-self.b / (2 * self.a))) if self.a > 0 else None

    def vertex_interval(self) -> tuple[float, float] | None:
        """The sizes at which a t test does not tell the slope b + 2 a u from 0 (Fieller 1954).

        None without degrees of freedom, and where the curvature itself is not certain: no size is then excluded on
        one side.
        """
        if self.covariance is None:
            return None
        t = float(stats.t.ppf((1 + LEVEL) / 2, self.degrees))
        aa, ab, bb = t**2 * self.covariance[[0, 0, 1], [0, 1, 1]]
        # (b + 2 a u)^2 <= bb + 4 u ab + 4 u^2 aa, a quadratic inequality in u
        square, half, rest = 4 * (self.a**2 - aa), 2 * (self.a * self.b - ab), self.b**2 - bb
        if not (square > 0 and half**2 >= square * rest):
            return None
        root = np.sqrt(half**2 - square * rest)
        edges = [self.centre * float(exp((sign * root - half) / square)) for sign in (-1, 1)]
        return edges[0], edges[1]


def fit_parabola(points: Points) -> Parabola:
    """Least squares in ln E; the points, one for each run, must lie at three different sizes at least."""
    centre = float(points.centre[0])
    u, v = np.log(points.x / centre), np.log(points.y)
    design = np.column_stack([u**2, u, np.ones_like(u)])
    solution = np.linalg.lstsq(design, v, rcond=None)[0]
    degrees = len(u) - 3
    covariance = None
    if degrees > 0:
        variance = float(((v - design @ solution) ** 2).sum()) / degrees
        covariance = variance * np.linalg.inv(design.T @ design)
    a, b, c = map(float, solution)
    return Parabola(centre, a, b, c, covariance, degrees)


def minimum_within(parabola: Parabola, points: Points) -> Minimum | str:
    """The minimum where it lies among the sizes of the points, else a sentence on where it is."""
    smallest, largest = float(points.x.min()), float(points.x.max())
    vertex = parabola.vertex
    if vertex is None or parabola.a * np.log(largest / smallest) ** 2 < _STRAIGHT:
        return "the curve does not bend upwards, so it has no minimum"
    if vertex > largest:
        return "the metric still falls at the largest size, so the minimum lies beyond it"
    if vertex < smallest:
        return "the metric rises from the smallest size on, so the minimum lies below it"
    value = float(parabola.predict(np.array([vertex]))[0])
    return Minimum(vertex, value, parabola.vertex_interval(), len(points.runs) >= MINIMUM_RUNS)
