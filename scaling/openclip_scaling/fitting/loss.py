"""The objective of a fit: a SUM over points of rho(residual), with rho(r) = r^2/2 or the Huber function."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from openclip_scaling.errors import UserError
from openclip_scaling.forms.law import Array

Space = Literal["log", "log1p", "raw"]
SPACES: tuple[str, ...] = get_args(Space)


@dataclass(frozen=True)
class Loss:
    """Least squares (delta None), or Huber with its corner at delta, of residuals in one space.

    space "log": ln E, so that delta is about a relative error; "raw": E itself, and delta has its unit; "log1p":
    ln(1 + E), the choice of Caballero et al. (2022), which depends on the unit of E. unit is what 1 stands for
    in the values that the loss is given. Raises UserError on an impossible delta or a foreign space.
    """

    delta: float | None = None
    space: str = "log"
    unit: float = 1.0

    def __post_init__(self) -> None:
        if self.delta is not None and not (math.isfinite(self.delta) and self.delta > 0):
            raise UserError(f"The Huber delta must be a positive number, not {self.delta!r}.")
        if self.space not in SPACES:
            raise UserError(f"Unknown residuals {self.space!r}; use {', '.join(SPACES)}.")

    @property
    def name(self) -> str:
        kind = "least squares" if self.delta is None else f"Huber (delta {self.delta:g})"
        return kind if self.space == "log" else f"{kind} of {self.space} residuals"

    def values(self, logs: Array) -> Array:
        """What residuals are differences of, from ln(E / unit)."""
        if self.space == "log":
            return logs
        values = self.unit * np.exp(logs)
        return np.asarray(values if self.space == "raw" else np.log1p(values))

    def slope(self, logs: Array) -> Array:
        """Derivative of `values`."""
        if self.space == "log":
            return np.ones_like(logs)
        values = self.unit * np.exp(logs)
        return np.asarray(values if self.space == "raw" else values / (1 + values))

    def rho(self, residuals: Array) -> Array:
        """What each residual adds to the objective."""
        size = np.abs(residuals)
        if self.delta is None:
            return np.asarray(0.5 * size**2)
        inside = np.minimum(size, self.delta)
        return np.asarray(inside * (size - 0.5 * inside))
