"""The table of a sweep: a metric at the end of training by learning rate, a row per group, size and samples."""

from __future__ import annotations

import numpy as np
import pandas as pd

from openclip_scaling.errors import UserError
from openclip_scaling.fitting.best_rate import AtBestRate
from openclip_scaling.fitting.experiments import Plan
from openclip_scaling.fitting.metrics import metric_named
from openclip_scaling.fitting.points import Points
from openclip_scaling.fitting.selections import last_of_each_run
from openclip_scaling.fitting.settings import Settings
from openclip_scaling.fitting.table import groups_of
from openclip_scaling.reporting.markdown import escaped


def sweep_table(frame: pd.DataFrame, settings: Settings) -> str:
    """A markdown table with a row per group and cell of size and samples, and a column per learning rate.

    Numbers are geometric means over seeds; the rate that the fits take is in bold, and a dash is a rate that was not
    tried or did not end. Empty where nothing is swept, or nothing can be read.
    """
    metric = metric_named(settings.metric)
    try:
        groups = groups_of(frame, settings, metric.on(frame, []), [])
    except UserError:  # said where the fit is missing
        return ""
    swept = {group: plan for group, plan in groups.plans.items() if plan.swept}
    rates = sorted({rate for plan in swept.values() for tried in plan.rates.values() for rate in tried})
    if not rates:
        return ""
    heads = [settings.by, "size, samples", *(f"{rate:g}" for rate in rates)]
    rows = [
        f"{metric.label} at the end of training by learning rate; in bold, the best of those with the most runs, which "
        "the fits use:",
        "",
        f"| {' | '.join(map(escaped, heads))} |",
        "|" + "---|" * len(heads),
    ]
    for group, plan in swept.items():
        for cell, numbers in _cells(groups.everything[group], plan, rates).items():
            rows.append("| " + " | ".join([escaped(group), escaped(cell), *numbers]) + " |")
    return "\n".join(rows)


def _cells(points: Points, plan: Plan, rates: list[float]) -> dict[str, list[str]]:
    """For every cell the numbers of its rates, as text; cells in the order of their scale."""
    ends: dict[tuple[str, float | None], list[float]] = {}
    last = last_of_each_run(points)
    for run, value in zip(last.run, last.y.tolist(), strict=True):
        ends.setdefault((plan.runs[run].cell, plan.runs[run].rate), []).append(value)
    best = AtBestRate(plan.runs).chosen(points)

    def number(cell: str, rate: float) -> str:
        if (cell, rate) not in ends:
            return "-"
        mean = f"{np.exp(np.mean(np.log(ends[cell, rate]))):.4g}"
        return f"**{mean}**" if rate == best[cell] else mean

    return {cell: [number(cell, rate) for rate in rates] for cell in best}
