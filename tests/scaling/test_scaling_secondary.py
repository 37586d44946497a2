"""Secondary tests of equal exponents and equal laws, and the forms that AICc prefers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from openclip_scaling.comparing.compare import compare_groups
from openclip_scaling.comparing.comparison_words import remarks_of, secondary_of
from openclip_scaling.comparing.secondary import equal_slopes_test, fit_aicc, secondary_tests
from openclip_scaling.errors import UserError
from openclip_scaling.fitting.analysis import Settings, analyse
from openclip_scaling.fitting.fit import fit_law
from openclip_scaling.fitting.loss import Loss
from openclip_scaling.fitting.points import Points
from openclip_scaling.fitting.selections import SELECTIONS
from openclip_scaling.forms.laws import LAWS

POWER, SATURATING = LAWS["power"], LAWS["saturating"]


def scattered(
    exponent: float, level: float, floor: float = 0.0, seed: int = 0, noise: float = 0.01
) -> Points:
    x = np.geomspace(1e9, 1e12, 14)
    y = floor + level * (x / 1e10) ** exponent
    y = y * np.exp(noise * np.random.default_rng(seed).normal(size=14))
    return Points(x, y, tuple(f"r{i:02d}" for i in range(14)))


def regression(columns: list[np.ndarray], v: np.ndarray) -> float:
    """The sum of squares that a linear regression leaves."""
    design = np.column_stack(columns)
    return float(((v - design @ np.linalg.lstsq(design, v, rcond=None)[0]) ** 2).sum())


def test_under_the_power_law_the_tests_are_those_of_linear_regression() -> None:
    groups = {"a": scattered(-0.1, 3.0, seed=1), "b": scattered(-0.11, 3.1, seed=2)}
    found = secondary_tests(groups, POWER)
    u = np.log(np.concatenate([groups["a"].x, groups["b"].x]))
    v = np.log(np.concatenate([groups["a"].y, groups["b"].y]))
    first = np.repeat([1.0, 0.0], 14)
    own = regression([first, 1 - first, first * u, (1 - first) * u], v)
    shared, one = regression([first, 1 - first, u], v), regression([np.ones(28), u], v)
    f = (shared - own) / (own / 24)
    assert found.equal_exponents.f == pytest.approx(f, rel=1e-6)
    assert found.equal_exponents.p == pytest.approx(stats.f.sf(f, 1, 24), rel=1e-6)
    assert found.equal_exponents.degrees == (1, 24)
    assert found.one_law.f == pytest.approx((one - own) / 2 / (own / 24), rel=1e-6)
    assert found.one_law.degrees == (2, 24)

    def aicc(sse: float, k: int) -> float:
        return 28 * np.log(sse / 28) + 2 * k + 2 * k * (k + 1) / (28 - k - 1)

    assert found.aicc_shared_exponent == pytest.approx(aicc(shared, 4) - aicc(own, 5), rel=1e-6)
    assert found.aicc_one_law == pytest.approx(aicc(one, 3) - aicc(own, 5), rel=1e-6)


def test_a_shared_exponent_above_floors_is_the_best_one() -> None:
    """No exponent gives a lower sum of squares than the one that the test of the saturating law finds."""
    groups = {"a": scattered(-0.3, 3.0, 1.0, seed=1), "b": scattered(-0.4, 3.0, 1.5, seed=2)}
    found = secondary_tests(groups, SATURATING)
    own = sum(fit_law(points, SATURATING, Loss()).objective for points in groups.values())
    shared = own * (1 + found.equal_exponents.f / found.equal_exponents.degrees[1])
    least = min(
        sum(_least_above_floors(points, exponent) for points in groups.values())
        for exponent in np.linspace(-0.45, -0.25, 101)
    )
    assert shared <= least * (1 + 1e-9)
    assert shared == pytest.approx(least, rel=2e-3)  # the grids are coarse


def _least_above_floors(points: Points, exponent: float) -> float:
    """Half the least sum of squares of ln E over a grid of floors, with the level by Newton's method."""
    power, v = points.x**exponent, np.log(points.y)
    floors = np.linspace(0, points.y.min(), 300)[:-1, None]
    level = np.median((points.y - floors) / power, axis=1, keepdims=True)
    for _ in range(8):
        total = floors + level * power
        slope = power / total
        level = level - ((np.log(total) - v) * slope).sum(axis=1, keepdims=True) / (slope**2).sum(
            axis=1, keepdims=True
        )
    return 0.5 * float(((np.log(floors + level * power) - v) ** 2).sum(axis=1).min())


