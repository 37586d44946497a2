"""The points of a fit: where they lie, what was measured there, and the run that each comes from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from openclip_scaling.errors import UserError
from openclip_scaling.forms.law import Array


@dataclass(frozen=True)
class Points:
    """Scale x, metric y (all positive and finite) and the run of each point; y has shape (points,).

    x has shape (points,), or (points, 2) for laws of two scales. The order of the rows never matters: they are
    kept sorted by x, y and run.
    """

    x: Array
    y: Array
    run: tuple[str, ...]

    def __post_init__(self) -> None:
        x, y = np.asarray(self.x, dtype=np.float64), np.asarray(self.y, dtype=np.float64)
        if not (x.ndim in (1, 2) and len(x) == len(self.run) and y.shape == (len(x),)):
            raise UserError(
                f"x, y and run need one value per point, not {x.shape}, {y.shape} and {len(self.run)}."
            )
        columns = x.reshape(len(x), -1)
        good = np.isfinite(columns) & (columns > 0)
        bad = ~(good.all(axis=1) & np.isfinite(y) & (y > 0))
        if bad.any():
            first = int(np.argmax(bad))
            scale = ", ".join(f"{value:g}" for value in columns[first])
            raise UserError(
                f"{int(bad.sum())} of {len(x)} points are not positive finite numbers "
                f"(first: x = {scale}, y = {y[first]:g}); a fit in logs cannot use them."
            )
        order = sorted(range(len(x)), key=lambda i: (*columns[i], y[i], self.run[i]))
        object.__setattr__(self, "x", x[order])
        object.__setattr__(self, "y", y[order])
        object.__setattr__(self, "run", tuple(self.run[i] for i in order))

    def __len__(self) -> int:
        return len(self.run)

    @property
    def scales(self) -> int:
        """How many scales each point has: 1 or 2."""
        return 1 if self.x.ndim == 1 else self.x.shape[1]

    @property
    def size(self) -> Array:
        """x, or the product of the scales, which goes as compute; shape (points,)."""
        return self.x if self.x.ndim == 1 else np.asarray(self.x.prod(axis=1))

    @property
    def centre(self) -> Array:
        """The geometric mean of each scale, shape (scales,)."""
        return np.atleast_1d(np.exp(np.log(self.x).mean(axis=0)))

    @property
    def runs(self) -> list[str]:
        """The names of the runs, sorted."""
        return sorted(set(self.run))

    @property
    def decades(self) -> float:
        """log10 of the ratio of the largest to the smallest size."""
        return float(np.log10(self.size.max() / self.size.min())) if len(self) else 0.0

    def take(self, rows: Sequence[int]) -> Points:
        """Some of the rows; a row may be taken more than once."""
        chosen = np.sort(np.asarray(rows, dtype=np.intp))
        # Rows of checked and sorted points need neither again, and resampling takes many.
        taken = object.__new__(Points)
        object.__setattr__(taken, "x", self.x[chosen])
        object.__setattr__(taken, "y", self.y[chosen])
        object.__setattr__(taken, "run", tuple(self.run[i] for i in chosen.tolist()))
        return taken

    def rows_of(self) -> dict[str, list[int]]:
        """The rows of every run, by its name, in the order of `runs`."""
        found: dict[str, list[int]] = {name: [] for name in self.runs}
        for row, name in enumerate(self.run):
            found[name].append(row)
        return found
