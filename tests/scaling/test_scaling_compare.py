"""Intervals from resampled runs, and verdicts on two groups."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from openclip_scaling.comparing.compare import Comparison, compare_groups
from openclip_scaling.comparing.difference import difference_limits
from openclip_scaling.errors import UserError
from openclip_scaling.fitting.fit import fit_law
from openclip_scaling.fitting.points import Points
from openclip_scaling.fitting.selections import SELECTIONS
from openclip_scaling.fitting.uncertainty import Bootstrap, bootstrap
from openclip_scaling.forms.laws import LAWS

POWER, SATURATING = LAWS["power"], LAWS["saturating"]


def ladder(exponent: float, runs: int, seed: int = 0, noise: float = 0.01, level: float = 20.0) -> Points:
    """Four checkpoints per run; the noise belongs to the run more than to the checkpoint."""
    generator = np.random.default_rng(seed)
    x, y, names = [], [], []
    for run, cost in enumerate(np.geomspace(1e9, 1e11, runs)):
        shift = noise * generator.normal()
        for step in (1e3, 2e3, 3e3, 4e3):
            x.append(cost * step)
            y.append(
                level * (cost * step / 1e13) ** exponent * np.exp(shift + 0.2 * noise * generator.normal())
            )
            names.append(f"run{run}")
    return Points(np.array(x), np.array(y), tuple(names))


def boot(points: Points, law: str = "power", draws: int = 200, seed: int = 0) -> Bootstrap:
    return bootstrap(points, fit_law(points, LAWS[law]), draws=draws, seed=seed)


def only(first: Points, second: Points) -> Comparison:
    (comparison,) = compare_groups({"linear": boot(first, seed=1), "softmax": boot(second, seed=2)})
    return comparison


def test_seeded_and_independent_of_row_order() -> None:
    points = ladder(-0.1, 6)
    order = np.random.default_rng(1).permutation(len(points))
    shuffled = Points(points.x[order], points.y[order], tuple(points.run[i] for i in order))
    first, again, other = boot(points), boot(shuffled), boot(points, seed=1)
    assert first.intervals == again.intervals == other.intervals  # of fits without a run, which need no seed
    assert np.array_equal(first.thetas, again.thetas)
    assert not np.array_equal(first.thetas, other.thetas)


def test_whole_runs_are_drawn() -> None:
    """Rows of a run repeated say nothing new: intervals stay, where a bootstrap of rows would narrow them."""
    points = ladder(-0.1, 6)
    rows = list(range(len(points))) * 4
    once, often = boot(points).intervals["a"], boot(points.take(rows)).intervals["a"]
    assert often.high - often.low == pytest.approx(once.high - once.low, rel=1e-6)


def test_intervals_cover_the_truth() -> None:
    covered = {3: 0, 6: 0}
    for runs in covered:
        for seed in range(40):
            interval = boot(ladder(-0.1, runs, seed, noise=0.03), draws=150, seed=seed).intervals["a"]
            covered[runs] += interval.low <= -0.1 <= interval.high
    assert min(covered.values()) >= 35  # 38 of 40 are expected at 95 %


@pytest.mark.parametrize(("runs", "reliable"), [(3, False), (4, False), (5, True), (8, True)])
def test_few_runs_are_not_reliable(runs: int, reliable: bool) -> None:
    found = boot(ladder(-0.1, runs))
    assert found.reliable is reliable
    assert (found.notice is None) is reliable


def test_one_run_has_no_interval() -> None:
    found = boot(ladder(-0.1, 1))
    assert found.intervals == {}
    assert found.band(np.array([1e12])) is None
    assert found.notice is not None
    assert "one run" in found.notice


def test_four_points_in_less_than_a_decade_do_not_identify_a_floor() -> None:
    generator = np.random.default_rng(5)
    x = np.geomspace(1e10, 5e10, 4)
    points = Points(x, 3 * (x / 1e10) ** -0.1 * np.exp(0.01 * generator.normal(size=4)), tuple("abcd"))
    found = boot(points, "saturating")
    floor = found.intervals.get("E0")
    assert floor is None or not floor.identified
    if floor is not None:
        assert 0 <= floor.low <= floor.high <= points.y.min()


def test_points_that_are_runs_have_about_the_interval_of_a_regression() -> None:
    generator = np.random.default_rng(0)
    x = np.geomspace(1e10, 1e13, 6)
    points = Points(x, 3 * (x / 1e10) ** -0.1 * np.exp(0.02 * generator.normal(size=6)), tuple("abcdef"))
    fit = fit_law(points, POWER)
    assert fit.standard_errors is not None
    interval = bootstrap(points, fit, draws=200).intervals["a"]
    half = 2.776 * fit.standard_errors["a"]  # t(4) at 97.5 %
    assert interval.high - interval.low == pytest.approx(2 * half, rel=0.35)
    assert interval.low < fit.parameters["a"] < interval.high


def test_frontier_is_selected_again_in_every_draw() -> None:
    points = ladder(-0.1, 6, noise=0.05)
    select = SELECTIONS["frontier"]
    fit = fit_law(select(points), POWER)
    again = bootstrap(points, fit, select, draws=200)
    fixed = bootstrap(select(points), fit, draws=200)
    assert again.intervals != fixed.intervals


def test_band_holds_the_curve_and_widens_beyond_the_data() -> None:
    found = boot(ladder(-0.1, 6))
    grid = np.array([1e12, 1e13, 1e14, 1e18])
    band = found.band(grid)
    assert band is not None
    low, high = band
    assert np.all((low < found.fit.predict(grid)) & (found.fit.predict(grid) < high))
    assert high[3] / low[3] > high[1] / low[1]


def test_a_curve_through_all_points_has_no_interval() -> None:
    points = Points(np.array([1e9, 1e10]), np.array([2.0, 1.0]), ("a", "b"))
    found = boot(points)
    assert found.intervals == {}
    assert found.notice == "no interval: a curve through all points shows no scatter"


def test_a_floor_on_its_bound_is_not_taken_as_known() -> None:
    """The draws all give a floor of 0; the profile tells how high it could be."""
    generator = np.random.default_rng(3)
    logs = np.tile(np.linspace(0, 2, 5), 4)
    metric = np.exp(-0.1 * logs - 0.2 * logs**2 + 0.02 * generator.normal(size=20))  # falls ever faster
    points = Points(1e9 * np.exp(logs), metric, tuple(np.repeat(list("abcd"), 5).tolist()))
    found = boot(points, "saturating")
    assert found.fit.parameters["E0"] == pytest.approx(0, abs=1e-9)
    floor = found.intervals["E0"]
    assert np.quantile(found.parameter("E0", found.thetas), 0.975) < 1e-6
    assert floor.low == 0
    assert floor.high > 0.1 * points.y.min()


def test_a_well_measured_floor_stays_identified() -> None:
    x = np.geomspace(1e6, 1e12, 12)
    noise = np.exp(0.002 * np.random.default_rng(0).normal(size=12))
    points = Points(x, (1.5 + 200 * x**-0.4) * noise, tuple(f"r{i}" for i in range(12)))
    floor = boot(points, "saturating").intervals["E0"]
    assert floor.identified
    assert floor.low < 1.5 < floor.high
    assert floor.high - floor.low < 0.1


def test_both_rising_is_not_called_falling() -> None:
    found = only(ladder(0.2, 8, 1), ladder(0.1, 8, 2))
    assert "linear rises faster with scale" in found.verdict


def test_too_few_draws_are_refused() -> None:
    with pytest.raises(UserError, match="at least 100"):
        boot(ladder(-0.1, 3), draws=10)
    points, frontier = ladder(-0.1, 6), SELECTIONS["frontier"]
    with pytest.raises(UserError, match="at least 100"):
        bootstrap(points, fit_law(frontier(points), POWER), frontier, draws=0)


def test_different_exponents_are_told_apart() -> None:
    found = only(ladder(-0.2, 8, 1), ladder(-0.1, 8, 2))
    assert found.difference == pytest.approx(-0.1, abs=0.02)
    assert found.distinguishable
    assert "linear falls faster with scale (8 runs each)" in found.verdict


def test_equal_exponents_are_not() -> None:
    found = only(ladder(-0.1, 8, 1, noise=0.03), ladder(-0.1, 8, 2, noise=0.03))
    assert not found.distinguishable
    assert found.verdict == "linear and softmax: exponents not distinguishable with 8 runs each."


def test_three_runs_never_give_a_verdict() -> None:
    found = only(ladder(-0.3, 3, 1, noise=0.001), ladder(-0.1, 3, 2, noise=0.001))
    assert not found.distinguishable
    assert "with 3 runs each; intervals from fewer than 5 runs are not reliable" in found.verdict


def test_one_run_in_a_group_gives_no_verdict() -> None:
    found = only(ladder(-0.1, 1), ladder(-0.1, 6))
    assert found.interval is None
    assert found.verdict == "linear and softmax: no verdict with 1 and 6 runs; no interval for linear."


def test_ratio_at_the_largest_common_scale() -> None:
    found = only(ladder(-0.1, 8, 1, level=22.0), ladder(-0.1, 8, 2, level=20.0))
    assert found.scale == pytest.approx((4e14,))
    assert found.ratio == pytest.approx(1.1, abs=0.03)
    assert found.ratio_interval is not None
    assert found.ratio_interval[0] < 1.1 < found.ratio_interval[1]


def test_the_interval_of_a_difference_holds_the_spread_of_both_groups() -> None:
    """Wider than either group's own interval, narrower than both together, and around the paired draws."""
    first, second = boot(ladder(-0.1, 8, 1, noise=0.1), seed=1), boot(ladder(-0.1, 8, 2, noise=0.1), seed=2)
    (found,) = compare_groups({"a": first, "b": second})
    assert found.interval is not None
    assert found.interval[0] <= found.difference <= found.interval[1]
    differences = first.parameter("a", first.thetas)[:, None] - second.parameter("a", second.thetas)[None, :]
    low, high = np.quantile(differences, [0.05, 0.95])
    assert found.interval[0] < low < high < found.interval[1]
    widths = [boot.intervals["a"].high - boot.intervals["a"].low for boot in (first, second)]
    width = found.interval[1] - found.interval[0]
    assert max(widths) < width * 1.05
    assert width < sum(widths)


