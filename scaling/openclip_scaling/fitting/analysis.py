"""From a table of checkpoints to fits of every group, with what the reader of them must know."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from openclip_scaling.errors import UserError
from openclip_scaling.fitting.best_rate import AtBestRate
from openclip_scaling.fitting.experiments import Plan
from openclip_scaling.fitting.fit import Fit, fit_law
from openclip_scaling.fitting.loss import Loss
from openclip_scaling.fitting.metrics import Metric, axis_label, metric_named, numbers
from openclip_scaling.fitting.points import Points
from openclip_scaling.fitting.selections import selection_named
from openclip_scaling.fitting.settings import Settings
from openclip_scaling.fitting.table import groups_of
from openclip_scaling.fitting.uncertainty import Bootstrap, bootstrap, seed_for
from openclip_scaling.forms.law import Law
from openclip_scaling.forms.laws import LAWS, law_named

__all__ = ["Analysis", "GroupFit", "Progress", "Settings", "analyse", "fitted", "laws_of", "remarks_on"]

_COMPUTE = ("train_flop", "hours")
_WORTH_SAYING = 0.1  # share of resamples left out that the reader should know of
Progress = Callable[[str], None]


@dataclass(frozen=True)
class GroupFit:
    """One law fitted to one group: selected points, fit, and its resampling over runs."""

    group: str
    fit: Fit
    boot: Bootstrap

    @property
    def notices(self) -> list[str]:
        """What the reader of this fit must know."""
        found = list(self.fit.notices)
        if self.boot.notice:
            found.append(self.boot.notice)
        open_names = [
            role.name
            for role in self.fit.law.roles
            if role.kind != "amplitude" and role.name in self.boot.intervals
            if not self.boot.intervals[role.name].identified
        ]
        if open_names:
            found.append(f"not identified: {', '.join(open_names)}")
        draws = self.boot.failed + len(self.boot.thetas)
        if self.boot.reselected and self.boot.failed > _WORTH_SAYING * draws:
            found.append(
                f"{self.boot.failed} of {draws} resamples had too few different scales and are left out"
            )
        return found

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready numbers."""
        fit, boot = self.fit, self.boot
        return {
            "group": self.group,
            "law": fit.law.name,
            "formula": fit.law.formula,
            "parameters": fit.parameters,
            "intervals95": {k: [v.low, v.high] for k, v in boot.intervals.items()},
            "bootstrap95": boot.percentiles(),
            "identified": {k: v.identified for k, v in boot.intervals.items()},
            "reliable": boot.reliable,
            "standard_errors": fit.standard_errors,
            "degrees_of_freedom": fit.degrees_of_freedom,
            "points": len(fit.points),
            "runs": boot.runs,
            "decades": fit.points.decades,
            "loss": fit.loss.name,
            "objective": fit.objective,
            "rmse_log": fit.rmse,
            "aic": fit.aic,
            "starts": fit.starts,
            "starts_at_optimum": fit.starts_at_optimum,
            "condition": fit.condition,
            "notices": self.notices,
        }


@dataclass
class Analysis:
    """All fits of one metric; points holds every usable point by group (of a sweep those at the best rates)."""

    settings: Settings
    metric: Metric
    fits: list[GroupFit]
    points: dict[str, Points]
    notices: list[str] = field(default_factory=list)

    @property
    def x_label(self) -> str:
        return " and ".join(axis_label(column) for column in self.settings.scales)

    @property
    def remarks(self) -> list[str]:
        """Every notice once, with the fits that it belongs to."""
        return [*remarks_on(self.fits), *self.notices]

    def by_law(self, law: str) -> dict[str, GroupFit]:
        """The fits of one law, by group."""
        return {item.group: item for item in self.fits if item.fit.law.name == law}

    def boots(self, law: str) -> dict[str, Bootstrap]:
        """What comparisons take: the resamples of the fits of one law, by group."""
        return {group: item.boot for group, item in self.by_law(law).items()}


