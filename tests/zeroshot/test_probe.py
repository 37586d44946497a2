import json
import shutil
import warnings
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression

from openclip_linattn.errors import UserError
from openclip_linattn.zeroshot.encoders.models import LoadedModel
from openclip_linattn.zeroshot.probe import fit as probe_fit
from openclip_linattn.zeroshot.probe.fit import Parts, Regression, find_peak, split, strength, sweep
from openclip_linattn.zeroshot.probe.scoring import score_probe
from openclip_linattn.zeroshot.sets.dataset import open_evaluation_set
from openclip_linattn.zeroshot.sets.kinds import EvaluationSet

NAMES = tuple("abcdefghij")


def clouds(n: int, classes: int = 4, seed: int = 0, noise: float = 1.5) -> tuple[np.ndarray, np.ndarray]:
    """Features of norm 1 around one direction per class, with an offset that all share."""
    rng = np.random.default_rng(seed)
    centers = np.random.default_rng(99).normal(size=(classes, 16)) + 3
    labels = rng.integers(classes, size=n)
    features = centers[labels] + noise * rng.normal(size=(n, 16))
    return features / np.linalg.norm(features, axis=1, keepdims=True), labels


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Any:
    def write(make: Any, label_set: str = "color", count: int = 60) -> tuple[EvaluationSet, EvaluationSet]:
        folder = tmp_path_factory.mktemp("probe")
        content = make.samples(count + 40)
        train = dict(list(content.items())[:count])
        test = dict(list(content.items())[count:])
        return tuple(  # type: ignore[return-value]
            open_evaluation_set(make.set(folder / name, part, 3), label_sets=[label_set])
            for name, part in (("train", train), ("test", test))
        )

    return write


def test_the_probe_reads_colors_from_the_features_of_a_random_model(
    loaded: LoadedModel, sets: Any, make: Any
) -> None:
    train, test = sets(make)
    scored = score_probe(loaded, train, test, batch_size=16)
    result = scored.result
    assert result["top1"] > 0.8
    assert result["top1"] == scored.predictions.right.mean()
    assert (result["task"], result["n"], result["n_train"]) == ("linear_probe", 40, 60)
    assert result["n_held_out"] == 12
    assert result["classes"] == 4
    assert "top5" not in result
    assert len(result["sweep"]) == 15
    assert result["C"] in [C for C, _, _ in result["sweep"]]
    for name in ("top1", "mean_per_class"):
        low, high = result[f"{name}_interval"]
        assert low <= result[name] <= high
    json.dumps(result, allow_nan=False)


def test_eight_classes_have_a_top5(loaded: LoadedModel, sets: Any, make: Any) -> None:
    result = score_probe(loaded, *sets(make, "color x shape"), shots=2).result
    assert result["top1"] <= result["top5"] <= 1
    assert (result["n_train"], result["n_held_out"], result["shots"]) == (16, 16, 2)


def test_the_result_depends_on_the_seed_and_on_nothing_else(
    loaded: LoadedModel, sets: Any, make: Any
) -> None:
    train, test = sets(make)
    first = score_probe(loaded, train, test, shots=3, seed=1, batch_size=7)
    again = score_probe(loaded, train, test, shots=3, seed=1, batch_size=7, workers=2)
    assert first.result == again.result
    assert np.array_equal(first.predictions.best, again.predictions.best)
    other = score_probe(loaded, train, test, shots=3, seed=2, batch_size=7)
    assert first.result["sweep"] != other.result["sweep"]


def test_what_takes_long_is_watched(loaded: LoadedModel, sets: Any, make: Any) -> None:
    seen: dict[str, tuple[int, list[int]]] = {}

    @contextmanager
    def watch(title: str, total: int) -> Any:
        seen[title] = (total, [])
        yield seen[title][1].append

    score_probe(loaded, *sets(make), watch=watch)
    assert {title: (total, sum(steps)) for title, (total, steps) in seen.items()} == {
        "features of train": (60, 60),
        "features of test": (40, 40),
        "fitting the probe": (16, 16),
    }


