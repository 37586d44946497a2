"""How much more scale one group needs than another for the same metric."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from openclip_scaling.cli import main
from openclip_scaling.comparing.compare import compare_groups
from openclip_scaling.comparing.comparison_words import remarks_of
from openclip_scaling.comparing.equal_loss import EqualLoss, equal_loss, log_scale_at
from openclip_scaling.fitting.analysis import Settings, analyse
from openclip_scaling.fitting.fit import fit_law
from openclip_scaling.fitting.points import Points
from openclip_scaling.fitting.uncertainty import Bootstrap, bootstrap
from openclip_scaling.forms.laws import LAWS
from openclip_scaling.reporting.markdown import comparisons_table


def runs_of(
    factor: float, floor: float = 0.0, seed: int = 0, noise: float = 0.01, exponent: float = -0.2
) -> Points:
    """Nine runs of four checkpoints that need `factor` times the scale of others."""
    generator = np.random.default_rng(seed)
    run = np.repeat(np.arange(9), 4)
    x = np.geomspace(1e9, 1e12, 9)[run] * np.tile([1.0, 2.0, 3.0, 4.0], 9)
    y = floor + 3 * (x / factor / 1e10) ** exponent
    return Points(x, y * np.exp(noise * generator.normal(size=9)[run]), tuple(f"r{i}" for i in run))


def resampled(points: Points, law: str = "power") -> Bootstrap:
    return bootstrap(points, fit_law(points, LAWS[law]), draws=0)


@pytest.mark.parametrize("law", ["power", "saturating", "offset", "broken"])
def test_the_scale_at_a_level_is_where_the_curve_has_it(law: str) -> None:
    boot = resampled(runs_of(1.0, floor=1.0), law)
    scale = float(np.exp(log_scale_at(boot, 3.0, boot.fit.theta)))
    assert boot.fit.predict(np.array([scale]))[0] == pytest.approx(3.0, rel=1e-9)


def test_twice_the_scale_for_the_same_metric() -> None:
    found = equal_loss([resampled(runs_of(2.0, seed=1)), resampled(runs_of(1.0, seed=2))])
    assert found is not None
    assert found.interval is not None
    assert found.interval[0] < 2 < found.interval[1]
    assert found.ratio == pytest.approx(2, rel=0.15)
    assert found.interval[0] > 1
    assert found.beyond[1] == 0


def test_the_level_is_the_best_that_both_reach_inside_their_points() -> None:
    boots = [resampled(runs_of(2.0, noise=0.0)), resampled(runs_of(1.0, noise=0.0))]
    found = equal_loss(boots)
    assert found is not None
    assert found.level == pytest.approx(3 * (4e12 / 2e10) ** -0.2, rel=1e-6)
    assert found.scales == (pytest.approx(4e12), pytest.approx(2e12))
    assert found.beyond == (pytest.approx(0, abs=1e-6), 0)
    lower = equal_loss(boots, level=0.5)
    assert lower is not None
    assert lower.ratio == pytest.approx(2, rel=1e-6)  # of parallel laws at every level
    assert min(lower.beyond) > 1


def test_a_level_below_a_floor_is_never_reached() -> None:
    boots = [resampled(runs_of(1.0, floor=2.0), "saturating"), resampled(runs_of(1.0), "saturating")]
    found = equal_loss(boots, level=1.5)
    assert found is not None
    assert found.scales[0] == np.inf
    assert found.scales[1] < np.inf
    assert (found.ratio, found.interval) == (None, None)


def test_curves_that_do_not_fall_have_no_scale_for_a_level() -> None:
    assert equal_loss([resampled(runs_of(1.0, exponent=0.1)), resampled(runs_of(1.0))]) is None


def table(**groups: Points) -> pd.DataFrame:
    parts = [
        pd.DataFrame(
            {"run": [f"{name}-{run}" for run in points.run], "attention": name, "train_flop": points.x,
             "val_loss": points.y, "batch": 64, "val_batch": 64}
        )
        for name, points in groups.items()
    ]  # fmt: skip
    return pd.concat(parts, ignore_index=True)


def sentences(frame: pd.DataFrame, law: str = "power", levels: tuple[float, ...] = ()) -> list[str]:
    found = analyse(frame, Settings(laws=(law,), draws=100))
    return remarks_of(compare_groups(found.boots(law), levels), found)


def test_the_sentence_names_who_needs_more() -> None:
    frame = table(linear=runs_of(3.0, seed=1, noise=0.005), softmax=runs_of(1.0, seed=2, noise=0.005))
    text = sentences(frame)[0]
    ratio = float(text.removeprefix("linear needs ").split()[0])
    assert ratio == pytest.approx(3, rel=0.1)
    assert "] the training compute of softmax for a validation loss of 1." in text
    assert text.endswith(" nats (power law).")
    turned = table(a=runs_of(1.0, seed=2, noise=0.005), b=runs_of(3.0, seed=1, noise=0.005))
    swapped = sentences(turned)[0]
    assert swapped == text.replace("linear", "b").replace("softmax", "a")


def test_an_interval_with_one_shows_no_difference() -> None:
    text = sentences(table(linear=runs_of(1.0, seed=1), softmax=runs_of(1.0, seed=2)))[0]
    assert text.endswith("; the interval holds 1, so neither is shown to need less.")


def test_what_is_extrapolated_or_never_reached_is_said() -> None:
    frame = table(linear=runs_of(3.0, floor=1.0, seed=1), softmax=runs_of(1.0, seed=2))
    below, far = sentences(frame, "saturating", (0.8, 1.3))[:2]
    assert below.startswith(
        "linear does not reach a validation loss of 0.8 nats, which is not above its floor of"
    )
    assert below.endswith("(saturating law); there is no ratio.")
    assert "; extrapolated, in decades: linear by " in far


def test_a_level_that_no_number_can_reach_is_not_said_to_be_below_a_floor_of_zero() -> None:
    frame = table(linear=runs_of(1.0, noise=0.0), softmax=runs_of(2.0, noise=0.0))
    text = sentences(frame, "saturating", (1e-300,))[0]
    assert "linear does not pass a validation loss of 1e-300 nats at any scale" in text


def test_a_group_that_cannot_be_fitted_is_named_where_nothing_is_compared(
    tmp_path: Path, capsys: Any
) -> None:
    frame = table(linear=runs_of(1.0), softmax=runs_of(2.0))
    frame = frame[(frame["attention"] == "linear") | (frame.index == frame.index[-1])]
    frame.to_csv(tmp_path / "t.csv", index=False)
    assert run("compare", str(tmp_path / "t.csv"), "--draws", "100") == 2
    message = " ".join(capsys.readouterr().err.split())
    assert "No law could be fitted to two groups" in message
    assert "softmax: no power fit: " in message


def test_the_table_of_the_report_has_the_ratio_and_the_sentences() -> None:
    frame = table(linear=runs_of(3.0, seed=1), softmax=runs_of(1.0, seed=2))
    found = analyse(frame, Settings(laws=("power", "saturating"), draws=100))
    comparisons = [item for law in found.settings.laws for item in compare_groups(found.boots(law))]
    text = comparisons_table(comparisons, found)
    assert "| equal metric [95 %] |" in text
    assert "- linear needs " in text
    assert "Secondary tests: " in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    for line in rows[:4]:
        assert line.count("|") == rows[0].count("|")
    assert any(line.startswith("| power | linear, softmax | F(1, 68) = ") for line in rows)


def test_levels_of_the_command(tmp_path: Path, capsys: Any) -> None:
    table(linear=runs_of(3.0, seed=1), softmax=runs_of(1.0, seed=2)).to_csv(tmp_path / "t.csv", index=False)
    arguments = ["compare", str(tmp_path / "t.csv"), "--law", "power", "--draws", "100"]
    assert run(*arguments, "--at-loss", "2", "--at-loss", "1.5", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    (item,) = found["comparisons"]
    assert [at["level"] for at in item["equal_loss"]] == [2, 1.5]
    assert [text[:13] for text in found["sentences"][:2]] == ["linear needs ", "linear needs "]
    assert found["secondary_tests"][0]["law"] == "power"
    assert run(*arguments) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "linear and softmax: exponents not distinguishable with 9 runs each." in printed
    assert "secondary tests" in printed
    assert run(*arguments, "--at-loss", "0") == 2
    assert "--at-loss must be a positive number, not 0" in capsys.readouterr().err


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    return int(stop.value.code or 0)


def test_numbers_of_one_level_are_json_ready() -> None:
    found = EqualLoss(2.0, (1.0, np.inf), None, None, (0.0, 0.0))
    assert found.as_dict()["ratio"] is None
