from collections.abc import Callable
from functools import lru_cache

import numpy as np
import pytest

from openclip_linattn.errors import UserError
from openclip_linattn.zeroshot.results import intervals as intervals_module
from openclip_linattn.zeroshot.results import paired as paired_module
from openclip_linattn.zeroshot.results.intervals import (
    Interval,
    mean_per_class_interval,
    recall_interval,
    wilson,
)
from openclip_linattn.zeroshot.results.paired import Answers, compare, difference_interval

DRAWS = 2000


def coverage(interval: Callable[..., Interval], outcomes: np.ndarray, true: float) -> float:
    """The share of the rows of `outcomes` whose interval holds `true`."""
    cached = lru_cache(maxsize=None)(interval)
    bounds = np.array([cached(*map(int, row)) for row in outcomes])
    return float(((bounds[:, 0] <= true) & (true <= bounds[:, 1])).mean())


def test_wilsons_interval_is_that_of_the_formula() -> None:
    z, n, k = 1.959963984540054, 45, 9
    middle = (k / n + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * np.sqrt(k / n * (1 - k / n) / n + z * z / (4 * n * n))
    assert wilson(k, n) == pytest.approx((middle - half, middle + half))


@pytest.mark.parametrize(("right", "low", "high"), [(0, 0.0, 0.0370), (100, 0.9630, 1.0)])
def test_wilsons_interval_has_a_width_at_the_ends(right: int, low: float, high: float) -> None:
    assert wilson(right, 100) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize(("right", "n"), [(3, 2), (-1, 5), (0, 0)])
def test_an_impossible_count_is_refused(right: int, n: int) -> None:
    with pytest.raises(UserError, match=rf"{right} of {n} images is no accuracy"):
        wilson(right, n)


@pytest.mark.parametrize("n", [200, 500, 1000])
@pytest.mark.parametrize("p", [0.05, 0.3, 0.8])
def test_wilsons_interval_covers_the_truth_as_often_as_it_says(n: int, p: float) -> None:
    drawn = np.random.default_rng(n).binomial(n, p, size=(DRAWS, 1))
    assert 0.93 <= coverage(lambda k: wilson(k, n), drawn, p) <= 0.97


@pytest.mark.parametrize("n", [200, 1000])
@pytest.mark.parametrize(
    "cells", [(0.55, 0.15, 0.10, 0.20), (0.30, 0.20, 0.20, 0.30), (0.60, 0.08, 0.02, 0.30)]
)
def test_the_interval_of_the_difference_covers_the_truth_as_often_as_it_says(
    n: int, cells: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paired_module, "wilson", lru_cache(maxsize=None)(wilson))
    drawn = np.random.default_rng(n).multinomial(n, cells, size=DRAWS)
    assert 0.93 <= coverage(difference_interval, drawn, cells[1] - cells[2]) <= 0.97


def test_the_interval_of_the_difference_is_that_of_newcombes_example() -> None:
    assert difference_interval(36, 12, 2, 0) == pytest.approx((0.0569, 0.3404), abs=5e-5)
    assert difference_interval(36, 2, 12, 0) == pytest.approx((-0.3404, -0.0569), abs=5e-5)


def test_without_any_disagreement_the_difference_still_has_a_width() -> None:
    low, high = difference_interval(90, 0, 0, 10)
    assert -0.06 < low < 0 < high < 0.06


def answers(name: str, right: list[bool], asked: str = "same") -> Answers:
    return Answers(name, np.array(right, dtype=bool), asked)


def paired(both: int, only_a: int, only_b: int, neither: int) -> tuple[Answers, Answers]:
    a = [True] * (both + only_a) + [False] * (only_b + neither)
    b = [True] * both + [False] * only_a + [True] * only_b + [False] * neither
    return answers("A", a), answers("B", b)


def test_two_models_that_disagree_evenly_are_not_distinguishable() -> None:
    found = compare(*paired(50, 12, 9, 29))
    assert (found.n, found.only_first, found.only_second) == (100, 12, 9)
    assert found.difference == pytest.approx(0.03)
    assert found.interval == difference_interval(50, 12, 9, 29)
    # Twice the chance of at most 9 heads in 21 throws.
    assert found.p == pytest.approx(0.66362, abs=1e-5)
    assert found.sentence == (
        "A is right on 12 images where B is wrong, B on 9: not distinguishable (p = 0.66)"
    )


@pytest.mark.parametrize(("only_a", "only_b", "better"), [(20, 1, "A"), (1, 20, "B")])
def test_the_better_model_is_named_with_its_lead(only_a: int, only_b: int, better: str) -> None:
    found = compare(*paired(60, only_a, only_b, 19))
    low, high = difference_interval(60, 20, 1, 19)
    lead = f"{better} is better by 19.00 points [{100 * low:.2f}, {100 * high:.2f}] (p < 0.001)"
    assert found.sentence.endswith(lead)
    assert low > 0


def test_equal_answers_have_p_one() -> None:
    found = compare(*paired(7, 0, 0, 3))
    assert (found.p, found.difference) == (1.0, 0.0)
    assert "right on 0 images" in found.sentence


def test_mcnemars_test_rejects_no_more_often_than_it_says() -> None:
    drawn = np.random.default_rng(1).binomial(40, 0.5, size=DRAWS)
    p = {int(k): compare(*paired(30, int(k), 40 - int(k), 30)).p for k in np.unique(drawn)}
    rejected = [p[int(k)] < 0.05 for k in drawn]
    assert 0.02 < np.mean(rejected) <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / DRAWS)


