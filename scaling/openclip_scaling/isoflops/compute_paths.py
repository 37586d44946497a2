"""How the metric of every model size fell with training compute, and at which compute enough sizes can be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from openclip_scaling.errors import UserError
from openclip_scaling.fitting.points import Points
from openclip_scaling.fitting.selections import last_of_each_run
from openclip_scaling.forms.law import Array

MINIMUM_SIZES = 3
_BUDGETS = 4
_STEPS = 400  # of the search for budgets that enough sizes reach
_NEAR = 0.02  # of ln FLOP: runs that are planned for equal compute end with a whole batch, so a little off


@dataclass(frozen=True)
class ComputePath:
    """How the metric of one size fell with compute: logs of FLOP, rising, and of the metric."""

    name: str
    size: float
    flop: Array
    metric: Array

    def at(self, log_flop: float) -> float | None:
        """ln of the metric, or None beyond the checkpoints; what is near the first or the last has its value."""
        if not self.flop[0] - _NEAR <= log_flop <= self.flop[-1] + _NEAR:
            return None
        return float(np.interp(log_flop, self.flop, self.metric))


def paths_of(points: Points, ends: bool) -> list[ComputePath]:
    """A path for each run, or, of the `ends` of runs only, one for each size; x of the points is (FLOP, size)."""
    used = last_of_each_run(points) if ends else points
    rows: dict[tuple[str, float], list[int]] = {}
    for row, run in enumerate(used.run):
        size = float(used.x[row, 1])
        rows.setdefault((f"size {size:.4g}" if ends else run, size), []).append(row)
    return [_path(name, size, used, own) for (name, size), own in rows.items()]


def _path(name: str, size: float, points: Points, rows: Sequence[int]) -> ComputePath:
    """Rows in order of compute; those at one compute become their geometric mean."""
    flop, where = np.unique(np.log(points.x[rows, 0]), return_inverse=True)
    metric = np.bincount(where, weights=np.log(points.y[rows])) / np.bincount(where)
    return ComputePath(name, size, flop, metric)


def points_at(paths: Sequence[ComputePath], flop: float) -> Points | None:
    """What every path had at a budget, or None where that are fewer than three sizes."""
    found = [(path, value) for path in paths if (value := path.at(float(np.log(flop)))) is not None]
    if len({path.size for path, _ in found}) < MINIMUM_SIZES:
        return None
    sizes = np.array([path.size for path, _ in found])
    return Points(sizes, np.exp([value for _, value in found]), tuple(path.name for path, _ in found))


def budgets_of(
    paths: Mapping[str, Sequence[ComputePath]], budgets: Sequence[float], size: str
) -> list[float]:
    """The given budgets, or some that enough sizes reach. Raises UserError where there is none."""
    counts = {group: len({path.size for path in own}) for group, own in paths.items()}
    if max(counts.values()) < MINIMUM_SIZES:
        listed = ", ".join(f"{group}: {count}" for group, count in counts.items())
        raise UserError(
            f"Curves of equal compute need at least {MINIMUM_SIZES} model sizes ({size}), and there are fewer "
            f"({listed})."
        )
    groups = list(paths.values())
    own = np.unique(np.concatenate([path.flop for group in groups for path in group]))
    reached = _reached(groups, np.union1d(own, np.linspace(own[0], own[-1], _STEPS)))
    if not len(reached):
        raise UserError(
            f"No training compute was reached by {MINIMUM_SIZES} model sizes ({size}), so there is no curve of equal "
            "compute; train the small models on more samples, or keep earlier checkpoints of the large ones."
        )
    low, high = np.exp(reached[[0, -1]])
    for flop in budgets:
        if not any(points_at(own, flop) for own in paths.values() if flop > 0):
            raise UserError(
                f"--budget {flop:g}: fewer than {MINIMUM_SIZES} model sizes have checkpoints on both sides of it; "
                f"budgets between {low:.3g} and {high:.3g} FLOP can be drawn."
            )
    return sorted(set(budgets)) or _spread(_places(groups, reached, own), paths)


def _reached(groups: Sequence[Sequence[ComputePath]], logs: Array) -> Array:
    """Of rising ln FLOP those that enough sizes reach in every group, or, where there is none, in any."""
    enough = np.array([_sizes_at(paths, logs) >= MINIMUM_SIZES for paths in groups])
    everywhere = enough.all(axis=0)
    return logs[everywhere if everywhere.any() else enough.any(axis=0)]


def _places(groups: Sequence[Sequence[ComputePath]], reached: Array, own: Array) -> Array:
    """ln FLOP to choose from, apart from each other: where all sizes have checkpoints, if there are two such places.

    Runs that were planned for equal compute are so compared where they ended, without interpolation.
    """
    at_points = np.intersect1d(reached, own)
    measured = np.ones(len(at_points), dtype=bool)
    for paths in groups:
        sizes = _sizes_at(paths, at_points)
        measured &= (sizes < MINIMUM_SIZES) | (sizes == _sizes_at(paths, at_points, interpolated=False))
    found = _apart(at_points[measured])
    return found if len(found) > 1 else _apart(reached)


def _apart(logs: Array) -> Array:
    """Rising values without those that are near to the one before."""
    kept: list[float] = []
    for value in logs.tolist():
        if not kept or value > kept[-1] + 2 * _NEAR:
            kept.append(value)
    return np.array(kept)


def _sizes_at(paths: Sequence[ComputePath], logs: Array, *, interpolated: bool = True) -> Array:
    """How many sizes have a checkpoint at each ln FLOP or, interpolated, on both sides of it."""
    sizes = sorted({path.size for path in paths})
    seen = np.zeros((len(sizes), len(logs)), dtype=bool)
    for path in paths:
        if interpolated:
            found = (path.flop[0] - _NEAR <= logs) & (logs <= path.flop[-1] + _NEAR)
        else:
            found = (np.abs(logs[:, None] - path.flop) <= _NEAR).any(axis=1)
        seen[sizes.index(path.size)] |= found
    return np.asarray(seen.sum(axis=0))


def _spread(places: Array, paths: Mapping[str, Sequence[ComputePath]]) -> list[float]:
    """Budgets spread over the places, with three digits where that loses no path.

    Fewer digits would leave the compute for which runs were planned.
    """
    inner = np.linspace(0, len(places) - 1, _BUDGETS + 2)[1:-1].round().astype(int)
    found = set()
    for flop in np.exp(places if len(places) <= _BUDGETS else places[inner]).tolist():
        short = float(f"{flop:.3g}")
        found.add(short if all(_count(own, short) >= _count(own, flop) for own in paths.values()) else flop)
    return sorted(found)


def _count(paths: Sequence[ComputePath], flop: float) -> int:
    return len(points_at(paths, flop) or ())