def test_a_difference_takes_in_what_widens_one_side() -> None:
    """With equal symmetric intervals it is Welch's; a longer side of one makes one side longer."""
    low, high = difference_limits((1.0, 0.5), ((0.0, 2.0), (-0.5, 1.5)), (7, 7))
    half = stats.t.ppf(0.975, 14) / stats.t.ppf(0.975, 7) * 2**0.5
    assert (low, high) == (pytest.approx(0.5 - half), pytest.approx(0.5 + half))
    low, high = difference_limits((1.0, 0.5), ((0.0, 9.0), (-0.5, 1.5)), (7, 7))
    assert low == pytest.approx(0.5 - half)
    assert high > 8
    low, high = difference_limits((1.0, 0.5), ((0.0, 2.0), (-8.0, 1.5)), (7, 7))
    assert low == pytest.approx(0.5 - half)
    assert high > 8
    assert difference_limits((1.0, 0.5), ((1.0, 1.0), (0.5, 0.5)), (7, 7)) == (0.5, 0.5)


def test_exponents_of_a_law_of_two_scales_are_compared_one_by_one() -> None:
    law, found = LAWS["chinchilla"], {}
    x = np.array([(size, size * ratio) for size in np.geomspace(1e7, 1e9, 9) for ratio in (5, 20, 80, 320)])
    for name, alpha in (("fast", 0.5), ("slow", 0.3)):
        truth = {"alpha": alpha, "beta": 0.3, "A": 2e3 if name == "fast" else 60.0, "B": 400.0, "E": 1.5}
        noise = np.exp(0.001 * np.random.default_rng(7).normal(size=len(x)))
        data = Points(x, law.predict(truth, x) * noise, tuple(f"run {i // 4}" for i in range(len(x))))
        found[name] = bootstrap(data, fit_law(data, law), draws=0)
    alpha, beta = compare_groups(found)
    assert (alpha.exponent, beta.exponent) == ("alpha", "beta")
    assert (
        alpha.verdict
        == "fast and slow (alpha): different exponents; fast falls faster with scale (9 runs each)."
    )
    assert beta.verdict == "fast and slow (beta): exponents not distinguishable with 9 runs each."
    assert alpha.scale == pytest.approx((1e9, 3.2e11))