def test_other_images_are_refused() -> None:
    same = answers("A", [True, False])
    for other in (answers("B", [True]), answers("B", [True, False], "other")):
        with pytest.raises(UserError, match="A and B were not evaluated on the same images"):
            compare(same, other)
    with pytest.raises(UserError, match="on no image"):
        compare(answers("A", []), answers("B", []))


def test_the_mean_over_classes_covers_the_truth_in_small_and_unequal_classes() -> None:
    rng = np.random.default_rng(3)
    sizes = rng.integers(2, 12, size=40)
    rates = rng.beta(2, 2, size=40)
    bounds = np.array([mean_per_class_interval(rng.binomial(sizes, rates), sizes) for _ in range(200)])
    true = rates.mean()
    assert 0.91 <= ((bounds[:, 0] <= true) & (true <= bounds[:, 1])).mean() <= 0.99


def test_classes_of_two_images_have_the_variance_that_two_images_show() -> None:
    low, high = mean_per_class_interval([1] * 400, [2] * 400)
    sample_variance = 0.5  # of 0 and 1
    assert high - low == pytest.approx(2 * 1.96 * np.sqrt(sample_variance / 2 / 400), rel=0.06)


def test_classes_of_one_image_are_pooled_and_empty_ones_left_out() -> None:
    low, high = mean_per_class_interval([1, 0] * 50 + [0], [1] * 100 + [0])
    plain_low, plain_high = wilson(50, 100)
    assert (low, high) == (pytest.approx(plain_low, abs=0.02), pytest.approx(plain_high, abs=0.02))


def test_the_bootstrap_is_the_same_for_the_same_seed() -> None:
    right, n = [3, 40, 7], [10, 50, 9]
    assert mean_per_class_interval(right, n) == mean_per_class_interval(right, n)
    assert mean_per_class_interval(right, n) != mean_per_class_interval(right, n, seed=1)
    hits, queries = np.arange(60.0) % 6, np.full(60, 5.0)
    assert recall_interval(hits, queries) == recall_interval(hits[::-1], queries[::-1])
    assert recall_interval(hits, queries) != recall_interval(hits, queries, seed=1)


def test_draws_in_small_steps_are_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = (
        mean_per_class_interval([3, 40, 7], [10, 50, 9]),
        recall_interval(np.arange(60.0) % 6, np.full(60, 5.0)),
    )
    monkeypatch.setattr(intervals_module, "_NUMBERS_PER_STEP", 700)
    steps = (
        mean_per_class_interval([3, 40, 7], [10, 50, 9]),
        recall_interval(np.arange(60.0) % 6, np.full(60, 5.0)),
    )
    assert steps[0] == pytest.approx(whole[0], abs=0.02)
    assert steps[1] == pytest.approx(whole[1], abs=0.02)


@pytest.mark.parametrize(
    ("right", "n", "what"),
    [([2], [1], "fit together"), ([1], [1, 2], "fit together"), ([0], [0], "no class")],
)
def test_counts_that_do_not_fit_are_refused(right: list[int], n: list[int], what: str) -> None:
    with pytest.raises(UserError, match=what):
        mean_per_class_interval(right, n)


def test_all_right_and_all_wrong_have_a_width_too() -> None:
    assert mean_per_class_interval([0, 0], [50, 50]) == wilson(0, 100)
    low, high = mean_per_class_interval([500, 2, 0], [500, 2, 0])
    assert 0.5 < low < 0.8
    assert high == 1
    assert recall_interval(np.zeros(40), np.arange(1.0, 41)) == wilson(0, 40)
    assert recall_interval(np.arange(1.0, 41), np.arange(1.0, 41)) == wilson(40, 40)


def test_hits_of_all_or_nothing_are_a_plain_count_of_images() -> None:
    hits = np.array([1.0] * 30 + [0.0] * 70)
    assert recall_interval(hits) == recall_interval(5 * hits, np.full(100, 5.0)) == wilson(30, 100)
    with pytest.raises(UserError, match="give both for every image"):
        recall_interval(hits, np.ones(3))
    with pytest.raises(UserError, match="0 sums"):
        recall_interval(np.array([]))


def test_recall_is_drawn_by_image_so_that_captions_of_one_image_stay_together() -> None:
    rng = np.random.default_rng(5)
    rates = rng.beta(0.3, 0.3, size=(150, 200))
    hits = rng.binomial(5, rates).astype(float)
    bounds = np.array([recall_interval(each, np.full(200, 5.0)) for each in hits])
    assert 0.91 <= ((bounds[:, 0] <= 0.5) & (bounds[:, 1] >= 0.5)).mean() <= 0.99


def test_recall_takes_images_with_many_captions_as_they_count() -> None:
    hits, queries = np.array([0.0] * 50 + [10.0] * 50), np.array([1.0] * 50 + [10.0] * 50)
    low, high = recall_interval(hits, queries)
    assert 0.8 < low < 500 / 550 < high < 1


def test_a_model_that_always_says_one_class_is_not_certain_of_its_mean_per_class() -> None:
    # 16 images have about the variance of this mean: 4 ** 2 / (1/3 + 1/4 + 1/5 + 1/6) = 16.8.
    assert mean_per_class_interval([3, 0, 0, 0], [3, 4, 5, 6]) == wilson(4, 16)
