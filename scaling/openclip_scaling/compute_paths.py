"""How the metric of every model size fell with training compute, and at which compute enough sizes can be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from openclip_scaling.errors import UserError
from openclip_scaling.law import Array
from openclip_scaling.points import Points
from openclip_scaling.selections import last_of_each_run

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
    reached = _reached(list(paths.values()))
    if not len(reached):
        raise UserError(
            f"No training compute was reached by {MINIMUM_SIZES} model sizes ({size}), so there is no curve of equal "
            "compute; train the small models on more samples, or keep earlier checkpoints of the large ones."
        )
    low, high = reached[0], reached[-1]
    for flop in budgets:
        if not any(points_at(own, flop) for own in paths.values() if flop > 0):
            raise UserError(
                f"--budget {flop:g}: fewer than {MINIMUM_SIZES} model sizes have checkpoints on both sides of it; "
                f"budgets between {low:.2g} and {high:.2g} FLOP can be drawn."
            )
    return sorted(set(budgets)) or _spread(reached, paths)


def _reached(groups: Sequence[Sequence[ComputePath]]) -> Array:
    """FLOP, rising, that enough sizes reach in every group, or, where there is none, in any."""
    own = np.unique(np.concatenate([path.flop for paths in groups for path in paths]))
    logs = np.sort(np.concatenate([own, np.linspace(own[0], own[-1], _STEPS)]))
    enough = np.array([_sizes_at(paths, logs) >= MINIMUM_SIZES for paths in groups])
    everywhere = enough.all(axis=0)
    return np.asarray(np.exp(logs[everywhere if everywhere.any() else enough.any(axis=0)]))


def _sizes_at(paths: Sequence[ComputePath], logs: Array) -> Array:
    """How many sizes have checkpoints on both sides of each compute."""
    sizes = sorted({path.size for path in paths})
    seen = np.zeros((len(sizes), len(logs)), dtype=bool)
    for path in paths:
        seen[sizes.index(path.size)] |= (path.flop[0] - _NEAR <= logs) & (logs <= path.flop[-1] + _NEAR)
    return np.asarray(seen.sum(axis=0))


def _spread(reached: Array, paths: Mapping[str, Sequence[ComputePath]]) -> list[float]:
    """Budgets spread over what is reached, with three digits where that loses no path.

    Fewer digits would leave the compute for which runs were planned.
    """
    apart: list[float] = []
    for flop in reached.tolist():
        if not apart or flop > apart[-1] * (1 + 2 * _NEAR):
            apart.append(flop)
    inner = np.linspace(0, len(apart) - 1, _BUDGETS + 2)[1:-1].round().astype(int)
    found = set()
    for flop in (apart[place] for place in inner):
        short = float(f"{flop:.3g}")
        found.add(short if all(_count(own, short) >= _count(own, flop) for own in paths.values()) else flop)
    return sorted(found)


def _count(paths: Sequence[ComputePath], flop: float) -> int:
    return len(points_at(paths, flop) or ())