def test_a_shift_of_the_scale_is_not_negative() -> None:
    generator = np.random.default_rng(0)
    x = np.repeat(np.geomspace(1e9, 1e12, 8), 2)
    y = (1 + 40 * x**-0.25) * np.exp(0.01 * generator.normal(size=16))
    shift = boot(Points(x, y, tuple(f"r{i // 2}" for i in range(16))), "offset").intervals["c"]
    assert 0 == shift.low < shift.high


def test_an_interval_that_some_set_of_runs_leaves_open_is_infinite() -> None:
    found = boot(ladder(-0.1, 6))
    low, high = found.limits(
        lambda theta: np.where(theta[..., 0] < found.fit.theta[0], np.inf, theta[..., 0])
    )
    assert (low, high) == (-np.inf, np.inf)


def test_a_ratio_beyond_every_number_is_infinite() -> None:
    steep = Points(np.array([1e9, 2e9, 4e9]), np.array([1e100, 1e80, 1e-100]), tuple("abc"))
    found = only(steep, ladder(-0.1, 6))
    assert found.ratio_interval is not None
    assert found.ratio_interval[1] == np.inf


def test_laws_are_not_mixed() -> None:
    points = ladder(-0.1, 6)
    with pytest.raises(UserError, match="one law"):
        compare_groups({"a": boot(points), "b": boot(points, "saturating", draws=100)})
