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

from openclip_scaling.compare import compare_groups
from openclip_scaling.fit import fit_law
from openclip_scaling.law import Array
from openclip_scaling.laws import LAWS
from openclip_scaling.loss import Loss
from openclip_scaling.points import Points
from openclip_scaling.selections import BY_VALUE, SELECTIONS
from openclip_scaling.settings import DEFAULT_DELTA
from openclip_scaling.uncertainty import Bootstrap, bootstrap

RUNS = (3, 5, 9, 18)
BEYOND = 10.0  # a prediction this many times the largest scale
_DRAWS = 200  # of the bootstrap, where points are selected by their values
_COSTS, _STEPS = (1e9, 1e11), 1e3  # cost of a step, smallest and largest run; steps between checkpoints
_SIZES, _SAMPLES = (1e7, 1e9), 1e9  # for laws of two scales


@dataclass(frozen=True)
class Scenario:
    """A law with its truth, and how runs scatter about it; the noise is in ln E."""

    name: str
    law: str
    truth: dict[str, float]
    checkpoints: int = 4
    points: str = "all"
    run_noise: float = 0.02
    row_noise: float = 0.005
    delta: float | None = DEFAULT_DELTA


_POWER = {"a": -0.1, "b": 30.0}
_FLOOR = {"a": -0.25, "b": 3e3, "E0": 0.8}
_HARDLY = {"a": -0.12, "b": 40.0, "E0": 0.05}
_TWO = {"alpha": 0.35, "beta": 0.3, "A": 400.0, "B": 400.0, "E": 1.5}
SCENARIOS = (
    Scenario("power", "power", _POWER),
    Scenario("power, noise of checkpoints only", "power", _POWER, run_noise=0.0, row_noise=0.01),
    Scenario("power, last checkpoints, least squares", "power", _POWER, points="ends", delta=None),
    Scenario("power, frontier", "power", _POWER, points="frontier", run_noise=0.01, row_noise=0.01),
    Scenario("saturating", "saturating", _FLOOR),
    Scenario("saturating, hardly a floor", "saturating", _HARDLY),
    Scenario("chinchilla", "chinchilla", _TWO, run_noise=0.005, row_noise=0.002),
)


def simulated(scenario: Scenario, runs: int, generator: np.random.Generator) -> Points:
    """One set of runs whose sizes are spread evenly in logs, each with its checkpoints."""
    run = np.repeat(np.arange(runs), scenario.checkpoints)
    step = np.tile(np.arange(1, scenario.checkpoints + 1), runs)
    law = LAWS[scenario.law]
    if law.scales == 1:
        x = np.geomspace(*_COSTS, runs)[run] * _STEPS * step
    else:
        x = np.column_stack([np.geomspace(*_SIZES, runs)[run], _SAMPLES * 4.0**step])
    noise = scenario.run_noise * generator.normal(size=runs)[run]
    noise = noise + scenario.row_noise * generator.normal(size=len(run))
    names = tuple(f"run {number:02d}" for number in run)
    return Points(x, law.predict(scenario.truth, x) * np.exp(noise), names)


def study(
    scenario: Scenario,
    runs: Sequence[int],
    count: int,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> pd.DataFrame:
    """How often intervals contain the truth, over `count` simulated sets of each number of runs.

    One row per number of runs and quantity: share and its standard error, the median width of the interval (of its
    logarithm for what is positive), how many sets had no interval, and whether the tools call it reliable.
    """
    rows: list[dict[str, object]] = []
    for number in runs:
        if progress:
            progress(f"{scenario.name}, {number} runs")
        generator = np.random.default_rng([seed, number])
        found = [_resampled(scenario, simulated(scenario, number, generator)) for _ in range(count)]
        rows += _counted(scenario, number, found)
    return pd.DataFrame(rows)


def _resampled(scenario: Scenario, points: Points) -> Bootstrap:
    select = SELECTIONS[scenario.points]
    fit = fit_law(select(points), LAWS[scenario.law], Loss(scenario.delta))
    return bootstrap(points, fit, select, _DRAWS if select in BY_VALUE else 0)


def _counted(scenario: Scenario, runs: int, found: Sequence[Bootstrap]) -> Iterator[dict[str, object]]:
    law, usable = LAWS[scenario.law], [boot for boot in found if boot.intervals]
    intervals: dict[str, tuple[float, Array]] = {}
    for role in law.roles:
        bounds = np.array(
            [[boot.intervals[role.name].low, boot.intervals[role.name].high] for boot in usable]
        )
        truth = scenario.truth[role.name]
        with np.errstate(divide="ignore"):  # an open interval may begin at 0
            intervals[role.name] = (math.log(truth), np.log(bounds)) if role.logarithmic else (truth, bounds)
    largest = simulated(scenario, runs, np.random.default_rng(0)).x.max(axis=0)[None]
    beyond = BEYOND * largest
    truth = float(np.log(law.predict(scenario.truth, beyond))[0])
    bands = [boot.band(beyond) for boot in usable]
    intervals[f"ln E at {BEYOND:g}x scale"] = truth, np.log(np.array(bands)[..., 0])
    if scenario.points == "frontier":  # the lowest of many lie below the law; its exponent is what they keep
        intervals = {name: intervals[name] for name in law.exponents}
    for name in law.exponents:
        pairs = [
            compare_groups({"first": a, "second": b}) for a, b in zip(usable[::2], usable[1::2], strict=False)
        ]
        of_name = [item.interval for pair in pairs for item in pair if item.exponent == name]
        intervals[f"difference of {name}"] = 0.0, np.array(of_name)
    for quantity, (truth, bounds) in intervals.items():
        bounds = bounds.reshape(-1, 2)
        share = float(((bounds[:, 0] <= truth) & (truth <= bounds[:, 1])).mean()) if len(bounds) else math.nan
        yield {
            "scenario": scenario.name,
            "law": scenario.law,
            "runs": runs,
            "quantity": quantity,
            "sets": len(bounds),
            "covered": share,
            "standard_error": math.sqrt(share * (1 - share) / max(len(bounds), 1)),
            "median_width": float(np.median(np.diff(bounds))) if len(bounds) else math.nan,
            "without_interval": len(found) - len(usable),
            "reliable": all(boot.reliable for boot in usable) and bool(usable),
        }
