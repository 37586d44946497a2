"""Each group at its own best learning rate, where its runs sweep it.

In every cell of size and samples the runs at one rate are kept: that whose metric at the end is the lowest, by the
mean of its logarithm over seeds. A rate with fewer runs than another one of its cell is not chosen, since those that
are missing may have diverged. The choice is a selection of points, so that it is made again for every set of runs;
all rates of an experiment are left out or drawn together.

The lowest of several ends is low by chance too. Groups with as many rates gain alike by that, and a notice says
where the numbers of rates differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from openclip_scaling.fitting.experiments import Experiment, Plan
from openclip_scaling.fitting.points import Points
from openclip_scaling.fitting.selections import Selection, all_points, by_value, last_of_each_run


@dataclass(frozen=True)
class AtBestRate:
    """A selection among the runs at the best rate of each cell."""

    runs: Mapping[str, Experiment]
    then: Selection = all_points

    @property
    def by_value(self) -> bool:
        """Whether what is taken changes with the runs: with one run at each rate of a cell it stays the same."""
        of_rates = [(run.cell, run.rate) for run in self.runs.values()]
        return by_value(self.then) or len(set(of_rates)) < len(of_rates)

    def __call__(self, points: Points) -> Points:
        best = self.chosen(points)
        keep = {run for run in points.runs if self.runs[run].rate == best[self.runs[run].cell]}
        return self.then(points.take([row for row, run in enumerate(points.run) if run in keep]))

    def chosen(self, points: Points) -> dict[str, float | None]:
        """The best rate of every cell among these points."""
        ends: dict[str, dict[float | None, list[float]]] = {}
        last = last_of_each_run(points)
        for run, value in zip(last.run, np.log(last.y).tolist(), strict=True):
            own = self.runs[run]
            ends.setdefault(own.cell, {}).setdefault(own.rate, []).append(value)
        return {cell: _best(rates) for cell, rates in ends.items()}


def _best(ends: Mapping[float | None, Sequence[float]]) -> float | None:
    """The rate with the lowest mean, of those with the most runs."""
    most = max(map(len, ends.values()))
    complete = [rate for rate, values in ends.items() if len(values) == most]
    return min(complete, key=lambda rate: (np.mean(ends[rate]), -1.0 if rate is None else rate))


def chosen_points(points: Points, plan: Plan) -> Points:
    """The points at the best rates; all where nothing is swept."""
    return AtBestRate(plan.runs)(points) if plan.swept else points


def rate_notices(points: Points, plan: Plan) -> list[str]:
    """Which rates were chosen of which, and what makes a choice doubtful."""
    if not plan.swept:
        return []
    tried, best = plan.rates, AtBestRate(plan.runs).chosen(points)
    swept = [(cell, rate) for cell, rate in best.items() if rate is not None and len(tried[cell]) > 1]
    chosen = [(cell, f"{rate:g} of {_list(tried[cell])}") for cell, rate in swept]
    edges = [(cell, f"{rate:g}") for cell, rate in swept if rate in (tried[cell][0], tried[cell][-1])]
    fewer = [(cell, _list(rates)) for cell, rates in _incomplete(plan).items()]
    single = [(cell, _list(rates)) for cell, rates in tried.items() if len(rates) == 1]
    texts = {
        "learning rates are swept, and each cell is fitted at its best one by the metric at the end": chosen,
        "the best learning rate is the lowest or highest tried that did not diverge, so a better one may lie beyond": (
            edges
        ),
        "learning rates with fewer runs than others, which are not chosen": fewer,
        "cells at one learning rate, fitted beside the swept ones, which may not be their best": single,
    }
    return [f"{plan.group}: {text}: {_by_text(cells, len(tried))}" for text, cells in texts.items() if cells]


def uneven_notices(plans: Iterable[Plan]) -> list[str]:
    """A word where some groups are swept over more learning rates than others."""
    counts = {plan.group: max(map(len, plan.rates.values()), default=0) for plan in plans}
    if max(counts.values(), default=0) < 2 or len(set(counts.values())) == 1:
        return []
    listed = ", ".join(f"{group} {max(count, 1)}" for group, count in counts.items())
    return [f"learning rates tried per cell differ between groups, which favours those with more: {listed}"]


def _incomplete(plan: Plan) -> dict[str, list[float]]:
    """The rates of every cell that have fewer runs than another one of it; only cells with such rates."""
    counts = Counter((run.cell, run.rate) for run in plan.runs.values() if run.rate is not None)
    most = {cell: max(counts[cell, rate] for rate in rates) for cell, rates in plan.rates.items() if rates}
    found: dict[str, list[float]] = {}
    for cell, rate in sorted(counts):
        if counts[cell, rate] < most[cell]:
            found.setdefault(cell, []).append(rate)
    return found


def _by_text(cells: Sequence[tuple[str, str]], count: int) -> str:
    """Every text once, with the cells that it belongs to, or the word that it belongs to all `count`."""
    where: dict[str, list[str]] = {}
    for cell, text in cells:
        where.setdefault(text, []).append(cell)
    return "; ".join(
        f"{text} ({'every cell' if len(own) == count else '; '.join(own)})" for text, own in where.items()
    )


def _list(rates: Sequence[float]) -> str:
    return ", ".join(f"{rate:g}" for rate in rates)