def test_one_law_for_groups_of_one_law() -> None:
    same = secondary_tests({"a": scattered(-0.1, 3.0, seed=1), "b": scattered(-0.1, 3.0, seed=2)}, POWER)
    assert same.one_law.p > 0.05
    assert same.aicc_one_law is not None
    assert same.aicc_one_law < 0
    level = secondary_tests({"a": scattered(-0.1, 3.0, seed=1), "b": scattered(-0.1, 3.3, seed=2)}, POWER)
    assert level.equal_exponents.p > 0.05
    assert level.one_law.p < 1e-6
    assert level.aicc_one_law is not None
    assert level.aicc_one_law > 20


def test_equal_slopes_of_xlstm_2025(scaling_data: Path, expected: dict[str, Any]) -> None:
    table = pd.read_csv(scaling_data / "xlstm2025_pareto.csv")
    groups = {
        str(name): Points(part.flops.to_numpy(), part.val_loss.to_numpy(), tuple(map(str, part.index)))
        for name, part in table.groupby("family")
    }
    test, wanted = equal_slopes_test(groups), expected["xlstm2025"]["ancova_equal_slopes"]
    assert test.f == pytest.approx(wanted["F"], abs=5e-4)
    assert list(test.degrees) == wanted["df"]
    assert test.p == pytest.approx(wanted["p"], abs=5e-5)


def test_the_forms_of_xlstm_2025_are_shown_side_by_side(scaling_data: Path, expected: dict[str, Any]) -> None:
    """Under the power law transformers fall faster, with a floor the other family does, and AICc prefers floors."""
    frame = pd.read_csv(scaling_data / "xlstm2025_pareto.csv")
    settings = Settings(
        metric="val_loss", x="flops", by="family", laws=("power", "saturating"), delta=None, draws=100
    )
    found = analyse(frame, settings)
    for group, wanted in expected["xlstm2025"]["dAIC_power_minus_saturating"].items():
        power, floor = (found.by_law(law)[group].fit for law in settings.laws)
        assert power.aic is not None
        assert floor.aic is not None
        assert power.aic - floor.aic == pytest.approx(wanted, abs=0.02)
    comparisons = [item for law in settings.laws for item in compare_groups(found.boots(law))]
    text = "\n".join(remarks_of(comparisons, found))
    assert "transformer and xlstm: which falls faster depends on the form: the difference is -0.0034" in text
    assert "Form that AICc prefers: transformer: saturating, by " in text
    power, floor = secondary_of(found)
    assert power.equal_exponents.f == pytest.approx(7.549, abs=1e-3)
    assert floor.law == "saturating"
    assert floor.equal_exponents.degrees == (1, 26)


@pytest.mark.parametrize(("task", "p"), [("imagenet1k", 0.0151), ("flickr30k", 0.0222)])
def test_equal_slopes_of_cherti_2022(
    scaling_data: Path, expected: dict[str, Any], task: str, p: float
) -> None:
    table = pd.read_csv(scaling_data / "cherti2022_errors.csv")
    table = table[table.downstream_dataset == task]
    openai = table.upstream_dataset == "CLIP-WIT"
    groups = {}
    for name, part in (("openclip", table[~openai]), ("openai", table[openai])):
        points = Points(part.gmacs_total.to_numpy(), part.err1.to_numpy(), tuple(map(str, part.index)))
        groups[name] = SELECTIONS["frontier"](points) if name == "openclip" else points
    test, wanted = (
        equal_slopes_test(groups),
        expected["cherti2022"]["ancova_openclip_frontier_vs_openai"][task],
    )
    assert test.f == pytest.approx(wanted["F"], abs=5e-3)
    assert list(test.degrees) == wanted["df"]
    assert test.p == pytest.approx(p, abs=5e-4)


def test_what_cannot_be_tested_is_a_sentence() -> None:
    points = scattered(-0.1, 3.0)
    with pytest.raises(UserError, match="at least two groups"):
        equal_slopes_test({"a": points})
    flat = Points(np.array([1.0, 1.0, 1.0]), np.array([1.0, 2.0, 3.0]), tuple("abc"))
    with pytest.raises(UserError, match="at least 2 different scales are needed"):
        equal_slopes_test({"a": points, "b": flat})
    two = Points(np.array([1.0, 2.0]), np.array([2.0, 1.0]), tuple("ab"))
    with pytest.raises(UserError, match="too few points for a test"):
        equal_slopes_test({"a": two, "b": two})
    with pytest.raises(UserError, match="laws of one exponent, which broken is not"):
        secondary_tests({"a": points, "b": points}, LAWS["broken"])


def test_corrected_aic_needs_more_points_than_parameters() -> None:
    fit = fit_law(scattered(-0.1, 3.0), POWER, Loss())
    assert fit.aic is not None
    assert fit_aicc(fit) == pytest.approx(fit.aic + 24 / 10)  # 3 parameters with the variance, 14 points
    few = Points(np.array([1.0, 2.0, 4.0, 8.0]), np.array([4.0, 3.0, 2.5, 2.4]), tuple("abcd"))
    assert fit_aicc(fit_law(few, POWER, Loss())) is None
