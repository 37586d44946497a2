"""The points of a fit, and which of them a fit uses: all, the last of each run, the frontier or bins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from openclip_scaling.errors import UserError
from openclip_scaling.laws import Array


@dataclass(frozen=True)
class Points:
    """Scale x, metric y (both positive and finite) and the run that each point comes from; shape (points,).

    The order of the rows never matters: they are kept sorted by x, y and run.
    """

    x: Array
    y: Array
    run: tuple[str, ...]

    def __post_init__(self) -> None:
        x, y = np.asarray(self.x, dtype=np.float64), np.asarray(self.y, dtype=np.float64)
        if not (x.ndim == 1 and x.shape == y.shape and len(x) == len(self.run)):
            raise UserError(
                f"x, y and run need one value per point, not {x.shape}, {y.shape} and {len(self.run)}."
            )
        bad = ~(np.isfinite(x) & np.isfinite(y) & (x > 0) & (y > 0))
        if bad.any():
            first = int(np.argmax(bad))
            raise UserError(
                f"{int(bad.sum())} of {len(x)} points are not positive finite numbers "
                f"(first: x = {x[first]:g}, y = {y[first]:g}); a fit in logs cannot use them."
            )
        order = sorted(range(len(x)), key=lambda i: (x[i], y[i], self.run[i]))
        object.__setattr__(self, "x", x[order])
        object.__setattr__(self, "y", y[order])
        object.__setattr__(self, "run", tuple(self.run[i] for i in order))

    def __len__(self) -> int:
        return len(self.run)

    @property
    def runs(self) -> list[str]:
        """The names of the runs, sorted."""
        return sorted(set(self.run))

    @property
    def decades(self) -> float:
        """log10 of the ratio of the largest to the smallest x."""
        return float(np.log10(self.x.max() / self.x.min())) if len(self) else 0.0

    def take(self, rows: list[int]) -> Points:
        """Some of the rows; a row may be taken more than once."""
        return Points(self.x[rows], self.y[rows], tuple(self.run[i] for i in rows))


def all_points(points: Points) -> Points:
    """Every checkpoint."""
    return points


def last_of_each_run(points: Points) -> Points:
    """The point with the largest x of every run."""
    last = {run: index for index, run in enumerate(points.run)}
    return points.take(sorted(last.values()))


def strict_frontier(points: Points) -> Points:
    """Points that are lower than every point at no larger x (the Pareto frontier of Cherti et al. 2022)."""
    rows: list[int] = []
    best = np.inf
    for index, value in enumerate(points.y):
        if value < best:
            rows.append(index)
            best = value
    return points.take(rows)


def lowest_per_bin(points: Points, bins: int = 5, margin: float = 0.1) -> Points:
    """The lowest y in equal-width bins of log10 x on [min, max + margin], placed at the centres of the bins.

    Five bins with a margin of 0.1 are the selection of Cherti et al. 2022. A point keeps its run's name.
    """
    logs = np.log10(points.x)
    edges = np.linspace(logs.min(), logs.max() + margin, bins + 1)
    which = np.clip(np.digitize(logs, edges) - 1, 0, bins - 1)
    lowest = [
        min(np.flatnonzero(which == b), key=lambda i: points.y[i]) for b in range(bins) if (which == b).any()
    ]
    centres = (edges[:-1] + edges[1:]) / 2
    x = 10.0 ** centres[[which[i] for i in lowest]]
    return Points(x, points.y[lowest], tuple(points.run[i] for i in lowest))


Selection = Callable[[Points], Points]
SELECTIONS: dict[str, Selection] = {
    "all": all_points,
    "ends": last_of_each_run,
    "frontier": strict_frontier,
    "bins": lowest_per_bin,
}


def selection_named(name: str) -> Selection:
    """The selection of that name. Raises UserError on a foreign name."""
    if name not in SELECTIONS:
        raise UserError(f"Unknown selection {name!r}; known selections: {', '.join(SELECTIONS)}.")
    return SELECTIONS[name]