def test_centring_and_scaling_do_not_change_the_family_of_solutions() -> None:
    x, y = clouds(300)
    ours = Regression(x, y, 0.05)
    plain = LogisticRegression(C=0.05 / x.var(axis=0).mean(), max_iter=20000, tol=1e-9).fit(x, y)
    test, _ = clouds(200, seed=1)
    assert ours.converged
    found = ours.scores(test, 4)
    assert np.allclose(found - found.mean(axis=1, keepdims=True), plain.decision_function(test), atol=0.005)
    assert np.array_equal(ours.best(test, 4, 4)[:, 0], plain.predict(test))


def test_two_classes_are_told_apart_and_untrained_ones_never_chosen() -> None:
    x, y = clouds(200, classes=2, noise=0.3)
    regression = Regression(x, 2 * y + 1, 1.0)
    best = regression.best(x, 5, 5)
    assert (best[:, 0] == 2 * y + 1).mean() > 0.95
    assert set(best[:, :2].ravel()) == {1, 3}
    assert np.isneginf(regression.scores(x, 5)[:, [0, 2, 4]]).all()


def test_rows_are_scored_in_steps_that_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = clouds(100)
    regression = Regression(x, y, 1.0)
    whole = regression.best(x, 4, 4)
    monkeypatch.setattr(probe_fit, "_ROWS_PER_STEP", 7)
    assert np.array_equal(regression.best(x, 4, 4), whole)


def test_features_that_are_all_alike_are_no_error() -> None:
    regression = Regression(np.ones((10, 3)), np.arange(10) % 2, 1.0)
    assert np.isfinite(regression.scores(np.ones((2, 3)), 2)).all()


def test_a_fit_that_does_not_converge_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = clouds(200)
    monkeypatch.setattr(probe_fit, "_ITERATIONS", 2)
    parts = split(y, shots=None, seed=0, names=NAMES)
    tried = sweep(x, y, parts, 4, lambda _: None).tried
    assert not all(converged for _, _, converged in tried)
    assert not Regression(x, y, 1e6).converged
    monkeypatch.setattr(probe_fit, "_ITERATIONS", 1000)
    assert Regression(x, y, 1.0).converged


def test_warnings_other_than_of_convergence_are_passed_on() -> None:
    class Warner:
        def fit(self, *_: object) -> None:
            warnings.warn("late", ConvergenceWarning, stacklevel=1)
            warnings.warn("other", UserWarning, stacklevel=1)

    with pytest.warns(UserWarning, match="other"):
        assert not probe_fit._fit(Warner(), np.ones((2, 1)), np.arange(2))


def test_the_grid_spans_twelve_decades() -> None:
    assert (strength(0), strength(48), strength(96)) == pytest.approx((1e-6, 1.0, 1e6))


@pytest.mark.parametrize("peak", [0, 5, 40, 61, 96])
def test_the_search_finds_a_single_peak_with_few_fits(peak: int) -> None:
    found = find_peak(lambda position: -abs(position - peak))
    assert max(found, key=lambda position: found[position]) == peak
    assert len(found) <= probe_fit.MOST_FITS - 1


def test_of_equally_good_strengths_the_strongest_penalty_is_taken() -> None:
    x, y = clouds(60, noise=0.01)
    rows = np.arange(60)
    found = sweep(x, y, Parts(rows[:40], rows[40:], rows), 4, lambda _: None)
    perfect = [C for C, accuracy, _ in found.tried if accuracy == 1.0]
    assert min(perfect) == found.C
    assert [C for C, _, _ in found.tried] == sorted(C for C, _, _ in found.tried)


def test_the_strength_is_chosen_on_held_out_rows_only() -> None:
    x, y = clouds(120)
    rows = np.arange(120)
    parts = Parts(rows[:60], rows[60:], rows)
    found = sweep(x, y, parts, 4, lambda _: None)
    for C, accuracy, _ in found.tried:
        regression = Regression(x[:60], y[:60], C)
        assert accuracy == (regression.best(x[60:], 4, 1)[:, 0] == y[60:]).mean()
    assert (
        next(C for C, accuracy, _ in found.tried if accuracy == max(a for _, a, _ in found.tried)) == found.C
    )


