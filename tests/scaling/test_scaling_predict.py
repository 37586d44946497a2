"""Extrapolation: held-out runs, and the best split of a budget."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from scipy.optimize import minimize_scalar

from openclip_scaling.cli import main
from openclip_scaling.comparing.runs_needed import halving_sentences, runs_to_halve
from openclip_scaling.errors import UserError
from openclip_scaling.fitting.analysis import Settings, analyse
from openclip_scaling.fitting.fit import fit_law
from openclip_scaling.fitting.holdout import held_out
from openclip_scaling.fitting.optimum import best_split
from openclip_scaling.fitting.points import Points
from openclip_scaling.fitting.uncertainty import Bootstrap, bootstrap
from openclip_scaling.forms.laws import LAWS
from openclip_scaling.pictures.surface_plot import surface_figure

TRUTH = {"alpha": 0.35, "beta": 0.3, "A": 400.0, "B": 400.0, "E": 1.5}


def grid(noise: float = 0.002) -> pd.DataFrame:
    """Nine model sizes with four checkpoints each."""
    sizes = np.repeat(np.geomspace(1e7, 1e9, 9), 4)
    samples = np.tile([1e9, 4e9, 1.6e10, 6.4e10], 9)
    loss = LAWS["chinchilla"].predict(TRUTH, np.column_stack([sizes, samples]))
    loss = loss * np.exp(noise * np.random.default_rng(0).normal(size=36))
    runs = np.repeat([f"run{i}" for i in range(9)], 4)
    return pd.DataFrame(
        {"run": runs, "attention": "linear", "parameters": sizes, "samples_seen": samples,
         "train_flop": sizes * samples, "val_loss": loss, "batch": 64, "val_batch": 64}
    )  # fmt: skip


def resampled(frame: pd.DataFrame, law: str = "chinchilla") -> Bootstrap:
    points = Points(
        frame[["parameters", "samples_seen"]].to_numpy(), frame["val_loss"].to_numpy(), tuple(frame["run"])
    )
    return bootstrap(points, fit_law(points, LAWS[law]), draws=0)


@pytest.mark.parametrize("law", ["chinchilla", "tied"])
def test_no_other_split_of_the_budget_is_better(law: str) -> None:
    boot = resampled(grid(), law)
    found = best_split(boot, budget=6e20, factor=6.0)
    assert found["first"] * found["second"] == pytest.approx(1e20)
    search = minimize_scalar(
        lambda log: boot.fit.predict(np.array([[np.exp(log), 1e20 / np.exp(log)]]))[0],
        bounds=(np.log(1e6), np.log(1e13)),
        method="bounded",
        options={"xatol": 1e-8},
    )
    assert np.log(found["first"]) == pytest.approx(search.x, abs=1e-4)
    assert found["predicted"] == pytest.approx(search.fun, rel=1e-9)


def test_intervals_of_the_best_split_hold_the_truth() -> None:
    found = best_split(resampled(grid()), budget=1e20, factor=1.0)
    exact = best_split(resampled(grid(noise=0.0)), budget=1e20, factor=1.0)
    for name in ("first", "second", "predicted", "growth"):
        low, high = found[f"{name}_interval95"]
        assert low < exact[name] < high
        assert low < found[name] < high
    assert exact["growth"] == pytest.approx(0.3 / 0.65, abs=1e-6)
    assert found["reliable"]


def test_one_scale_cannot_be_split() -> None:
    points = Points(np.geomspace(1, 100, 6), np.geomspace(3, 1, 6), tuple("abcdef"))
    boot = bootstrap(points, fit_law(points, LAWS["power"]), draws=0)
    with pytest.raises(UserError, match="nothing to split; use chinchilla or tied"):
        best_split(boot, 1e20, 6.0)
    with pytest.raises(UserError, match="--budget must be a positive number"):
        best_split(resampled(grid()), -1.0, 6.0)


def rising(frame: pd.DataFrame, largest: float = 1.0) -> pd.DataFrame:
    """The same runs with a loss that rises with model size, and falls at last where `largest` is below 1."""
    loss = (1.5 + 400 * frame["samples_seen"] ** -0.3) * (frame["parameters"] / 1e7) ** 0.02
    return frame.assign(val_loss=loss.where(frame["run"] < "run8", largest * loss))


def test_without_a_fall_in_both_scales_no_split_is_the_best(tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(UserError, match="does not fall with both scales"):
        best_split(resampled(rising(grid())), 1e20, 6.0)
    both = pd.concat([grid(), rising(grid()).assign(attention="softmax")])
    both.to_csv(tmp_path / "both.csv", index=False)
    budget = ["--budget", "1e20", "--flop-factor", "6"]
    assert run(str(tmp_path / "both.csv"), *TWO, *budget, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["group"] for row in found["splits"]] == ["linear"]
    assert any(text.startswith("softmax (chinchilla): The fitted metric") for text in found["notices"])
    assert run(str(tmp_path / "both.csv"), *TWO, *budget, "--where", "attention=softmax") == 2
    assert "softmax (chinchilla): The fitted metric does not fall" in capsys.readouterr().err


def test_a_split_that_hangs_on_one_run_is_open() -> None:
    """Without the one large run the metric does not fall with the size: the interval has no ends."""
    boot = resampled(rising(grid(), largest=0.6))
    assert (boot.left_out[:, 0] == 0).any()
    found = best_split(boot, 1e20, 6.0)
    for name in ("first", "second", "predicted"):
        assert found[f"{name}_interval95"] == (0.0, np.inf)
    assert found["growth_interval95"][1] == 1.0  # all that a budget can give to one scale


def test_a_gmac_costs_six_gflop_of_training(tmp_path: Path, capsys: Any) -> None:
    """2 FLOP per MAC, and three times the forward pass."""
    frame = grid().rename(columns={"parameters": "gmac_per_pair"})
    frame.to_csv(tmp_path / "table.csv", index=False)
    columns = ["--x", "gmac_per_pair,samples_seen", "--law", "chinchilla", "--budget", "1e30", "--json"]
    assert run(str(tmp_path / "table.csv"), *columns) == 0
    (row,) = json.loads(capsys.readouterr().out)["splits"]
    assert 6e9 * row["first"] * row["second"] == pytest.approx(1e30)


def test_held_out_scores_say_what_their_intervals_are_worth(tmp_path: Path, capsys: Any) -> None:
    frame = grid()
    frame[frame["run"] < "run4"].to_csv(tmp_path / "four.csv", index=False)
    assert run(str(tmp_path / "four.csv"), "--law", "power", "--hold-out", "1") == 0
    assert "not reliable with 3 runs" in capsys.readouterr().err


def test_held_out_runs_are_not_in_the_fit() -> None:
    """Spoiled large runs change their own scores, and nothing that is predicted for them."""
    settings = Settings(x="parameters,samples_seen", laws=("chinchilla",), draws=100)
    clean = grid()
    spoiled = clean.assign(val_loss=clean["val_loss"].where(clean["run"] < "run7", 99.0))
    (first, _), (second, _) = held_out(clean, settings, 2), held_out(spoiled, settings, 2)
    assert [row["run"] for row in first] == ["run7", "run8"]
    assert [row["predicted"] for row in first] == [row["predicted"] for row in second]
    assert all(abs(row["relative_error"]) < 0.01 for row in first)
    assert all(row["relative_error"] == pytest.approx(row["predicted"] / 99 - 1) for row in second)
    assert [row["inside"] for row in second] == [False, False]
    assert first[-1]["scale"] == [1e9, 6.4e10]


def test_the_law_decides_how_well_large_runs_are_predicted() -> None:
    """Under a floor the saturating law is nearer to the largest runs than the power law."""
    x = np.geomspace(1e6, 1e12, 24)
    loss = (1.5 + 200 * x**-0.4) * np.exp(0.001 * np.random.default_rng(0).normal(size=24))
    frame = pd.DataFrame({"run": [f"r{i:02d}" for i in range(24)], "all": "all", "x": x, "loss": loss})
    settings = Settings(metric="loss", x="x", by="all", laws=("power", "saturating"), draws=100)
    rows, notices = held_out(frame, settings, 3)
    worst = {law: max(abs(r["relative_error"]) for r in rows if r["law"] == law) for law in settings.laws}
    assert worst["saturating"] < 0.01 < worst["power"]
    assert len(rows) == 6
    assert notices == []


@pytest.mark.parametrize("runs", [3, 5, 9, 18])
def test_that_many_more_runs_halve_an_interval_and_one_fewer_does_not(runs: int) -> None:
    def width(count: int) -> float:
        return float(stats.t.ppf(0.975, count - 2)) / count**0.5

    more = runs_to_halve(runs)
    assert width(runs + more) <= width(runs) / 2 < width(runs + more - 1)


def test_more_runs_are_said_once_for_groups_of_one_size(table: str, capsys: Any) -> None:
    frame = grid()
    both = pd.concat([frame, frame.assign(attention="softmax", run="s" + frame["run"])])
    boots = analyse(both, Settings(laws=("power",), draws=100)).boots("power")
    (text,) = halving_sentences([boots, boots])
    assert text.startswith(f"linear and softmax: {runs_to_halve(9)} more runs each (now 9) would halve")
    assert run(table, "--law", "power", "--draws", "100", "--at", "1e20", "--json") == 0
    assert json.loads(capsys.readouterr().out)["sentences"][0].startswith("linear: ")
    assert run(table, *TWO, "--budget", "1e21", "--flop-factor", "6") == 0
    assert f"{runs_to_halve(9)} more runs (now 9) would halve" in " ".join(capsys.readouterr().out.split())


def test_no_interval_cannot_be_halved() -> None:
    frame = grid()[lambda rows: rows["run"] == "run0"]
    assert halving_sentences([analyse(frame, Settings(laws=("power",), draws=100)).boots("power")]) == []


def test_runs_that_cannot_be_spared_are_a_sentence() -> None:
    with pytest.raises(
        UserError, match=r"No run could be held out\. linear: 9 runs are too few to hold out 9\."
    ):
        held_out(grid(), Settings(draws=100), 9)
    with pytest.raises(UserError, match="at least 1"):
        held_out(grid(), Settings(draws=100), 0)


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["predict", *arguments])
    return int(stop.value.code or 0)


@pytest.fixture
def table(tmp_path: Path) -> str:
    grid().to_csv(tmp_path / "table.csv", index=False)
    return str(tmp_path / "table.csv")


TWO = ["--x", "parameters,samples_seen", "--law", "chinchilla", "--draws", "100"]


def test_predict_at_two_scales(table: str, capsys: Any) -> None:
    assert run(table, *TWO, "--at", "1e9,1e12", "--json") == 0
    (row,) = json.loads(capsys.readouterr().out)["predictions"]
    truth = float(LAWS["chinchilla"].predict(TRUTH, np.array([1e9, 1e12])))
    assert row["interval95"][0] < truth < row["interval95"][1]
    assert row["decades_beyond"] == pytest.approx(np.log10(1e12 / 6.4e10))
    assert row["scale"] == [1e9, 1e12]


def test_predict_for_a_budget_and_held_out_runs(table: str, capsys: Any) -> None:
    assert run(table, *TWO, "--budget", "1e21", "--flop-factor", "6") == 0
    printed = capsys.readouterr().out
    assert "best parameters [95 %]" in printed
    assert "1e+21" in printed
    assert run(table, *TWO, "--hold-out", "2") == 0
    printed = capsys.readouterr().out
    assert "run7" in printed
    assert "run8" in printed
    assert "run6" not in printed
    assert (
        run(table, "--law", "power", "--hold-out", "2", "--points", "ends", "--draws", "100", "--json") == 0
    )
    rows = json.loads(capsys.readouterr().out)["held_out"]
    assert [row["run"] for row in rows] == ["run7", "run8"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "one of --at, --hold-out and --budget"),
        (["--at", "1e9,1e10", "--hold-out", "1"], "one of --at, --hold-out and --budget"),
        (["--at", "1e9"], "--at 1e9 must be 2 positive numbers"),
        (["--at", "1e9,x"], "--at 1e9,x must be 2 positive numbers"),
        (["--budget", "1e20"], "give --flop-factor"),
        (["--budget", "1e20", "--budget", "nan", "--flop-factor", "6"], "Error: --budget must be a positive"),
        (
            ["--budget", "1e20", "--flop-factor", "0"],
            "Error: --flop-factor must be a positive number, not 0.",
        ),
        (["--hold-out", "-1"], "--hold-out must be at least 1"),
    ],
)
def test_wrong_arguments_are_sentences(table: str, capsys: Any, arguments: list[str], message: str) -> None:
    assert run(table, *TWO, *arguments) == 2
    assert message in capsys.readouterr().err


def test_laws_and_columns_that_do_not_fit_together_are_named(table: str, capsys: Any) -> None:
    assert run(table, "--law", "power", "--budget", "1e20") == 2
    assert "--budget is split between two columns of --x" in capsys.readouterr().err
    assert run(table, "--law", "chinchilla", "--at", "1") == 2
    assert "takes two columns of --x" in capsys.readouterr().err
    assert run(table, "--x", "parameters,samples_seen", "--law", "power", "--at", "1,1") == 2
    assert "takes one column of --x; laws of two are chinchilla, tied" in capsys.readouterr().err


def test_the_figure_of_two_scales_has_a_curve_per_size(table: str, tmp_path: Path, capsys: Any) -> None:
    settings = Settings(x="parameters,samples_seen", laws=("chinchilla",), draws=100)
    analysis = analyse(pd.concat([grid(), grid().assign(attention="softmax")]), settings)
    figure = surface_figure(analysis, "chinchilla")
    top = figure.axes[0]
    assert len(top.get_lines()) == 6
    assert len(np.asarray(top.collections[0].get_offsets())) == 36
    number = r"0\.\d{3} \[0\.\d{3}, 0\.\d{3}\]"
    assert re.fullmatch(rf"linear\nalpha = {number}, beta = {number}", top.get_title())
    few = analyse(grid()[grid()["run"] < "run4"], settings)
    title = surface_figure(few, "chinchilla").axes[0].get_title()
    assert title.endswith("4 runs: not reliable") or "not identified" in title
    with pytest.raises(SystemExit) as stop:
        main(["plot", table, *TWO, "-o", str(tmp_path / "figures"), "--json"])
    assert not stop.value.code
    (path,) = json.loads(capsys.readouterr().out)["files"]
    assert Path(path).name == "val-loss-chinchilla.png"
    assert Path(path).stat().st_size > 5000


def test_the_report_takes_one_scale(table: str, tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["report", table, "--x", "parameters,samples_seen", "-o", str(tmp_path / "out")])
    assert stop.value.code == 2
    assert "The report takes one column of --x" in capsys.readouterr().err
