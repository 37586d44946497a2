"""Sweeps of learning rates: the best of each cell, and runs that correspond between groups."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from openclip_scaling.cli import main
from openclip_scaling.comparing.compare import compare_groups
from openclip_scaling.fitting.analysis import Settings, analyse
from openclip_scaling.fitting.best_rate import AtBestRate
from openclip_scaling.fitting.holdout import held_out
from openclip_scaling.fitting.metrics import metric_columns
from openclip_scaling.reading.runs import Collection, collect
from openclip_scaling.reporting.report_content import content
from openclip_scaling.reporting.sweep_table import sweep_table

RATES = (5e-4, 1e-3, 2e-3)
SETTINGS = Settings(laws=("power",), draws=100)


def swept(
    best: dict[str, float],
    seeds: tuple[int, ...] = (0,),
    penalty: float = 0.05,
    noise: float = 0.01,
    sizes: int = 6,
) -> pd.DataFrame:
    """Runs of two checkpoints in several sizes at three rates; `penalty` in ln E for one step from the best."""
    rows = []
    for kind, rate_of_kind in best.items():
        for size, parameters in enumerate(np.geomspace(1e6, 1e9, sizes)):
            for seed in seeds:
                common = np.random.default_rng([size, seed]).normal()  # the data of this seed
                for rate in RATES:
                    steps = abs(RATES.index(rate) - RATES.index(rate_of_kind))
                    for epoch in (1, 2):
                        flop = parameters * 1e6 * epoch
                        loss = 3 * (flop / 1e12) ** -0.1 * np.exp(penalty * steps + noise * common)
                        rows.append(
                            {"run": f"{kind}-{size}-{seed}-{rate:g}", "attention": kind, "parameters": parameters,
                             "samples_seen": 1e6 * epoch, "epoch": epoch, "train_flop": flop, "val_loss": loss,
                             "learning_rate": rate, "seed": seed, "batch": 64, "val_batch": 64}
                        )  # fmt: skip
    return pd.DataFrame(rows)


def test_each_group_is_fitted_at_its_own_best_rate() -> None:
    frame = swept({"linear": 5e-4, "softmax": 1e-3})
    found = analyse(frame, SETTINGS)
    for kind, rate in (("linear", 5e-4), ("softmax", 1e-3)):
        alone = analyse(frame[(frame["attention"] == kind) & (frame["learning_rate"] == rate)], SETTINGS)
        ours, wanted = found.by_law("power")[kind], alone.by_law("power")[kind]
        assert ours.fit.parameters == wanted.fit.parameters
        assert ours.boot.runs == wanted.boot.runs == 6
        assert ours.boot.intervals == wanted.boot.intervals
        assert found.points[kind].runs == alone.points[kind].runs


def test_the_chosen_rates_are_named_and_those_at_the_edge() -> None:
    notices = "\n".join(analyse(swept({"linear": 5e-4, "softmax": 1e-3}), SETTINGS).notices)
    assert "softmax: learning rates are swept" in notices
    assert "by the metric at the end: 0.001 of 0.0005, 0.001, 0.002 (every cell)" in notices
    assert "linear: the best learning rate is the lowest or highest tried" in notices
    assert "softmax: the best learning rate is" not in notices


def test_cells_with_other_rates_are_listed_apart() -> None:
    small = swept({"softmax": 1e-3})[lambda rows: rows["parameters"] < 2e6]
    large = swept({"softmax": 5e-4})[lambda rows: rows["parameters"] > 2e6]
    notices = "\n".join(analyse(pd.concat([small, large]), SETTINGS).notices)
    assert "0.001 of 0.0005, 0.001, 0.002 (1e+06 parameters, 2,000,000 samples); 0.0005 of" in notices
    assert "may lie beyond: 0.0005 (3.981e+06 parameters, 2,000,000 samples; " in notices


def test_without_a_sweep_nothing_is_chosen_or_said() -> None:
    frame = swept({"softmax": 1e-3})
    by_size = frame.groupby("parameters")["learning_rate"].transform(lambda rates: rates.min())
    single = frame[frame["learning_rate"] == by_size].assign(
        learning_rate=lambda rows: rows["parameters"] ** -0.1  # another rate for every size is no sweep
    )
    found = analyse(single, SETTINGS)
    assert not any("learning rate" in text and "swept" in text for text in found.notices)
    assert len(found.points["softmax"].runs) == 6


def test_a_rate_is_chosen_by_the_mean_over_seeds_not_by_the_luckiest_run() -> None:
    frame = swept({"softmax": 1e-3}, seeds=(0, 1, 2), penalty=0.002, noise=0.0)
    lucky = (frame["run"].str.endswith("-1-0.002")) & (frame["parameters"] == 1e6)
    frame.loc[lucky, "val_loss"] *= 0.998
    rates = {run.rsplit("-", 1)[1] for run in analyse(frame, SETTINGS).points["softmax"].runs}
    assert rates == {"0.001"}


def test_the_choice_is_made_again_without_a_seed() -> None:
    """Two seeds agree on one rate and the third pulls to another: leaving it out changes what is fitted."""
    frame = swept({"softmax": 1e-3}, seeds=(0, 1, 2), penalty=0.002, noise=0.0)
    odd = frame["run"].str.endswith("-2-0.002") & (frame["parameters"] == 1e6)
    frame.loc[odd, "val_loss"] *= 0.98
    item = analyse(frame, SETTINGS).by_law("power")["softmax"]
    plan = {row.run: (f"{row.parameters:g}", row.seed) for row in frame.itertuples()}
    assert item.boot.runs == len(set(plan.values())) == 18
    assert item.boot.reselected
    where = item.boot.experiments.index("1e+06 parameters, 2,000,000 samples, seed 2")
    others = [row for row in range(18) if "1e+06" not in item.boot.experiments[row]]
    moved = np.abs(item.boot.left_out[where] - item.fit.theta).max()
    assert moved > 5 * np.abs(item.boot.left_out[others] - item.fit.theta).max()


def test_a_rate_that_most_seeds_did_not_survive_is_not_chosen_by_the_lucky_one() -> None:
    frame = swept({"softmax": 1e-3}, seeds=(0, 1, 2))
    fast = frame["run"].str.endswith("-0.002") & (frame["parameters"] == 1e6)
    frame.loc[fast & (frame["seed"] == 2), "val_loss"] *= 0.9
    found = analyse(frame[~(fast & (frame["seed"] < 2))], SETTINGS)
    assert {run.rsplit("-", 1)[1] for run in found.points["softmax"].runs} == {"0.001"}
    text = (
        "softmax: learning rates with fewer runs than others, which are not chosen: 0.002 (1e+06 parameters, "
    )
    assert any(notice.startswith(text) for notice in found.notices)


def test_groups_with_other_numbers_of_rates_are_said_to_be_compared_unevenly() -> None:
    frame = swept({"linear": 1e-3, "softmax": 1e-3})
    assert not any("differ between groups" in text for text in analyse(frame, SETTINGS).notices)
    uneven = frame[(frame["attention"] == "linear") | (frame["learning_rate"] == 1e-3)]
    text = "learning rates tried per cell differ between groups, which favours those with more: linear 3, softmax 1"
    assert text in analyse(uneven, SETTINGS).notices


def test_a_cell_without_a_sweep_is_named() -> None:
    frame = swept({"softmax": 1e-3})
    frame = frame[(frame["parameters"] > 2e6) | (frame["learning_rate"] == 5e-4)]
    found = analyse(frame, SETTINGS)
    assert len(found.points["softmax"].runs) == 6
    assert any("may not be their best: 0.0005 (1e+06 parameters" in text for text in found.notices)


def test_seeds_that_are_not_known_do_not_stop_the_choice() -> None:
    frame = swept({"softmax": 1e-3}, seeds=(0, 1)).drop(columns="seed")
    item = analyse(frame, SETTINGS).by_law("power")["softmax"]
    assert item.boot.runs == 12
    assert {run.rsplit("-", 1)[1] for run in item.fit.points.runs} == {"0.001"}


def test_rates_that_cannot_be_sorted_into_sweeps_are_said_to_be_mixed() -> None:
    frame = swept({"softmax": 1e-3}).drop(columns="samples_seen")
    found = analyse(frame, SETTINGS)
    assert any("softmax: several learning rates are fitted together" in text for text in found.notices)


def test_a_selection_by_value_stays_one_at_the_best_rate() -> None:
    found = analyse(swept({"softmax": 1e-3}), replace(SETTINGS, points="frontier"))
    assert found.by_law("power")["softmax"].boot.reselected
    assert not AtBestRate({}).by_value


def test_held_out_runs_are_those_at_the_best_rate() -> None:
    rows, notices = held_out(swept({"softmax": 1e-3}), SETTINGS, 2)
    assert [row["run"] for row in rows] == ["softmax-4-0-0.001", "softmax-5-0-0.001"]
    assert any("learning rates are swept" in text for text in notices)


def unswept(share: float, sizes: int = 9, noise: float = 0.03) -> pd.DataFrame:
    """One run per size of two kinds, whose scatter has `share` of its variance in common."""
    rows, generator = [], np.random.default_rng(4)
    for size, parameters in enumerate(np.geomspace(1e6, 1e9, sizes)):
        common = generator.normal()
        for kind in ("linear", "softmax"):
            own = generator.normal()
            flop = parameters * 1e6
            scatter = noise * (share**0.5 * common + (1 - share) ** 0.5 * own)
            rows.append(
                {"run": f"{kind}-{size}", "attention": kind, "parameters": parameters + (kind == "linear"),
                 "samples_seen": 1e6, "train_flop": flop, "val_loss": 3 * (flop / 1e12) ** -0.1 * np.exp(scatter),
                 "seed": 0, "batch": 64, "val_batch": 64}
            )  # fmt: skip
    return pd.DataFrame(rows)


def width(frame: pd.DataFrame) -> tuple[float, str, int]:
    (found,) = compare_groups(analyse(frame, SETTINGS).boots("power"))
    assert found.interval is not None
    return found.interval[1] - found.interval[0], found.verdict, found.pairs


def test_runs_that_share_their_data_make_the_difference_narrower() -> None:
    frame = unswept(share=0.95)
    paired, verdict, pairs = width(frame)
    apart, other, none = width(frame.drop(columns="seed"))
    assert paired < 0.5 * apart
    assert (pairs, none) == (9, 0)
    assert verdict.endswith("with 9 runs each, in pairs.")
    assert other.endswith("with 9 runs each.")


def test_a_pair_is_left_out_of_both_groups_at_once() -> None:
    """The interval of the difference is the t interval of the differences that leave out one pair."""
    boots = analyse(unswept(share=0.5), SETTINGS).boots("power")
    (found,) = compare_groups(boots)
    differences = boots["linear"].left_out[:, 0] - boots["softmax"].left_out[:, 0]
    error = np.sqrt(8 / 9 * ((differences - differences.mean()) ** 2).sum())
    assert found.interval is not None
    assert found.interval[1] - found.difference == pytest.approx(2.446912 * error, rel=1e-6)  # t(6)


def test_what_only_one_group_has_counts_alone() -> None:
    frame = unswept(share=0.95)
    fewer = frame[frame["run"] != "linear-4"]
    found = compare_groups(analyse(fewer, SETTINGS).boots("power"))[0]
    assert found.pairs == 8
    assert "8 and 9 runs, 8 of them in pairs" in found.verdict


def test_other_seeds_do_not_correspond() -> None:
    frame = unswept(share=0.95)
    frame["seed"] = (frame["attention"] == "linear").astype(int)
    assert width(frame)[2] == 0


def test_learning_rate_and_seed_are_collected_and_are_no_metrics(write_run: Any, fake: Any) -> None:
    writer = fake.LogWriter()
    writer.process(fake.PARAMS)
    writer.epoch(0, 8, 40, [2.0, 1.9, 1.8, 1.8, 1.7])
    folder = write_run("one", writer.text, {**fake.PARAMS, "lr": 0.0005, "seed": 0})
    other = write_run("two", writer.text, fake.PARAMS)
    frame = collect([folder, other]).checkpoints
    assert frame["learning_rate"].tolist() == pytest.approx([5e-4, np.nan], nan_ok=True)
    assert frame["seed"].tolist() == pytest.approx([0, np.nan], nan_ok=True)
    assert not {"learning_rate", "seed"} & set(metric_columns(frame))


def test_compare_says_which_rates_and_pairs(tmp_path: Path, capsys: Any) -> None:
    frame = swept({"linear": 1e-3, "softmax": 1e-3}, noise=0.02)
    frame.to_csv(tmp_path / "t.csv", index=False)
    with pytest.raises(SystemExit) as stop:
        main(["compare", str(tmp_path / "t.csv"), "--law", "power", "--draws", "100", "--json"])
    assert not stop.value.code
    found = json.loads(capsys.readouterr().out)
    assert found["comparisons"][0]["pairs"] == 6
    assert sum("learning rates are swept" in text for text in found["notices"]) == 2


def test_the_report_has_the_metric_at_every_rate_with_the_best_in_bold() -> None:
    frame = swept({"linear": 5e-4, "softmax": 1e-3}, seeds=(0, 1), sizes=2)
    lost = (frame["attention"] == "linear") & (frame["learning_rate"] == 2e-3) & (frame["parameters"] > 1e8)
    frame = frame[~lost]
    lines = sweep_table(frame, replace(SETTINGS, metric="val_loss")).splitlines()
    assert lines[0].startswith("validation loss (nats) at the end of training by learning rate")
    assert lines[2] == "| attention | size, samples | 0.0005 | 0.001 | 0.002 |"
    cells = {
        (row[0], row[1]): row[2:]
        for row in ([each.strip() for each in line.strip("|").split("|")] for line in lines[4:])
    }
    assert {group for group, _ in cells} == {"linear", "softmax"}
    small, large = ((kind, f"{size} parameters, 2,000,000 samples") for kind, size in
                    (("softmax", "1e+06"), ("linear", "1e+09")))  # fmt: skip
    ends = frame[(frame["epoch"] == 2) & (frame["attention"] == "softmax") & (frame["parameters"] == 1e6)]
    means = [np.exp(np.log(part["val_loss"]).mean()) for _, part in ends.groupby("learning_rate")]
    assert cells[small] == [f"{means[0]:.4g}", f"**{means[1]:.4g}**", f"{means[2]:.4g}"]
    assert cells[large][0].startswith("**")
    assert cells[large][2] == "-"
    assert sweep_table(frame[frame["learning_rate"] == 1e-3], SETTINGS) == ""


def test_a_sweep_of_one_size_has_its_table_though_nothing_can_be_fitted() -> None:
    frame = swept({"linear": 5e-4, "softmax": 1e-3}, sizes=1)
    empty = pd.DataFrame()
    report = content(Collection(frame, empty, empty), ["val_loss"], replace(SETTINGS, points="ends"))
    text = "\n".join(block for block in report.blocks if isinstance(block, str))
    assert (
        text.count("linear, softmax: no power fit: 1 points at 1 different scales") == 2
    )  # verdict and chapter
    assert "| softmax | 1e+06 parameters, 2,000,000 samples |" in text
