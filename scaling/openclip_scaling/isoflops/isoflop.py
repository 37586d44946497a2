"""Metric against model size at equal training compute, one curve for each budget (Hoffmann et al. 2022, approach 2).

The metric of every run at a budget is interpolated between its checkpoints, straight in log-log, and never beyond
them. The curve is a parabola through these points, or, where a law of two scales was fitted, that law.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd

from openclip_scaling.errors import UserError
from openclip_scaling.fitting.analysis import Analysis, GroupFit
from openclip_scaling.fitting.metrics import Metric, axis_label, metric_named
from openclip_scaling.fitting.optimum import best_split
from openclip_scaling.fitting.points import Points
from openclip_scaling.fitting.settings import Settings
from openclip_scaling.fitting.table import grouped_points
from openclip_scaling.flops import FLOP_PER_MAC, TRAINING_FACTOR
from openclip_scaling.forms.law import Array
from openclip_scaling.isoflops.compute_paths import ComputePath, budgets_of, paths_of, points_at
from openclip_scaling.isoflops.parabola import Minimum, fit_parabola, minimum_within

SIZE = "gmac_per_pair"
_FLOP_PER_UNIT = (
    TRAINING_FACTOR * FLOP_PER_MAC * 1e9
)  # of training, for a GMAC of the forward pass and a pair
_GRID = 80  # sizes at which a curve is drawn


@dataclass(frozen=True)
class IsoFlop:
    """One group at one training compute (flop).

    points has the size as x and a point for each run; sizes and values are the curve. remark says why there is no
    minimum, or is empty.
    """

    group: str
    flop: float
    points: Points
    sizes: Array
    values: Array
    minimum: Minimum | None
    remark: str

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready numbers."""
        found = None if self.minimum is None else asdict(self.minimum)
        return {"group": self.group, "train_flop": self.flop, "runs": len(self.points.runs), "minimum": found,
                "remark": self.remark}  # fmt: skip


@dataclass(frozen=True)
class IsoFlopView:
    """The curves of all groups; size is the column along x, curve what was drawn through the points.

    groups has those without a curve too, where no three sizes have a common compute.
    """

    metric: Metric
    size: str
    curve: str
    groups: list[str]
    profiles: list[IsoFlop]
    notices: list[str] = field(default_factory=list)

    @property
    def budgets(self) -> list[float]:
        """Training FLOP, rising."""
        return sorted({profile.flop for profile in self.profiles})

    @property
    def drawn(self) -> list[str]:
        """The groups that have a curve."""
        return list(dict.fromkeys(profile.group for profile in self.profiles))

    @property
    def sentences(self) -> list[str]:
        """Where each curve is lowest, or why that is not known."""
        unit = axis_label(self.size)
        found = [f"{p.group} at {p.flop:.3g} FLOP: lowest at {p.minimum.label}, {unit}" if p.minimum
                 else f"{p.group} at {p.flop:.3g} FLOP: {p.remark}" for p in self.profiles]  # fmt: skip
        bare = [group for group in self.groups if group not in self.drawn]
        return [
            *found,
            *(f"{group}: no curve, fewer than three sizes have a common compute" for group in bare),
        ]


def isoflop(
    frame: pd.DataFrame, settings: Settings, size: str = SIZE, budgets: Sequence[float] = ()
) -> IsoFlopView:
    """Parabolas at the budgets, in training FLOP, or at four that are reached by three sizes or more.

    Every run is followed through its checkpoints; with points "ends" the ends of the runs of one size are joined
    instead. Other selections are not made. Raises UserError where fewer than three sizes have a common compute.
    """
    notices: list[str] = []
    if settings.points not in ("all", "ends"):
        notices.append(
            f"curves of equal compute follow every run; --points {settings.points} is not used for them"
        )
    metric = metric_named(settings.metric).on(frame, notices)
    columns = replace(settings, x=f"train_flop,{size}")
    groups = grouped_points(frame, columns, metric, notices)
    paths = {group: paths_of(points, settings.points == "ends") for group, points in groups.items()}
    chosen = budgets_of(paths, budgets, size)
    profiles = [
        _parabola(group, flop, points)
        for group, own in paths.items()
        for flop in chosen
        if (points := points_at(own, flop)) is not None
    ]
    return IsoFlopView(metric, size, "parabola in logs", list(paths), profiles, notices)


def law_isoflop(analysis: Analysis, law: str, budgets: Sequence[float] = ()) -> IsoFlopView:
    """The same points with the curves and minima of a fitted law of two scales.

    Raises UserError where there is no fit of that law, and unless its scales are GMAC per pair and samples seen,
    for which training FLOP are known.
    """
    if analysis.settings.scales != (SIZE, "samples_seen"):
        raise UserError(
            f"Curves of equal compute take --x {SIZE},samples_seen for the law {law}: "
            "only their product is known in FLOP."
        )
    fits = analysis.by_law(law)
    if not fits:
        raise UserError(f"There is no fit of the law {law!r} to draw.")
    paths = {group: _law_paths(analysis, analysis.points[group]) for group in fits}
    chosen = budgets_of(paths, budgets, SIZE)
    profiles = [
        _of_law(item, flop, points)
        for group, item in fits.items()
        for flop in chosen
        if (points := points_at(paths[group], flop)) is not None
    ]
    return IsoFlopView(analysis.metric, SIZE, f"{law} law", list(paths), profiles)


def _law_paths(analysis: Analysis, points: Points) -> list[ComputePath]:
    flop = _FLOP_PER_UNIT * points.x.prod(axis=1)
    at_compute = Points(np.column_stack([flop, points.x[:, 0]]), points.y, points.run)
    return paths_of(at_compute, analysis.settings.points == "ends")


def _parabola(group: str, flop: float, points: Points) -> IsoFlop:
    parabola = fit_parabola(points)
    found = minimum_within(parabola, points)
    sizes = _grid(points)
    minimum, remark = (None, found) if isinstance(found, str) else (found, "")
    return IsoFlop(group, flop, points, sizes, parabola.predict(sizes), minimum, remark)


def _of_law(item: GroupFit, flop: float, points: Points) -> IsoFlop:
    sizes = _grid(points)
    values = item.fit.predict(np.column_stack([sizes, flop / (_FLOP_PER_UNIT * sizes)]))
    minimum, remark = None, ""
    try:
        best = best_split(item.boot, flop, _FLOP_PER_UNIT)
    except UserError as error:
        remark = str(error)
    else:
        if sizes[0] <= best["first"] <= sizes[-1]:
            minimum = Minimum(best["first"], best["predicted"], best["first_interval95"], best["reliable"])
        else:
            remark = f"the law is lowest at {best['first']:.3g}, beyond these sizes"
    return IsoFlop(item.group, flop, points, sizes, values, minimum, remark)


def _grid(points: Points) -> Array:
    return np.geomspace(float(points.x.min()) / 1.1, float(points.x.max()) * 1.1, _GRID)
