"""Which points a fit uses: all, the last of each run, the frontier, the convex hull or the lowest per bin."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from openclip_scaling.errors import UserError
from openclip_scaling.fitting.points import Points

Selection = Callable[[Points], Points]


def all_points(points: Points) -> Points:
    """Every checkpoint."""
    return points


def last_of_each_run(points: Points) -> Points:
    """The point of largest size of every run."""
    size = points.size
    return points.take(sorted(max(rows, key=lambda row: size[row]) for rows in points.rows_of().values()))


def strict_frontier(points: Points) -> Points:
    """Points that are lower than every point at no larger x (the Pareto frontier of Cherti et al. 2022)."""
    _one_scale(points, "frontier")
    rows: list[int] = []
    best = np.inf
    for index, value in enumerate(points.y):
        if value < best:
            rows.append(index)
            best = value
    return points.take(rows)


def lower_hull(points: Points) -> Points:
    """Corners of the lower convex hull in log-log, from the smallest x to the lowest y (Hoffmann et al. 2022).

    A part of the frontier: what straight lines in log-log between other points undercut is left out.
    """
    _one_scale(points, "hull")
    frontier = strict_frontier(points)
    logs = np.column_stack([np.log(frontier.x), np.log(frontier.y)])
    rows: list[int] = []
    for index in range(len(frontier)):
        while len(rows) > 1 and _turn(logs[rows[-2]], logs[rows[-1]], logs[index]) <= 0:
            rows.pop()
        rows.append(index)
    return frontier.take(rows)


def _turn(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> float:
    """Positive where the way from a over b to c turns left."""
    return float((b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0]))


def lowest_per_bin(points: Points, bins: int = 5, margin: float = 0.1) -> Points:
    """The lowest y in equal-width bins of log10 x on [min, max + margin], placed at the centres of the bins.

    Five bins with a margin of 0.1 are the selection of Cherti et al. 2022. A point keeps its run's name.
    """
    _one_scale(points, "bins")
    logs = np.log10(points.x)
    edges = np.linspace(logs.min(), logs.max() + margin, bins + 1)
    which = np.clip(np.digitize(logs, edges) - 1, 0, bins - 1)
    lowest = [
        min(np.flatnonzero(which == b), key=lambda i: points.y[i]) for b in range(bins) if (which == b).any()
    ]
    centres = (edges[:-1] + edges[1:]) / 2
    x = 10.0 ** centres[[which[i] for i in lowest]]
    return Points(x, points.y[lowest], tuple(points.run[i] for i in lowest))


def _one_scale(points: Points, name: str) -> None:
    if points.scales > 1:
        raise UserError(f"--points {name} needs one scale; with two use all or ends.")


BY_VALUE = (strict_frontier, lower_hull, lowest_per_bin)  # which points they take depends on noise
SELECTIONS: dict[str, Selection] = {
    "all": all_points,
    "ends": last_of_each_run,
    "frontier": strict_frontier,
    "hull": lower_hull,
    "bins": lowest_per_bin,
}


def by_value(selection: Selection) -> bool:
    """Whether the points that it takes depend on noise."""
    return selection in BY_VALUE or bool(getattr(selection, "by_value", False))


def selection_named(name: str) -> Selection:
    """The selection of that name. Raises UserError on a foreign name."""
    if name not in SELECTIONS:
        raise UserError(f"Unknown selection {name!r}; known selections: {', '.join(SELECTIONS)}.")
    return SELECTIONS[name]
