"""From tables to fits: what is left out and named, what must not be mixed, published tables by column."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from openclip_scaling.errors import UserError
from openclip_scaling.fitting.analysis import Analysis, Settings, analyse
from openclip_scaling.fitting.metrics import metric_columns, metric_named
from openclip_scaling.reading.runs import collect

FAST = Settings(draws=100)


def table(kinds: tuple[str, ...] = ("linear", "softmax"), runs: int = 3, **columns: Any) -> pd.DataFrame:
    generator = np.random.default_rng(0)
    rows = []
    for kind in kinds:
        for run in range(runs):
            shift = 0.01 * generator.normal()
            for epoch in (1, 2, 3):
                flop = 1e12 * 4.0**run * epoch
                loss = 3 * (flop / 1e12) ** (-0.1 if kind == "softmax" else -0.12) * np.exp(shift)
                rows.append(
                    {"run": f"{kind}-{run}", "attention": kind, "epoch": epoch, "train_flop": flop, "val_loss": loss,
                     "samples_seen": 1000 * epoch, "batch": 64, "val_batch": 64, "diverged": False,
                     "set/labels/top1": 1 - loss / 5}
                )  # fmt: skip
    return pd.DataFrame(rows).assign(**columns)


def exponents(analysis: Analysis, law: str = "power") -> dict[str, float]:
    return {group: item.fit.parameters["a"] for group, item in analysis.by_law(law).items()}


def test_groups_are_fitted_apart() -> None:
    found = analyse(table(), FAST)
    assert exponents(found) == {
        "linear": pytest.approx(-0.12, abs=0.02),
        "softmax": pytest.approx(-0.1, abs=0.02),
    }
    assert all("not reliable with 3 runs" in text for text in [found.fits[0].notices[-1]])


def test_a_nan_and_a_diverged_run_are_left_out_and_named() -> None:
    clean = table()
    spoiled = clean.copy()
    spoiled.loc[1, "val_loss"] = np.nan
    extra = clean[clean["run"] == "linear-0"].assign(run="lost", val_loss=50.0, diverged=True)
    found = analyse(pd.concat([spoiled, extra], ignore_index=True), FAST)
    assert exponents(found) == exponents(analyse(clean.drop(index=1), FAST))
    text = "\n".join(found.notices)
    assert "left out, diverged: lost" in text
    assert "val_loss is missing or not a positive finite number: linear-0 epoch 2" in text


def test_error_in_percent_and_in_fraction_have_one_exponent() -> None:
    settings = replace(FAST, metric="set/labels/top1")
    fraction = table()
    percent = fraction.assign(**{"set/labels/top1": 100 * fraction["set/labels/top1"]})
    first, second = analyse(fraction, settings), analyse(percent, settings)
    for group, value in exponents(first).items():
        assert exponents(second)[group] == pytest.approx(value, rel=1e-9)
    assert first.points["linear"].y == pytest.approx(
        table()["val_loss"][:9].sort_values(ascending=False) / 5, rel=1e-9
    )


def test_the_error_is_labelled_in_the_unit_of_the_table() -> None:
    settings = replace(FAST, metric="set/labels/top1")
    fraction = table()
    percent = fraction.assign(**{"set/labels/top1": 100 * fraction["set/labels/top1"]})
    assert analyse(fraction, settings).metric.label == "set/labels/top1, error (1 - accuracy)"
    found = analyse(percent, settings)
    assert found.metric.label == "set/labels/top1, error (100 - accuracy, %)"
    assert any("taken as percentages" in text for text in found.notices)


def test_one_percentage_among_fractions_is_pointed_out() -> None:
    spoiled = table()
    spoiled.loc[0, "set/labels/top1"] *= 100
    found = analyse(spoiled, replace(FAST, metric="set/labels/top1"))
    assert any("make sure that they are no fractions" in text for text in found.notices)


@pytest.mark.parametrize("value", [-0.2, 250.0])
def test_what_cannot_be_an_accuracy_is_refused(value: float) -> None:
    spoiled = table()
    spoiled.loc[0, "set/labels/top1"] = value
    with pytest.raises(UserError, match="is no accuracy"):
        analyse(spoiled, replace(FAST, metric="set/labels/top1"))


@pytest.mark.parametrize(
    "name",
    [
        *("set/mean_per_class", "set/image_retrieval_recall@5", "acc1", "set/top-1"),
        "set/clip_benchmark/mean_average_precision",
    ],
)
def test_accuracies_are_known_by_name(name: str) -> None:
    assert metric_named(name).complement


def test_repeated_rows_are_left_out_and_counted() -> None:
    once = table()
    twice = analyse(pd.concat([once, once], ignore_index=True), FAST)
    assert [item.as_dict() for item in twice.fits] == [item.as_dict() for item in analyse(once, FAST).fits]
    assert "left out, equal to another row in every column: 18 rows" in twice.notices


def test_rows_without_a_run_are_runs_of_their_own() -> None:
    spoiled = table()
    spoiled.loc[[0, 3], "run"] = None
    found = analyse(spoiled, FAST)
    assert len(found.points["linear"].runs) == 5
    assert "rows without a run, each taken as a run of its own: 2" in found.notices


@pytest.mark.parametrize(("schedule", "said"), [("const", False), ("cosine", True), (None, True)])
def test_decay_is_spoken_of_unless_the_rate_is_constant(schedule: str | None, said: bool) -> None:
    found = analyse(table(lr_schedule=schedule), FAST)
    assert any("its learning rate has decayed" in text for text in found.notices) is said


def test_a_rising_metric_has_no_saturating_fit_worth_a_word() -> None:
    rising = table()
    rising["val_loss"] = (rising["train_flop"] / 1e12) ** 0.1
    found = analyse(rising, replace(FAST, laws=("saturating",)))
    assert any("does not fall on these points" in text for text in found.remarks)


@pytest.mark.parametrize(
    ("costs", "points", "said"),
    [((0.1, 0.2), "all", True), ((0.1, 0.2), "frontier", False), ((0.1, 0.102), "all", False)],
)
def test_sizes_fitted_together_are_spoken_of(costs: tuple[float, float], points: str, said: bool) -> None:
    sized = table()
    sized["gmac_per_pair"] = np.resize(np.repeat(costs, 3), len(sized))
    found = analyse(sized, replace(FAST, points=points))
    assert any("model sizes are fitted together" in text for text in found.notices) is said


def test_an_empty_table_is_named() -> None:
    with pytest.raises(UserError, match="The table has no rows"):
        analyse(table().iloc[:0], FAST)


def test_an_unknown_batch_is_called_so() -> None:
    mixed = table()
    mixed.loc[0, "batch"] = np.nan
    with pytest.raises(UserError, match="batch unknown"):
        analyse(mixed, FAST)


@pytest.mark.parametrize(
    ("name", "column", "complement"),
    [("val_loss", "val_loss", False), ("imagenet-zeroshot-val-top1", "imagenet-zeroshot-val-top1", True),
     ("image_to_text_R@5", "image_to_text_R@5", True), ("error:score", "score", True), ("err1", "err1", False),
     ("a/b/mean_per_class_recall", "a/b/mean_per_class_recall", True)],
)  # fmt: skip
def test_accuracies_are_fitted_as_errors(name: str, column: str, complement: bool) -> None:
    metric = metric_named(name)
    assert (metric.column, metric.complement) == (column, complement)


@pytest.mark.parametrize("column", ["batch", "val_batch"])
def test_batch_sizes_are_never_mixed_in_a_loss(column: str) -> None:
    mixed = table()
    mixed.loc[mixed["attention"] == "linear", column] = 128
    with pytest.raises(UserError, match=r"depends on the batch size.*64.*128.*--batch.*--per-batch"):
        analyse(mixed, FAST)
    apart = analyse(mixed, replace(FAST, per_batch=True))
    assert len(exponents(apart)) == 2
    assert any("128" in group for group in exponents(apart))
    assert exponents(analyse(mixed, replace(FAST, metric="set/labels/top1"))).keys() == {"linear", "softmax"}


def test_one_batch_size_can_be_chosen() -> None:
    mixed = table()
    mixed.loc[mixed["attention"] == "linear", ["batch", "val_batch"]] = 128
    assert list(exponents(analyse(mixed, replace(FAST, batch=64)))) == ["softmax"]
    with pytest.raises(UserError, match="No row of the table meets the conditions"):
        analyse(mixed, replace(FAST, batch=7))


def test_points_and_least_samples() -> None:
    assert len(analyse(table(), replace(FAST, points="ends")).fits[0].fit.points) == 3
    assert len(analyse(table(), replace(FAST, min_samples=2000)).fits[0].fit.points) == 6
    assert any("--points ends" in text for text in analyse(table(), FAST).notices)


def test_a_text_tower_of_its_own_kind_is_a_group_of_its_own() -> None:
    both = pd.concat([table(("linear",)), table(("linear",)).assign(text_attention="linear", run="t")])
    both["text_attention"] = both["text_attention"].fillna("softmax")
    assert set(analyse(both, FAST).points) == {"linear", "linear (text: linear)"}


def test_rows_without_attention_form_a_named_group() -> None:
    found = analyse(table(attention=None), FAST)
    assert list(found.points) == ["unknown"]
    assert any("'unknown'" in text for text in found.notices)


def test_a_group_that_cannot_be_fitted_is_named() -> None:
    frame = pd.concat([table(("linear",)), table(("softmax",)).head(1)])
    found = analyse(frame, FAST)
    assert list(exponents(found)) == ["linear"]
    assert any("softmax: no power fit: 1 points" in text for text in found.notices)


def test_constant_loss_and_four_points_below_a_decade() -> None:
    flat = analyse(table(("linear",), val_loss=2.5), replace(FAST, laws=("power", "saturating")))
    for item in flat.fits:
        assert any("constant" in text for text in item.notices)
        assert not item.boot.intervals["a"].identified
    few = pd.DataFrame(
        {"run": list("abcd"), "attention": "linear", "train_flop": [1e12, 2e12, 3e12, 5e12],
         "val_loss": [3.0, 2.8, 2.75, 2.6]}
    )  # fmt: skip
    found = analyse(few, replace(FAST, laws=("saturating",))).fits[0]
    assert 0 <= found.fit.parameters["E0"] <= 2.6
    assert any("decades" in text for text in found.notices)
    assert not any(interval.identified for name, interval in found.boot.intervals.items() if name == "E0")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"metric": "nope"}, "no column 'nope'.*val_loss"),
        ({"x": "nope"}, "no column 'nope'"),
        ({"by": "nope"}, "no column 'nope' to group by"),
        ({"where": ("nope=1",)}, "COLUMN=VALUE"),
        ({"where": ("attention",)}, "COLUMN=VALUE"),
        ({"where": ("attention=none of them",)}, "No row"),
        ({"points": "nope"}, "Unknown selection"),
        ({"laws": ("nope",)}, "Unknown law"),
        ({"draws": 3}, "at least 100"),
        ({"delta": -1.0}, "delta"),
        ({"metric": "run"}, "No row has both"),
    ],
)
def test_wrong_settings_are_sentences(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        analyse(table(), replace(FAST, **change))


def test_compute_that_is_not_known_is_named() -> None:
    with pytest.raises(UserError, match="train_flop is missing or not a positive"):
        analyse(table(train_flop=None), FAST)


def test_metric_columns_leave_out_what_describes_a_run() -> None:
    assert metric_columns(table()) == ["val_loss", "set/labels/top1"]


def test_a_published_table_by_its_columns(scaling_data: Path, expected: dict[str, Any]) -> None:
    frame = pd.read_csv(scaling_data / "cherti2022_errors.csv").assign(all="all")
    settings = replace(
        FAST, metric="err1", x="gmacs_total", by="all", points="bins", delta=None,
        where=("downstream_dataset=imagenet1k", "upstream_dataset!=CLIP-WIT"),
    )  # fmt: skip
    item = analyse(frame, settings).fits[0]
    alpha, beta = expected["cherti2022"]["fits"]["imagenet1k"]["openclip_binned5"]
    assert item.fit.parameters["a"] == pytest.approx(alpha, abs=1e-6)
    assert item.fit.parameters["b"] == pytest.approx(beta, abs=1e-5)


def test_from_run_folders_to_exponents(write_ladder: Any) -> None:
    collection = collect([write_ladder(widths=(32, 64, 128), epochs=5)])
    found = analyse(collection.checkpoints, FAST)
    assert set(exponents(found)) == {"softmax", "linear"}
    assert all(-0.4 < value < 0 for value in exponents(found).values())
    assert found.points["softmax"].runs == ["softmax-128", "softmax-32", "softmax-64"]