def test_a_fifth_of_each_class_is_held_out() -> None:
    labels = np.repeat([0, 1, 2], [50, 10, 1])
    parts = split(labels, shots=None, seed=0, names=NAMES)
    assert np.bincount(labels[parts.held], minlength=3).tolist() == [10, 2, 0]
    assert np.bincount(labels[parts.fit], minlength=3).tolist() == [40, 8, 1]
    assert sorted(parts.final) == sorted([*parts.fit, *parts.held]) == list(range(61))


def test_shots_are_what_is_trained_on_and_the_choice_of_c_sees_others() -> None:
    labels = np.repeat([0, 1, 2], [50, 17, 16])
    parts = split(labels, shots=16, seed=0, names=NAMES)
    assert np.bincount(labels[parts.fit]).tolist() == [16, 16, 16]
    assert np.bincount(labels[parts.held], minlength=3).tolist() == [4, 1, 0]
    assert not set(parts.fit) & set(parts.held)
    assert np.array_equal(parts.final, parts.fit)
    assert np.bincount(labels[split(labels, shots=2, seed=0, names=NAMES).held]).tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    ("shots", "reason"),
    [
        (0, "number of shots is 0"),
        (6, "class 'b' has 5 training images, fewer than the 6 shots"),
        (5, "no class has a training image to choose the penalty by"),
    ],
)
def test_impossible_shots_are_refused(shots: int, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        split(np.repeat([0, 1], [5 if shots == 5 else 9, 5]), shots=shots, seed=0, names=NAMES)


def test_sets_that_do_not_fit_together_are_refused(
    loaded: LoadedModel, sets: Any, make: Any, tmp_path: Path
) -> None:
    train, test = sets(make)
    with pytest.raises(UserError, match="needs two splits"):
        score_probe(loaded, train, train)
    other = replace(test, label_sets=(replace(test.label_sets[0], name="hue"),))
    with pytest.raises(UserError, match=r"has no label set 'color'.*it has 'hue'"):
        score_probe(loaded, train, other)
    reversed_classes = tuple(reversed(test.label_sets[0].classes))
    other = replace(test, label_sets=(replace(test.label_sets[0], classes=reversed_classes),))
    with pytest.raises(UserError, match="another order of them, in label set 'color'"):
        score_probe(loaded, train, other)


def only(make: Any, folder: Path, colors: set[str]) -> EvaluationSet:
    content = {k: v for k, v in make.samples(60).items() if json.loads(v["json"])["color"] in colors}
    return open_evaluation_set(make.set(folder, content), label_sets=["color"])


def test_classes_without_training_images_are_named(
    loaded: LoadedModel, sets: Any, make: Any, tmp_path: Path
) -> None:
    _, test = sets(make)
    with pytest.raises(UserError, match=r"2 of the classes to test have no image in .*first 'blue'"):
        score_probe(loaded, only(make, tmp_path / "two", {"red", "green"}), test)
    one = only(make, tmp_path / "one", {"red"})
    shutil.copytree(tmp_path / "one", tmp_path / "again")
    again = open_evaluation_set(tmp_path / "again", label_sets=["color"])
    with pytest.raises(UserError, match="are all of class 'red'"):
        score_probe(loaded, one, again)


def test_class_folders_are_probed_too(loaded: LoadedModel, make: Any, tmp_path: Path) -> None:
    for number, (key, members) in enumerate(make.samples(48).items()):
        color = json.loads(members["json"])["color"]
        path = tmp_path / ("train" if number < 32 else "test") / color / f"{key}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(members["png"])
    train, test = (open_evaluation_set(f"folder:{tmp_path / name}") for name in ("train", "test"))
    result = score_probe(loaded, train, test, workers=1).result
    assert (result["n"], result["n_train"]) == (16, 32)
    assert result["top1"] > 0.7
