"""Do the printed intervals contain the truth as often as they say? Simulated runs of known laws, and a count.

Every run has noise of its own, which all its checkpoints share, and every checkpoint a little more; both are
log-normal. The fits, selections and intervals are those of every other command.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from openclip_scaling.comparing.compare import Comparison, compare_groups
from openclip_scaling.fitting.fit import fit_law
from openclip_scaling.fitting.loss import Loss
from openclip_scaling.fitting.points import Points
from openclip_scaling.fitting.selections import BY_VALUE, SELECTIONS
from openclip_scaling.fitting.settings import DEFAULT_DELTA
from openclip_scaling.fitting.uncertainty import Bootstrap, bootstrap
from openclip_scaling.forms.law import Array
from openclip_scaling.forms.laws import LAWS

RUNS = (3, 5, 9, 18)
BEYOND = 10.0  # a prediction this many times the largest scale
_DRAWS = 200  # of the bootstrap, where points are selected by their values
_COSTS, _STEPS = (1e9, 1e11), 1e3  # cost of a step, smallest and largest run; steps between checkpoints
_SIZES, _SAMPLES = (1e7, 1e9), 1e9  # for laws of two scales


@dataclass(frozen=True)
class Scenario:
    """A law with its truth, and how runs scatter about it; the noise is in ln E. With `shared`, runs are in pairs."""

    name: str
    law: str
    truth: dict[str, float]
    checkpoints: int = 4
    points: str = "all"
    run_noise: float = 0.02
    row_noise: float = 0.005
    delta: float | None = DEFAULT_DELTA
    shared: float = 0.0  # of the variance between runs, what two groups have in common, run by run


_POWER = {"a": -0.1, "b": 30.0}
_FLOOR = {"a": -0.25, "b": 3e3, "E0": 0.8}
_HARDLY = {"a": -0.12, "b": 40.0, "E0": 0.05}
_TWO = {"alpha": 0.35, "beta": 0.3, "A": 400.0, "B": 400.0, "E": 1.5}
SCENARIOS = (
    Scenario("power", "power", _POWER),
    Scenario("power, noise of checkpoints only", "power", _POWER, run_noise=0.0, row_noise=0.01),
    Scenario("power, last checkpoints, least squares", "power", _POWER, points="ends", delta=None),
    Scenario("power, frontier", "power", _POWER, points="frontier", run_noise=0.01, row_noise=0.01),
    Scenario("power, runs in pairs", "power", _POWER, shared=0.8),
    Scenario("saturating", "saturating", _FLOOR),
    Scenario("saturating, hardly a floor", "saturating", _HARDLY),
    Scenario("chinchilla", "chinchilla", _TWO, run_noise=0.005, row_noise=0.002),
)


def simulated(
    scenario: Scenario, runs: int, generator: np.random.Generator, common: Array | None = None
) -> Points:
    """One set of runs whose sizes are spread evenly in logs, each with its checkpoints.

    common is the standard normal noise of every run that another group has too, of which the scenario takes its
    share.
    """
    run = np.repeat(np.arange(runs), scenario.checkpoints)
    step = np.tile(np.arange(1, scenario.checkpoints + 1), runs)
    law = LAWS[scenario.law]
    if law.scales == 1:
        x = np.geomspace(*_COSTS, runs)[run] * _STEPS * step
    else:
        x = np.column_stack([np.geomspace(*_SIZES, runs)[run], _SAMPLES * 4.0**step])
    of_runs = generator.normal(size=runs)
    if common is not None:
        of_runs = math.sqrt(1 - scenario.shared) * of_runs + math.sqrt(scenario.shared) * common
    noise = scenario.run_noise * of_runs[run] + scenario.row_noise * generator.normal(size=len(run))
    names = tuple(f"run {number:02d}" for number in run)
    return Points(x, law.predict(scenario.truth, x) * np.exp(noise), names)


def study(
    scenario: Scenario,
    runs: Sequence[int],
    count: int,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> pd.DataFrame:
    """How often intervals contain the truth, over `count` simulated sets of each number of runs, at least 2.

    Differences are those of each set and the next (of the last and the first too), or of `count` pairs of sets where
    runs are in pairs. One row per number of runs and quantity: share and its standard error, the median width of the
    interval (of its logarithm for what is positive), how many had no interval, and whether the tools call it reliable.
    """
    rows: list[dict[str, object]] = []
    for number in runs:
        if progress:
            progress(f"{scenario.name}, {number} runs")
        generator = np.random.default_rng([seed, number])
        found = [_resampled(scenario, points) for points in _sets(scenario, number, count, generator)]
        rows += _counted(scenario, number, found)
    return pd.DataFrame(rows)


def _sets(scenario: Scenario, runs: int, count: int, generator: np.random.Generator) -> Iterator[Points]:
    if not scenario.shared:
        yield from (simulated(scenario, runs, generator) for _ in range(count))
        return
    for _ in range(count):
        common = generator.normal(size=runs)
        yield simulated(scenario, runs, generator, common)
        yield simulated(scenario, runs, generator, common)


def _resampled(scenario: Scenario, points: Points) -> Bootstrap:
    select = SELECTIONS[scenario.points]
    fit = fit_law(select(points), LAWS[scenario.law], Loss(scenario.delta))
    units = {run: run for run in points.runs} if scenario.shared else None
    return bootstrap(points, fit, select, _DRAWS if select in BY_VALUE else 0, units=units)


def _counted(scenario: Scenario, runs: int, found: Sequence[Bootstrap]) -> Iterator[dict[str, object]]:
    usable = [boot for boot in found if boot.intervals]
    pairs = _pairs(scenario, found)
    same = {
        "scenario": scenario.name,
        "law": scenario.law,
        "runs": runs,
        "reliable": all(boot.reliable for boot in usable) and bool(usable),
    }
    for name, (truth, bounds) in _own(scenario, runs, usable).items():
        yield {**same, "quantity": name, **_share(truth, bounds, len(found))}
    for name, (truth, bounds) in _between(scenario, pairs).items():
        yield {**same, "quantity": name, **_share(truth, bounds, len(pairs))}


def _share(truth: float, bounds: Array, tried: int) -> dict[str, object]:
    """How many intervals hold the truth; bounds has shape (sets, 2)."""
    if not len(bounds):
        return {"sets": 0, "covered": math.nan, "without_interval": tried}
    share = float(((bounds[:, 0] <= truth) & (truth <= bounds[:, 1])).mean())
    return {
        "sets": len(bounds),
        "covered": share,
        "standard_error": math.sqrt(share * (1 - share) / len(bounds)),
        "median_width": float(np.median(np.diff(bounds))),
        "without_interval": tried - len(bounds),
    }


Counted = tuple[float, Array]  # the truth, and bounds of shape (sets, 2)


def _own(scenario: Scenario, runs: int, usable: Sequence[Bootstrap]) -> dict[str, Counted]:
    """Parameters, in logs where they are positive, and a prediction beyond the points."""
    law = LAWS[scenario.law]
    quantities: dict[str, Counted] = {}
    for role in law.roles:
        own = [boot.intervals[role.name] for boot in usable]
        bounds = np.array([[one.low, one.high] for one in own]).reshape(-1, 2)
        truth = scenario.truth[role.name]
        with np.errstate(divide="ignore"):  # an open interval may begin at 0
            quantities[role.name] = (math.log(truth), np.log(bounds)) if role.logarithmic else (truth, bounds)
    if scenario.points == "frontier":  # the lowest of many lie below the law; its exponent is what they keep
        return {name: quantities[name] for name in law.exponents}
    beyond = BEYOND * simulated(scenario, runs, np.random.default_rng(0)).x.max(axis=0)[None]
    truth = float(np.log(law.predict(scenario.truth, beyond))[0])
    bands = np.array([boot.band(beyond) for boot in usable]).reshape(-1, 2)
    quantities[f"ln E at {BEYOND:g}x scale"] = truth, np.log(bands)
    return quantities


def _pairs(scenario: Scenario, found: Sequence[Bootstrap]) -> list[list[Comparison]]:
    """Comparisons of two sets of one law, whose exponents are the same."""
    if scenario.shared:
        couples = zip(found[::2], found[1::2], strict=True)
    else:
        couples = zip(found, [*found[1:], *found[:1]], strict=True)
    return [compare_groups({"first": a, "second": b}) for a, b in couples]


def _between(scenario: Scenario, pairs: Sequence[Sequence[Comparison]]) -> dict[str, Counted]:
    """Differences of exponents, and the ratio of the scales at one level in logs; the truth of all is 0."""
    law = LAWS[scenario.law]
    quantities: dict[str, Counted] = {}
    for name in law.exponents:
        own = [item.interval for pair in pairs for item in pair if item.exponent == name and item.interval]
        quantities[f"difference of {name}"] = 0.0, np.array(own).reshape(-1, 2)
    if law.scales == 1:
        reached = [at.interval for pair in pairs for at in pair[0].equal_losses if at.interval]
        with np.errstate(divide="ignore"):  # an interval without ends
            quantities["ratio of scales at one E"] = 0.0, np.log(np.array(reached).reshape(-1, 2))
    return quantities
