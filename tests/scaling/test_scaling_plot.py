"""What figures in files share: colours that stay, keys that say what is drawn, and lines that differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from openclip_scaling.fitting.analysis import Settings, analyse
from openclip_scaling.flops import ATTENTION_MACS
from openclip_scaling.pictures.curves_plot import SIZE_LINES, curves_figure, looks_of, metric_figure
from openclip_scaling.pictures.plot import COLORS, save_figure, scaling_figure, styles
from openclip_scaling.reading.runs import Collection, collect


@pytest.fixture
def collection(write_ladder: Any) -> Collection:
    return collect([write_ladder(widths=(32, 64, 96, 128), epochs=4)])


def legend_of(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_a_group_named_for_a_kind_and_more_has_its_color() -> None:
    alone = styles(ATTENTION_MACS)
    assert styles(["normlinear, batch 64", "softmax, batch 64"]) == {
        "normlinear, batch 64": alone["normlinear"],
        "softmax, batch 64": alone["softmax"],
    }
    assert styles(["linear (text: linear)", "normlinear"])["linear (text: linear)"] == alone["linear"]


def test_no_two_groups_share_a_color_while_there_is_another() -> None:
    names = ["linear", "linear (text: linear)", "linear, batch 64", "resnet", "softmax"]
    found = styles(names)
    assert found["linear"] == styles(["linear"])["linear"]
    assert len(set(found.values())) == len(names)
    many = styles([f"model{index}" for index in range(2 * len(COLORS))])
    assert len(set(many.values())) == len(COLORS)


def test_points_that_were_not_fitted_are_in_the_legend(collection: Collection) -> None:
    every, some = (
        scaling_figure(
            analyse(collection.checkpoints, Settings(draws=100, laws=("power",), points=points)), "power"
        )
        for points in ("all", "frontier")
    )
    assert not any("not fitted" in text for text in legend_of(every.axes[0]))
    assert legend_of(some.axes[0])[-1] == "not fitted (points: frontier)"


def test_six_sizes_have_six_lines_and_stand_in_their_order() -> None:
    sizes = [1.0e6, 2.2e6, 4.1e6, 8.7e6, 16e6, 31e6]
    frame = pd.DataFrame(
        {
            "run": list("abcdef"),
            "attention": "linear",
            "parameters": sizes,
            "samples_seen": 10.0,
            "val_loss": 2.0,
        }
    )
    looks = looks_of(frame)
    assert [looks[run].line for run in "fedcba"] == list(SIZE_LINES)
    names = [f"{size} M parameters" for size in ("31", "16", "8.7", "4.1", "2.2", "1")]
    assert legend_of(metric_figure(frame, "val_loss").axes[0]) == ["linear", *names]


def test_curves_of_one_size_need_no_key_for_it(collection: Collection) -> None:
    collection.runs["parameters"] = 1e6
    figure = curves_figure(collection.curves, collection.runs)
    assert legend_of(figure.axes[0]) == ["linear", "softmax"]
    drawn = [line for line in figure.axes[0].get_lines() if len(np.asarray(line.get_xdata()))]
    assert len(drawn) == 2 * 8  # every step and its mean, of each run


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_letters_that_the_font_lacks_do_not_end_a_report(tmp_path: Path, suffix: str) -> None:
    figure = Figure()
    figure.subplots().set_title("图像")
    save_figure(figure, tmp_path / f"a.{suffix}")  # a warning would be an error here
    assert (tmp_path / f"a.{suffix}").stat().st_size > 500
