"""Published fits of laws of two scales, of a broken law and of hulls, from their authors' data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from openclip_scaling.comparing.secondary import equal_slopes_test
from openclip_scaling.fitting.analysis import Settings, analyse
from openclip_scaling.fitting.fit import Fit, fit_law
from openclip_scaling.fitting.loss import Loss
from openclip_scaling.fitting.points import Points
from openclip_scaling.fitting.profile import floor_limits
from openclip_scaling.fitting.uncertainty import bootstrap
from openclip_scaling.forms.laws import LAWS

CHINCHILLA, TIED, BROKEN = LAWS["chinchilla"], LAWS["tied"], LAWS["broken"]


def points(x: Any, y: Any) -> Points:
    return Points(np.asarray(x), np.asarray(y), tuple(f"r{i:03d}" for i in range(len(y))))


@pytest.fixture(scope="module")
def chinchilla_rows(scaling_data: Path) -> Points:
    """All 245 rows; D = FLOP / 6 N."""
    table = pd.read_csv(scaling_data / "chinchilla_epoch_svg_extracted.csv")
    size = table["Model Size"].to_numpy()
    return points(np.column_stack([size, table["Training FLOP"] / (6 * size)]), table["loss"])


@pytest.fixture(scope="module")
def chinchilla_points(chinchilla_rows: Points) -> Points:
    """The 240 rows below the fifth largest loss."""
    keep = np.flatnonzero(chinchilla_rows.y < np.sort(chinchilla_rows.y)[-5])
    return chinchilla_rows.take(keep.tolist())


def test_chinchilla_to_every_published_digit(chinchilla_points: Points, expected: dict[str, Any]) -> None:
    assert len(chinchilla_points) == 240
    fit = fit_law(chinchilla_points, CHINCHILLA, Loss(1e-3))
    wanted = expected["chinchilla_epoch"]["huber_1e-3_240"]
    assert fit.parameters["A"] == pytest.approx(wanted["A"], abs=0.005)
    assert fit.parameters["B"] == pytest.approx(wanted["B"], abs=0.05)
    assert fit.parameters["E"] == pytest.approx(wanted["E"], abs=5e-6)
    assert fit.parameters["alpha"] == pytest.approx(wanted["alpha"], abs=1e-6)
    assert fit.parameters["beta"] == pytest.approx(wanted["beta"], abs=1e-6)
    assert fit.objective == pytest.approx(wanted["objective_sum"], rel=5e-8)
    assert fit.starts_at_optimum == fit.starts
    assert fit.condition < 100


def test_chinchilla_is_not_where_an_early_stop_ends(chinchilla_points: Points) -> None:
    """The parameters of Hoffmann et al. have a higher objective, and the fit has left them far behind."""
    fit = fit_law(chinchilla_points, CHINCHILLA, Loss(1e-3))
    early = {"A": 406.40, "B": 410.73, "E": 1.6934, "alpha": 0.3390, "beta": 0.2847}
    logs = np.log(chinchilla_points.y) - np.log(CHINCHILLA.predict(early, chinchilla_points.x))
    assert fit.loss.rho(logs).sum() == pytest.approx(0.00117178, rel=1e-3)
    assert fit.objective < 0.9 * fit.loss.rho(logs).sum()
    assert fit.parameters["beta"] > 0.36


@pytest.mark.parametrize(
    ("rows", "delta", "key"),
    [("all", 1e-3, "huber_1e-3_all245"), ("some", 1e-2, "huber_1e-2_240"), ("some", None, "L2_log_240")],
)
def test_chinchilla_by_other_losses(
    chinchilla_rows: Points,
    chinchilla_points: Points,
    expected: dict[str, Any],
    rows: str,
    delta: float | None,
    key: str,
) -> None:
    fit = fit_law(chinchilla_rows if rows == "all" else chinchilla_points, CHINCHILLA, Loss(delta))
    wanted = expected["chinchilla_epoch"][key]
    for name in CHINCHILLA.parameters:
        assert fit.parameters[name] == pytest.approx(wanted[name], rel=3e-4)
    if delta is None:
        assert 2 * fit.objective == pytest.approx(wanted["sse"], abs=5e-9)
        assert fit.aic == pytest.approx(wanted["AIC_k6"], abs=1e-3)


def test_aic_of_tied_exponents(chinchilla_points: Points, expected: dict[str, Any]) -> None:
    fit = fit_law(chinchilla_points, TIED)
    assert fit.aic == pytest.approx(
        expected["chinchilla_epoch"]["L2_log_240"]["AIC_alternatives"]["alpha=beta"], abs=0.01
    )


def test_profile_of_the_floor_of_chinchilla(chinchilla_points: Points, expected: dict[str, Any]) -> None:
    fit = fit_law(chinchilla_points, CHINCHILLA)
    low, high = (np.log(theta[-1] * fit.e0) for theta in floor_limits(fit, 240, 0.95))
    wanted = expected["chinchilla_epoch"]["L2_log_240"]["profile95"]["logE"]
    assert (low, high) == (pytest.approx(wanted[0], abs=5e-4), pytest.approx(wanted[1], abs=5e-4))


def test_bootstrap_of_chinchilla_is_like_the_published_one(
    chinchilla_points: Points, expected: dict[str, Any]
) -> None:
    fit = fit_law(chinchilla_points, CHINCHILLA, Loss(1e-3))
    found = bootstrap(chinchilla_points, fit, draws=300)
    published = expected["chinchilla_epoch"]["published_notebook_9225883"]["bootstrap4000_95"]
    for name in ("alpha", "beta", "E"):
        low, high = found.percentiles()[name]
        width = published[name][1] - published[name][0]
        assert low == pytest.approx(published[name][0], abs=0.2 * width)
        assert high == pytest.approx(published[name][1], abs=0.2 * width)
    interval = found.intervals["beta"]
    assert interval.identified
    assert interval.low < 0.3672 < interval.high
    assert not interval.low < 0.2849 < interval.high  # of Hoffmann et al.


@pytest.fixture(scope="module")
def gadre(scaling_data: Path) -> pd.DataFrame:
    table = pd.read_csv(scaling_data / "gadre2024_104models_c4loss.csv")
    return table.assign(samples=20 * table.cc_mult * table.N)


def gadre_fit(table: pd.DataFrame, dataset: str) -> Fit:
    """Their five points: four models at a multiplier of 1, the smallest one at 16 too."""
    small = ["d=96_l=8_h=4", "d=512_l=8_h=4", "d=576_l=24_h=8", "d=1024_l=24_h=8"]
    own = table[table.dataset == dataset]
    rows = own[((own.cc_mult == 1) & own.model.isin(small)) | ((own.cc_mult == 16) & (own.model == small[0]))]
    assert len(rows) == 5
    return fit_law(points(rows[["N", "samples"]], rows.loss_c4_val), TIED, Loss(space="raw"))


def error(table: pd.DataFrame, fit: Fit, dataset: str, model: str, multiplier: float) -> float:
    row = table[(table.dataset == dataset) & (table.model == model) & (table.cc_mult == multiplier)].iloc[0]
    predicted = fit.predict(np.array([[row.N, row.samples]]))[0]
    return 100 * abs(predicted / float(row.loss_c4_val) - 1)


def test_gadre_2024_predicts_its_large_models(gadre: pd.DataFrame, expected: dict[str, Any]) -> None:
    fit, wanted = gadre_fit(gadre, "rpj"), expected["gadre2024"]
    eta = -fit.parameters["alpha"]
    assert eta == pytest.approx(wanted["fit_rpj"]["eta"], abs=5e-5)
    assert fit.parameters["A"] == pytest.approx(wanted["fit_rpj"]["a"], abs=5e-3)
    assert fit.parameters["B"] / 6 ** (eta / 2) == pytest.approx(wanted["fit_rpj"]["b"], abs=5e-3)
    assert fit.parameters["E"] == pytest.approx(wanted["fit_rpj"]["E"], abs=1e-4)
    held = wanted["holdout_rel_err_%"]
    assert error(gadre, fit, "rpj", "open_lm_1b", 32) == pytest.approx(held["open_lm_1b M=640"], abs=5e-5)
    assert error(gadre, fit, "rpj", "open_lm_7b", 1) == pytest.approx(held["open_lm_7b M=20"], abs=5e-5)


@pytest.mark.parametrize("dataset", ["c4_original", "rw_original"])
def test_gadre_2024_on_other_data(gadre: pd.DataFrame, expected: dict[str, Any], dataset: str) -> None:
    found = error(gadre, gadre_fit(gadre, dataset), dataset, "open_lm_7b", 1)
    assert found == pytest.approx(expected["gadre2024"]["others"][f"{dataset} 7b"], abs=5e-5)


@pytest.fixture(scope="module")
def addition(scaling_data: Path) -> tuple[Points, Points]:
    table = pd.read_csv(scaling_data / "caballero2022_4digit_addition.csv")
    fitted, held = (table[table.split == name] for name in ("fit", "holdout"))
    return points(fitted.dataset_size, fitted.test_ce), points(held.dataset_size, held.test_ce)


def rmsle(parameters: dict[str, float], rows: Points) -> float:
    return float(np.sqrt(((np.log(rows.y) - np.log(BROKEN.predict(parameters, rows.x))) ** 2).mean()))


def test_broken_law_of_caballero_2022(addition: tuple[Points, Points], expected: dict[str, Any]) -> None:
    """Their numbers are those of least squares in ln(1 + E)."""
    fitted, held = addition
    fit, wanted = fit_law(fitted, BROKEN, Loss(space="log1p")), expected["caballero2022"]["bnsl_1_break"]
    for ours, theirs in (("E0", "a"), ("b", "b"), ("c0", "c0"), ("c1", "c1"), ("d1", "d1"), ("f1", "f1")):
        assert fit.parameters[ours] == pytest.approx(wanted[theirs], rel=1e-5)
    assert rmsle(fit.parameters, fitted) == pytest.approx(wanted["rmsle_fit14"], abs=5e-10)
    assert rmsle(fit.parameters, held) == pytest.approx(wanted["rmsle_holdout3"], rel=1e-5)


def test_a_broken_law_fits_better_in_the_space_that_is_scored(addition: tuple[Points, Points]) -> None:
    fitted, _ = addition
    logs, shifted = (fit_law(fitted, BROKEN, Loss(space=space)) for space in ("log", "log1p"))
    assert logs.rmse < shifted.rmse
    assert logs.rmse == pytest.approx(5.98327e-4, abs=1e-8)
    assert logs.starts_at_optimum > logs.starts / 2


def test_a_free_floor_reverses_the_verdict_on_xlstm_2025(
    scaling_data: Path, expected: dict[str, Any]
) -> None:
    """Under the power law transformers have the steeper exponent, with a floor the other family has."""
    frame = pd.read_csv(scaling_data / "xlstm2025_pareto.csv")
    columns = Settings(
        metric="val_loss", x="flops", by="family", laws=("power", "saturating"), delta=None, draws=100
    )
    found = analyse(frame, columns)
    exponents = {
        law: {k: -v.fit.parameters["a"] for k, v in found.by_law(law).items()} for law in columns.laws
    }
    assert exponents["power"] == {
        "transformer": pytest.approx(0.04792, abs=1e-5), "xlstm": pytest.approx(0.04453, abs=1e-5)
    }  # fmt: skip
    assert exponents["saturating"] == {
        "transformer": pytest.approx(0.0715, abs=5e-5), "xlstm": pytest.approx(0.0970, abs=5e-5)
    }  # fmt: skip
    test, wanted = equal_slopes_test(found.points), expected["xlstm2025"]["ancova_equal_slopes"]
    assert (test.f, list(test.degrees)) == (pytest.approx(7.55, abs=5e-3), wanted["df"])


def test_hull_of_xlstm_2025(scaling_data: Path) -> None:
    """The published points are a frontier; its corners are fewer and give nearly the same exponents."""
    frame = pd.read_csv(scaling_data / "xlstm2025_pareto.csv")
    settings = Settings(metric="val_loss", x="flops", by="family", laws=("power",), delta=None, draws=100)
    everything, hull = analyse(frame, settings), analyse(frame, replace(settings, points="hull"))
    for group, item in hull.by_law("power").items():
        whole = everything.by_law("power")[group].fit
        assert 4 <= len(item.fit.points) < len(whole.points)
        assert item.fit.parameters["a"] == pytest.approx(whole.parameters["a"], abs=0.004)
        assert item.boot.reselected


TRUTH = {"alpha": 0.3478, "beta": 0.3658, "A": 482.0, "B": 2085.0, "E": 1.82}


def synthetic(seed: int) -> Points:
    sizes, ratios = np.logspace(7.6, 9.8, 12), np.logspace(0.3, 2.2, 8)
    x = np.array([(size, size * ratio) for size in sizes for ratio in ratios])
    noise = np.exp(0.005 * np.random.default_rng(seed).normal(size=len(x)))
    return points(x, CHINCHILLA.predict(TRUTH, x) * noise)


@pytest.mark.parametrize("delta", [1e-3, 0.03, None])
@pytest.mark.parametrize("seed", range(5))
def test_synthetic_chinchilla(seed: int, delta: float | None) -> None:
    fit = fit_law(synthetic(seed), CHINCHILLA, Loss(delta))
    assert fit.parameters["alpha"] == pytest.approx(TRUTH["alpha"], abs=0.02)
    assert fit.parameters["beta"] == pytest.approx(TRUTH["beta"], abs=0.02)
    assert fit.parameters["E"] == pytest.approx(TRUTH["E"], abs=0.03)


def test_synthetic_chinchilla_in_any_order_and_unit() -> None:
    rows = synthetic(0)
    fit = fit_law(rows, CHINCHILLA, Loss(1e-3))
    order = np.random.default_rng(1).permutation(len(rows))
    shuffled = Points(rows.x[order], rows.y[order], tuple(rows.run[i] for i in order))
    assert fit_law(shuffled, CHINCHILLA, Loss(1e-3)).parameters == fit.parameters
    scaled = fit_law(points(rows.x * [1e-9, 1e-6], 100 * rows.y), CHINCHILLA, Loss(1e-3))
    for name, unit in (("alpha", 1), ("beta", 1), ("E", 100)):
        assert scaled.parameters[name] == pytest.approx(unit * fit.parameters[name], rel=1e-7)
