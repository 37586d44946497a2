"""Fits of one law: published numbers, synthetic truths, invariances and what cannot be identified."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.optimize import minimize

from openclip_scaling.errors import UserError
from openclip_scaling.fitting.fit import Fit, fit_law
from openclip_scaling.fitting.loss import SPACES, Loss
from openclip_scaling.fitting.points import Points
from openclip_scaling.fitting.selections import SELECTIONS, selection_named
from openclip_scaling.fitting.uncertainty import middle
from openclip_scaling.forms.laws import LAWS, law_named

POWER, SATURATING = LAWS["power"], LAWS["saturating"]


def points(x: Any, y: Any) -> Points:
    return Points(np.asarray(x), np.asarray(y), tuple(f"r{i:03d}" for i in range(len(x))))


TRUTHS = {
    "power": {"a": -0.2, "b": 2e4},
    "saturating": {"a": -0.3, "b": 2e5, "E0": 1.8},
    "offset": {"a": -0.3, "b": 2e5, "c": 1e18, "E0": 1.0},
    "broken": {"c0": 0.05, "c1": 0.25, "b": 60.0, "d1": 1e19, "f1": 0.5, "E0": 0.5},
    "chinchilla": {"alpha": 0.35, "beta": 0.28, "A": 400.0, "B": 410.0, "E": 1.7},
    "tied": {"alpha": 0.3, "A": 200.0, "B": 400.0, "E": 1.7},
}


def synthetic(law: str, seed: int, noise: float = 0.005, n: int = 48) -> Points:
    generator = np.random.default_rng(seed)
    x = np.geomspace(1e16, 1e22, n)
    if LAWS[law].scales == 2:
        sizes = np.geomspace(1e7, 1e10, -(-n // 4))
        x = np.array([(size, size * ratio) for size in sizes for ratio in (2, 10, 40, 160)])[:n]
    return points(x, LAWS[law].predict(TRUTHS[law], x) * np.exp(noise * generator.normal(size=n)))


TASKS = ("imagenet1k", "imagenet_robustness", "mscoco_captions", "flickr30k")
CHERTI = {"bins": "openclip_binned5", "frontier": "openclip_strict_frontier", "all": "openclip_all29"}


@pytest.mark.parametrize("selection", list(CHERTI))
@pytest.mark.parametrize("task", TASKS)
def test_clip_scaling_of_cherti_2022(
    scaling_data: Path, expected: dict[str, Any], task: str, selection: str
) -> None:
    table = pd.read_csv(scaling_data / "cherti2022_errors.csv")
    rows = table[(table.downstream_dataset == task) & (table.upstream_dataset != "CLIP-WIT")]
    assert len(rows) == 29
    chosen = SELECTIONS[selection](points(rows.gmacs_total, rows.err1))
    alpha, beta, *count = expected["cherti2022"]["fits"][task][CHERTI[selection]]
    fit = fit_law(chosen, POWER)
    assert fit.parameters["a"] == pytest.approx(alpha, abs=1e-6)
    assert fit.parameters["b"] == pytest.approx(beta, abs=1e-5)
    assert fit.starts_at_optimum == fit.starts
    if count:
        assert len(chosen) == count[0]


@pytest.mark.parametrize("task", TASKS)
def test_openai_rows_of_cherti_2022(scaling_data: Path, expected: dict[str, Any], task: str) -> None:
    table = pd.read_csv(scaling_data / "cherti2022_errors.csv")
    rows = table[(table.downstream_dataset == task) & (table.upstream_dataset == "CLIP-WIT")]
    fit = fit_law(points(rows.gmacs_total, rows.err1), POWER)
    alpha, beta = expected["cherti2022"]["fits"][task]["openai"]
    assert fit.parameters == {"a": pytest.approx(alpha, abs=1e-6), "b": pytest.approx(beta, rel=1e-6)}


def test_standard_error_of_the_binned_slope(scaling_data: Path) -> None:
    table = pd.read_csv(scaling_data / "cherti2022_errors.csv")
    rows = table[(table.downstream_dataset == "imagenet1k") & (table.upstream_dataset != "CLIP-WIT")]
    fit = fit_law(SELECTIONS["bins"](points(rows.gmacs_total, rows.err1)), POWER)
    assert fit.standard_errors is not None
    assert fit.standard_errors["a"] == pytest.approx(0.0146, abs=5e-5)
    assert fit.degrees_of_freedom == 3


@pytest.mark.parametrize("family", ["transformer", "xlstm"])
def test_xlstm_2025_under_both_laws(scaling_data: Path, expected: dict[str, Any], family: str) -> None:
    table = pd.read_csv(scaling_data / "xlstm2025_pareto.csv")
    rows = table[table.family == family]
    chosen = points(rows.flops, rows.val_loss)
    power, saturating = fit_law(chosen, POWER), fit_law(chosen, SATURATING)
    slope, error, amplitude = expected["xlstm2025"]["power_law"][family]
    assert -power.parameters["a"] == pytest.approx(slope, abs=1e-5)
    assert power.parameters["b"] == pytest.approx(amplitude, rel=1e-5)
    assert power.standard_errors is not None
    assert power.standard_errors["a"] == pytest.approx(error, abs=5e-6)
    wanted = expected["xlstm2025"]["saturating"][family]
    assert -saturating.parameters["a"] == pytest.approx(wanted["a"], abs=1e-5)
    assert saturating.parameters["E0"] == pytest.approx(wanted["E"], abs=1e-4)
    assert saturating.parameters["b"] == pytest.approx(wanted["A"], rel=1e-4)
    assert saturating.starts_at_optimum == saturating.starts
    assert power.aic is not None
    assert saturating.aic is not None
    difference = expected["xlstm2025"]["dAIC_power_minus_saturating"][family]
    assert power.aic - saturating.aic == pytest.approx(difference, abs=0.01)


@pytest.mark.parametrize("delta", [None, 1e-3, 1e-2], ids=["squares", "huber1e-3", "huber1e-2"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_floor_is_recovered(seed: int, delta: float | None) -> None:
    fit = fit_law(synthetic("saturating", seed), SATURATING, Loss(delta))
    assert fit.parameters["a"] == pytest.approx(-0.3, abs=0.02)
    assert fit.parameters["E0"] == pytest.approx(1.8, abs=0.03)
    assert fit.starts_at_optimum >= fit.starts / 2


def test_exact_data_are_fitted_exactly() -> None:
    fit = fit_law(synthetic("saturating", 0, noise=0), SATURATING)
    assert fit.parameters["a"] == pytest.approx(-0.3, rel=1e-6)
    assert fit.parameters["E0"] == pytest.approx(1.8, rel=1e-6)
    assert fit.parameters["b"] == pytest.approx(2e5, rel=1e-4)
    assert fit.aic is None


def test_least_squares_power_law_is_the_regression_line() -> None:
    chosen = synthetic("power", 3, noise=0.2)
    slope, level = np.polyfit(np.log(chosen.x), np.log(chosen.y), 1)
    fit = fit_law(chosen, POWER)
    assert fit.parameters["a"] == pytest.approx(slope, rel=1e-9)
    assert np.log(fit.parameters["b"]) == pytest.approx(level, rel=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_a_small_huber_loss_reaches_its_optimum(seed: int) -> None:
    """The optimiser does not stop early on a small objective: an independent search finds nothing lower."""
    chosen = synthetic("saturating", seed, noise=0.02, n=24)
    loss = Loss(1e-3)
    fit = fit_law(chosen, SATURATING, loss)
    u, v = np.log(chosen.x / fit.c0), np.log(chosen.y / fit.e0)

    def objective(theta: np.ndarray) -> float:
        if not 0 < theta[2] < np.exp(v.min()):
            return 1e9
        return 1e3 * loss.rho(v - SATURATING.log_predict(theta, u)).sum()

    best = min(
        minimize(
            objective, fit.theta * scale + shift, method="Nelder-Mead",
            options={"xatol": 1e-10, "fatol": 1e-12, "maxiter": 4000, "maxfev": 4000},
        ).fun
        for scale in (0.9, 1.0) for shift in (0.01, 0.05)
    ) / 1e3  # fmt: skip
    assert fit.objective <= best * (1 + 1e-4)
    assert fit.objective == pytest.approx(loss.rho(fit.residuals).sum(), rel=1e-9)


def test_huber_ignores_an_outlier_and_squares_do_not() -> None:
    clean = synthetic("power", 0)
    spoiled = clean.y.copy()
    spoiled[0] *= 3
    errors = {
        name: abs(fit_law(points(clean.x, spoiled), POWER, loss).parameters["a"] + 0.2)
        for name, loss in (("huber", Loss(1e-3)), ("squares", Loss()))
    }
    assert errors["huber"] < 1e-3 < errors["squares"]


@pytest.mark.parametrize("delta", [None, 1e-3], ids=["squares", "huber"])
@pytest.mark.parametrize("law", list(LAWS))
def test_order_of_rows_and_units_do_not_matter(law: str, delta: float | None) -> None:
    chosen = synthetic(law, 1, noise=0.02, n=16)
    fit = fit_law(chosen, LAWS[law], Loss(delta))
    order = np.random.default_rng(0).permutation(len(chosen))
    shuffled = Points(chosen.x[order], chosen.y[order], tuple(chosen.run[i] for i in order))
    assert fit_law(shuffled, LAWS[law], Loss(delta)).parameters == fit.parameters
    # FLOP to GFLOP, fraction to %
    scaled = fit_law(points(chosen.x * 1e-9, chosen.y * 100), LAWS[law], Loss(delta))
    for name in LAWS[law].exponents:
        assert scaled.parameters[name] == pytest.approx(fit.parameters[name], rel=1e-5)
    if LAWS[law].floor:
        floor = scaled.parameters[LAWS[law].floor]
        assert floor == pytest.approx(100 * fit.parameters[LAWS[law].floor], rel=1e-5, abs=1e-8)
    assert scaled.predict(chosen.x * 1e-9) == pytest.approx(100 * fit.predict(chosen.x), rel=1e-6)


def predicted_by_formula(fit: Fit) -> np.ndarray:
    return fit.law.predict(fit.parameters, fit.points.x)


@pytest.mark.parametrize("law", list(LAWS))
def test_the_printed_parameters_are_those_of_the_formula(law: str) -> None:
    fit = fit_law(synthetic(law, 2), LAWS[law])
    assert predicted_by_formula(fit) == pytest.approx(fit.predict(fit.points.x), rel=1e-9)
    assert fit.rmse == pytest.approx(0.005, rel=0.4)


@pytest.mark.parametrize("law", list(LAWS))
def test_derivatives(law: str) -> None:
    fit = fit_law(synthetic(law, 2, noise=0.05, n=9), LAWS[law])
    u, c0 = fit.centred(fit.points.x), np.array([10.0, 30.0])
    for index in range(len(fit.theta)):
        step = np.zeros_like(fit.theta)
        step[index] = 1e-6
        slope = (
            LAWS[law].log_predict(fit.theta + step, u) - LAWS[law].log_predict(fit.theta - step, u)
        ) / 2e-6
        assert slope == pytest.approx(LAWS[law].jacobian(fit.theta, u)[:, index], rel=1e-5, abs=1e-8)
        up, down = (LAWS[law].natural(fit.theta + s * step, c0, 2.0) for s in (1, -1))
        natural = LAWS[law].natural_jacobian(fit.theta, c0, 2.0)
        assert (up - down) / 2e-6 == pytest.approx(natural[:, index], rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("law", ["saturating", "offset", "broken"])
def test_derivatives_stay_finite_where_a_step_leads_far_below_the_points(law: str) -> None:
    """ln(1 + E) hardly changes there, so such a step is not refused."""
    roles = LAWS[law].roles
    theta = np.array([-2000.0 if role.kind == "amplitude" else 0.0 for role in roles])
    assert np.isfinite(LAWS[law].jacobian(theta, np.linspace(-1, 1, 5))).all()


def test_a_pure_power_law_has_no_floor() -> None:
    fit = fit_law(synthetic("power", 0, noise=0), SATURATING)
    assert fit.parameters["E0"] == pytest.approx(0, abs=1e-3 * fit.points.y.min())
    assert fit.parameters["a"] == pytest.approx(-0.2, rel=1e-3)


@pytest.mark.parametrize("seed", range(4))
def test_the_floor_stays_between_zero_and_the_lowest_value(seed: int) -> None:
    generator = np.random.default_rng(seed)
    chosen = points(np.geomspace(1e10, 5e10, 4), 2 + 0.3 * generator.normal(size=4) ** 2)
    fit = fit_law(chosen, SATURATING)
    assert 0 <= fit.parameters["E0"] <= chosen.y.min() * (1 + 1e-12)
    assert any("0.70 decades" in text for text in fit.notices)


def test_a_constant_metric_shows_no_scaling() -> None:
    chosen = points(np.geomspace(1e10, 1e13, 6), np.full(6, 2.5))
    power = fit_law(chosen, POWER)
    assert power.parameters == {"a": pytest.approx(0, abs=1e-9), "b": pytest.approx(2.5)}
    for fit in (power, fit_law(chosen, SATURATING)):
        assert any("constant" in text for text in fit.notices)
        assert fit.predict([1e11]) == pytest.approx([2.5], rel=1e-6)


def test_as_many_points_as_parameters() -> None:
    fit = fit_law(points([1e10, 1e12], [2.0, 1.0]), POWER)
    assert fit.parameters["a"] == pytest.approx(-np.log10(2) / 2)
    assert fit.standard_errors is None
    assert any("2 points for 2 parameters" in text for text in fit.notices)


@pytest.mark.parametrize(
    ("x", "law", "message"),
    [([1e10], "power", "1 points at 1 different scales"), ([1e10] * 5, "power", "5 points at 1 different scales"),
     ([1e10, 1e10, 1e11, 1e11], "saturating", "at least 3 different scales")],
)  # fmt: skip
def test_too_few_scales_are_refused(x: list[float], law: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        fit_law(points(x, np.linspace(2, 1, len(x))), LAWS[law])


@pytest.mark.parametrize("bad", [np.nan, np.inf, 0.0, -1.0])
@pytest.mark.parametrize("place", ["x", "y"])
def test_values_without_a_logarithm_are_refused(bad: float, place: str) -> None:
    x, y = np.array([1e10, 1e11, 1e12]), np.array([3.0, 2.0, 1.0])
    (x if place == "x" else y)[1] = bad
    with pytest.raises(UserError, match="1 of 3 points are not positive finite"):
        points(x, y)


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"'pwoer'.*power, saturating"):
        law_named("pwoer")
    with pytest.raises(UserError, match=r"'last'.*all, ends, frontier, hull, bins"):
        selection_named("last")
    with pytest.raises(UserError, match="delta"):
        Loss(0.0)
    with pytest.raises(UserError, match=r"'ratio'.*log, log1p, raw"):
        Loss(space="ratio")
    with pytest.raises(UserError, match="one value per point"):
        Points(np.array([1.0, 2.0]), np.array([1.0]), ("a", "b"))


def test_selections() -> None:
    chosen = Points(
        np.array([1.0, 10.0, 100.0, 2.0, 20.0, 200.0]),
        np.array([9.0, 7.0, 6.0, 9.5, 6.5, 6.2]),
        tuple("aaabbb"),
    )
    assert len(SELECTIONS["all"](chosen)) == 6
    assert SELECTIONS["ends"](chosen).x.tolist() == [100.0, 200.0]
    assert SELECTIONS["frontier"](chosen).y.tolist() == [9.0, 7.0, 6.5, 6.0]
    assert SELECTIONS["hull"](chosen).y.tolist() == [9.0, 7.0, 6.5, 6.0]
    assert SELECTIONS["bins"](chosen).y.tolist() == [9.0, 6.5, 6.0]  # two of the five bins are empty


def test_the_hull_leaves_out_what_a_line_undercuts() -> None:
    chosen = points([1.0, 10.0, 100.0, 1000.0, 10000.0], [8.0, 6.0, 2.0, 1.9, 2.5])
    assert SELECTIONS["frontier"](chosen).y.tolist() == [8.0, 6.0, 2.0, 1.9]
    assert SELECTIONS["hull"](chosen).y.tolist() == [8.0, 2.0, 1.9]


def test_selections_of_low_values_take_one_scale() -> None:
    two = synthetic("chinchilla", 0)
    assert len(SELECTIONS["all"](two)) == 48
    with pytest.raises(UserError, match="--points hull needs one scale"):
        SELECTIONS["hull"](two)
    with pytest.raises(UserError, match="--points bins needs one scale"):
        SELECTIONS["bins"](two)


def test_a_law_and_its_points_have_the_same_scales() -> None:
    with pytest.raises(UserError, match="chinchilla needs two scales"):
        fit_law(synthetic("power", 0), LAWS["chinchilla"])
    with pytest.raises(UserError, match="power needs one scale"):
        fit_law(synthetic("tied", 0), POWER)


@pytest.mark.parametrize("space", SPACES)
def test_exact_data_are_recovered_in_every_space(space: str) -> None:
    fit = fit_law(synthetic("chinchilla", 0, noise=0), LAWS["chinchilla"], Loss(space=space))
    assert fit.parameters == pytest.approx(TRUTHS["chinchilla"], rel=1e-5)
    assert fit.starts_at_optimum == fit.starts


def test_raw_residuals_are_in_the_unit_of_the_metric() -> None:
    chosen = synthetic("saturating", 1, noise=0.05)
    loss = Loss(0.02, "raw")
    fit = fit_law(chosen, SATURATING, loss)
    assert fit.objective == pytest.approx(loss.rho(chosen.y - fit.predict(chosen.x)).sum(), rel=1e-9)
    percent = fit_law(points(chosen.x, 100 * chosen.y), SATURATING, Loss(2.0, "raw"))
    assert percent.parameters["a"] == pytest.approx(fit.parameters["a"], rel=1e-6)
    assert percent.objective == pytest.approx(1e4 * fit.objective, rel=1e-6)
    logs = fit_law(chosen, SATURATING, Loss(0.02))
    assert fit.parameters["a"] != pytest.approx(logs.parameters["a"], rel=1e-6)


def test_the_broken_law_holds_the_saturating_one() -> None:
    fit = fit_law(synthetic("saturating", 0, noise=0, n=24), LAWS["broken"])
    assert fit.rmse < 1e-6


def test_parameters_held_by_a_bound_are_named() -> None:
    x = np.geomspace(1e9, 1e12, 6)
    runs = tuple("abcdef")
    flat_end = fit_law(Points(x, np.array([3.0, 2.2, 2.01, 2.0, 2.02, 2.03]), runs), LAWS["saturating"])
    assert flat_end.parameters["E0"] == pytest.approx(2.0)
    assert any("held at the lowest value observed" in text for text in flat_end.notices)
    rising = fit_law(Points(x, x**0.1, runs), LAWS["saturating"])
    assert any("does not fall on these points" in text for text in rising.notices)
    near = np.geomspace(1e9, 1.5e9, 6)
    step = fit_law(Points(near, np.array([9.0, 1.0, 1.02, 0.98, 1.01, 0.99]), runs), LAWS["saturating"])
    assert any("a ran to its bound of -20" in text for text in step.notices)


def test_a_break_that_the_points_do_not_show_is_named() -> None:
    corner = {**TRUTHS["broken"], "f1": 1e-3}
    x = np.geomspace(1e16, 1e22, 24)
    sharp = fit_law(points(x, LAWS["broken"].predict(corner, x)), LAWS["broken"])
    assert sharp.parameters["f1"] == pytest.approx(1e-3, rel=1e-3)
    assert "f1 ran to a bound, so its value and its interval say nothing" in sharp.notices
    beyond = fit_law(points(x, 1 + 50 * x**-0.1 * (1 + x / 1e24) ** -5), LAWS["broken"])
    assert "d1 lies outside of the points, which show no break" in beyond.notices
    shown = fit_law(synthetic("broken", 0, noise=0.001), LAWS["broken"])
    assert not any("outside of the points" in text or "ran to a bound" in text for text in shown.notices)


@pytest.mark.parametrize(("good", "said"), [(1, True), (2, True), (3, False)])
def test_an_optimum_that_few_starts_reach_is_pointed_out(
    monkeypatch: pytest.MonkeyPatch, good: int, said: bool
) -> None:
    fit = fit_law(synthetic("saturating", 0), SATURATING)
    assert not any("starts reached" in text for text in fit.notices)

    def spread(self: object, u: np.ndarray, v: np.ndarray) -> np.ndarray:
        lost = np.tile([0.0, -60.0, 0.0], (21 - good, 1))  # where nothing pulls
        return np.vstack([np.tile(fit.theta, (good, 1)), lost])

    monkeypatch.setattr(type(SATURATING), "starts", spread)
    again = fit_law(synthetic("saturating", 0), SATURATING)
    assert again.starts_at_optimum == good
    notice = f"{good} of 21 starts reached this optimum, so a better one may have been missed"
    assert (notice in again.notices) is said


def test_an_exponent_of_two_scales_at_zero_is_named_with_its_scale() -> None:
    flat = fit_law(
        points(synthetic("tied", 0).x, 2 + 1e5 * synthetic("tied", 0).x[:, 1] ** -0.5), LAWS["chinchilla"]
    )
    assert any("alpha is held at 0: the metric does not fall with its scale" in text for text in flat.notices)


def test_the_middle_of_draws_that_are_partly_infinite() -> None:
    drawn = np.array([[-np.inf, 1.0], [2.0, 1.0], [2.5, 2.0], [3.0, 2.0]])
    low, high = middle(drawn)
    assert low[0] == -np.inf
    assert high[0] == pytest.approx(2.5 + 0.925 * 0.5)
    np.testing.assert_allclose([low[1], high[1]], np.quantile(drawn[:, 1], [0.025, 0.975]))
    assert middle(np.array([-np.inf, np.inf])).tolist() == [-np.inf, np.inf]