def remarks_on(fits: Sequence[GroupFit]) -> list[str]:
    """The notices of several fits, each once, with the fits that it belongs to."""
    where: dict[str, list[str]] = {}
    for item in fits:
        for text in item.notices:
            where.setdefault(text, []).append(f"{item.group} ({item.fit.law.name})")
    everywhere = len(fits) if len(fits) > 1 else 2
    return [
        f"{'all fits' if len(names) == everywhere else ', '.join(names)}: {text}"
        for text, names in where.items()
    ]


def analyse(frame: pd.DataFrame, settings: Settings, progress: Progress | None = None) -> Analysis:
    """Fit every group. Raises UserError when nothing can be fitted, or batch sizes would be mixed."""
    notices: list[str] = []
    laws = laws_of(settings)
    metric = metric_named(settings.metric).on(frame, notices)
    groups = groups_of(frame, settings, metric, notices)
    several = any(len(points.runs) < len(points) for points in groups.chosen.values())
    if settings.points == "all" and several and not _constant_rate(frame):
        notices.append(
            "checkpoints before the end of a run are taken before its learning rate has decayed, unless it is "
            "constant; --points ends uses the last of each run only"
        )
    if settings.points == "all" and settings.x in _COMPUTE and several and _several_sizes(frame):
        notices.append(
            "model sizes are fitted together, so at one compute a small model after many samples stands beside a "
            "large one after few; --points frontier fits only what is best at its compute"
        )
    fits: list[GroupFit] = []
    failures: dict[str, list[str]] = {}
    for group, points in groups.everything.items():
        for law in laws:
            if progress:
                progress(f"{group}: {law.name}")
            try:
                fits.append(fitted(group, points, law, settings, groups.plans[group]))
            except UserError as error:
                failures.setdefault(f"no {law.name} fit: {error}", []).append(group)
    unfitted = [f"{', '.join(named)}: {reason}" for reason, named in failures.items()]
    if not fits:
        raise UserError(f"Nothing could be fitted to {metric.column}. {' '.join(unfitted)}")
    return Analysis(settings, metric, fits, groups.chosen, [*notices, *unfitted])


def laws_of(settings: Settings) -> list[Law]:
    """The laws of the settings. Raises UserError on a foreign name, and where --x does not fit a law."""
    laws = [law_named(name) for name in settings.laws]
    for law in laws:
        if law.scales != len(settings.scales):
            raise UserError(_wrong_scales(law))
    if len(set(settings.scales)) < len(settings.scales):
        raise UserError(f"--x {settings.x} names one column twice; a law of two scales needs two columns.")
    return laws


def fitted(group: str, points: Points, law: Law, settings: Settings, plan: Plan | None = None) -> GroupFit:
    """The law fitted to the selected points of a group, in a sweep to those at the best learning rates.

    Raises UserError where they cannot fix it.
    """
    select = selection_named(settings.points)
    if plan and plan.swept:
        select = AtBestRate(plan.runs, select)
    fit = fit_law(select(points), law, Loss(settings.delta, settings.residuals))
    units = plan.units() if plan else None
    boot = bootstrap(points, fit, select, settings.draws, seed_for(group, settings.seed), units)
    return GroupFit(group, fit, boot)


def _wrong_scales(law: Law) -> str:
    if law.scales == 1:
        others = ", ".join(other.name for other in LAWS.values() if other.scales > 1)
        return f"The law {law.name} takes one column of --x; laws of two are {others}."
    return (
        f"The law {law.name} takes two columns of --x, a model size and a number of samples, "
        "such as --x gmac_per_pair,samples_seen."
    )


def _several_sizes(frame: pd.DataFrame) -> bool:
    """Whether the largest model costs more than attention kinds of one size differ by."""
    if "gmac_per_pair" not in frame.columns:
        return False
    cost = numbers(frame, "gmac_per_pair")
    cost = cost[np.isfinite(cost)]
    return bool(cost.size) and float(cost.max()) > 1.25 * float(cost.min())


def _constant_rate(frame: pd.DataFrame) -> bool:
    """Whether every run is known to keep its learning rate after warm-up."""
    return "lr_schedule" in frame.columns and bool((frame["lr_schedule"].astype(str) == "const").all())
