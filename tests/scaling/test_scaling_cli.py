"""The command line, figures and report: outputs, JSON, exit states, and sentences for wrong input."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.image import imread

from openclip_scaling.cli import main
from openclip_scaling.errors import UserError
from openclip_scaling.fitting.analysis import Settings, analyse
from openclip_scaling.flops import ATTENTION_MACS
from openclip_scaling.pictures.curves_plot import curves_figure, metric_figure
from openclip_scaling.pictures.plot import (
    legend_label,
    plain_ticks,
    save_figure,
    scaling_figure,
    styles,
)
from openclip_scaling.reading.runs import Collection, collect
from openclip_scaling.reporting.as_json import json_ready, slug
from openclip_scaling.reporting.report import write_report

FAST = ["--draws", "100"]


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    return int(stop.value.code or 0)


@pytest.fixture
def ladder(write_ladder: Any) -> Path:
    folder = write_ladder(widths=(32, 64, 128), epochs=3)
    assert isinstance(folder, Path)
    return folder


def strict_json(text: str) -> Any:
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_collect_writes_tables_and_prints_json(ladder: Path, tmp_path: Path, capsys: Any) -> None:
    assert run("collect", str(ladder), "-o", str(tmp_path / "table.csv"), "--json") == 0
    output = capsys.readouterr()
    result = strict_json(output.out)
    assert len(result["checkpoints"]) == 18
    assert len(result["runs"]) == 6
    assert all(Path(name).is_file() for name in result["files"])
    assert "Note: " in output.err


def test_collect_prints_nan_as_null(write_run: Any, fake: Any, capsys: Any) -> None:
    writer = fake.LogWriter()
    writer.process(fake.PARAMS)
    writer.epoch(0, 8, 32, [2.0, "nan (nan)", "nan (nan)", "nan (nan)"])
    folder = write_run("nan", writer.text, results=[{"clip_val_loss": float("nan"), "epoch": 1}])
    assert run("collect", str(folder), "--json") == 0
    (row,) = strict_json(capsys.readouterr().out)["checkpoints"]
    assert row["val_loss"] is None
    assert row["diverged"] is True


@pytest.mark.parametrize("command", ["fit", "compare"])
def test_a_table_and_its_folders_give_the_same(
    ladder: Path, tmp_path: Path, capsys: Any, command: str
) -> None:
    run("collect", str(ladder), "-o", str(tmp_path / "table.csv"))
    capsys.readouterr()
    first, second = [], []
    for source, numbers in ((ladder, first), (tmp_path / "table.csv", second)):
        assert run(command, str(source), "--law", "power", *FAST, "--json") == 0
        result = strict_json(capsys.readouterr().out)
        for row in result.get("fits") or result["comparisons"]:
            numbers.append(row.get("exponent_difference") or row["parameters"]["a"])
    assert first == pytest.approx(second, rel=1e-9)
    assert len(first) == (2 if command == "fit" else 1)


def test_fit_prints_both_laws_and_warns(ladder: Path, capsys: Any) -> None:
    assert run("fit", str(ladder), *FAST) == 0
    output = capsys.readouterr()
    assert "E = E0 + b C^a" in output.out
    assert "not reliable with 3 runs" in output.err
    assert run("fit", str(ladder), "--law", "both", *FAST, "--json") == 0
    fits = strict_json(capsys.readouterr().out)["fits"]
    assert {(fit["group"], fit["law"]) for fit in fits} == {
        (kind, law) for kind in ("linear", "softmax") for law in ("power", "saturating")
    }
    assert all(fit["reliable"] is False for fit in fits)


def test_what_a_table_of_fits_shows_is_said_below_it(ladder: Path, capsys: Any) -> None:
    assert run("fit", str(ladder), "--law", "power", *FAST) == 0
    words = " ".join(capsys.readouterr().out.split())
    for head in ("rmse (ln)", "AIC", "at optimum"):
        assert head in words.split("Rmse (ln):")[0]
    for explained in (
        "Rmse (ln): root",
        "AIC compares",
        "At optimum: how many",
        "Not identified: the interval",
    ):
        assert explained in words


def test_a_long_formula_is_not_cut_off(ladder: Path, capsys: Any) -> None:
    assert run("fit", str(ladder), "--law", "broken", *FAST) == 0
    assert "\u2026" not in capsys.readouterr().out


def test_one_bad_law_is_a_sentence_without_other_notices(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "few.csv").write_text("x,y,g\n1,3,a\n2,2,a\n", encoding="utf-8")
    columns = ["--x", "x", "--y", "y", "--group", "g", "--law", "saturating"]
    assert run("fit", str(tmp_path / "few.csv"), *columns) == 2
    assert capsys.readouterr().err == (
        "Error: Nothing could be fitted to y. a: no saturating fit: 2 points at 2 different scales cannot fix the 3 "
        "parameters of E = E0 + b C^a; at least 3 different scales are needed.\n"
    )


def test_compare_gives_a_plain_verdict(ladder: Path, capsys: Any) -> None:
    assert run("compare", str(ladder), "--law", "power", *FAST) == 0
    assert "intervals from fewer than 5 runs are not reliable" in capsys.readouterr().out
    assert run("compare", str(ladder), "--law", "power", *FAST, "--json") == 0
    notices = strict_json(capsys.readouterr().out)["notices"]
    assert any("the intervals are not reliable with 3 runs" in text for text in notices)
    assert run("compare", str(ladder), "--where", "attention=linear", *FAST) == 2
    assert "one group only (linear)" in capsys.readouterr().err


def test_xlstm_by_columns(scaling_data: Path, capsys: Any) -> None:
    source = str(scaling_data / "xlstm2025_pareto.csv")
    columns = ["--x", "flops", "--y", "val_loss", "--group", "family", "--law", "power", "--least-squares"]
    assert run("compare", source, *columns, *FAST, "--json") == 0
    result = strict_json(capsys.readouterr().out)
    assert result["equal_slopes_test"]["F"] == pytest.approx(7.549, abs=1e-3)
    assert result["comparisons"][0]["exponent_difference"] == pytest.approx(0.04453 - 0.04792, abs=2e-5)


def test_a_prediction_beyond_every_number_is_null(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "steep.csv").write_text("x,y,g\n1,1e9,a\n10,1,a\n100,1e-9,a\n", encoding="utf-8")
    columns = ["--x", "x", "--y", "y", "--group", "g", "--law", "power", "--at", "1e-300"]
    assert run("predict", str(tmp_path / "steep.csv"), *columns, "--json") == 0
    (row,) = strict_json(capsys.readouterr().out)["predictions"]
    assert row["predicted"] is None
    assert row["decades_beyond"] == pytest.approx(300)
    assert run("predict", str(tmp_path / "steep.csv"), *columns) == 0
    assert "inf" in capsys.readouterr().out


def test_predict_says_how_far_it_reaches(ladder: Path, capsys: Any) -> None:
    scales = ["--at", "1e11", "--at", "1e13"]
    assert run("predict", str(ladder), "--law", "power", *scales, *FAST, "--json") == 0
    found = strict_json(capsys.readouterr().out)
    assert any("the intervals are not reliable with 3 runs" in text for text in found["notices"])
    rows = found["predictions"]
    assert [(row["group"], row["scale"]) for row in rows[:2]] == [("linear", 1e11), ("linear", 1e13)]
    assert rows[0]["decades_beyond"] == 0
    assert rows[1]["decades_beyond"] > 1
    assert rows[1]["interval95"][0] < rows[1]["predicted"] < rows[1]["interval95"][1]
    assert run("predict", str(ladder), *scales, *FAST) == 0
    assert "decades beyond the points" in capsys.readouterr().out
    assert run("predict", str(ladder), "--at", "-1", *FAST) == 2
    assert run("predict", str(ladder), *FAST) == 2


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_plot_writes_every_format(ladder: Path, tmp_path: Path, capsys: Any, suffix: str) -> None:
    target = tmp_path / "figures"
    assert (
        run("plot", str(ladder), "--law", "power", "-o", str(target), "--format", suffix, *FAST, "--json")
        == 0
    )
    files = [Path(name) for name in strict_json(capsys.readouterr().out)["files"]]
    assert sorted(path.name for path in files) == [f"training-loss.{suffix}", f"val-loss-power.{suffix}"]
    assert sorted(target.iterdir()) == sorted(files)
    starts = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}
    assert all(path.read_bytes().startswith(starts[suffix]) for path in files)


def test_a_figure_shows_its_data(ladder: Path, tmp_path: Path) -> None:
    analysis = analyse(collect([ladder]).checkpoints, Settings(draws=100, laws=("power",)))
    figure = scaling_figure(analysis, "power")
    top, bottom = figure.axes
    assert top.get_ylabel() == "validation loss (nats)"
    assert bottom.get_xlabel() == "training compute (FLOP)"
    assert bottom.get_ylabel() == "residual (%)"
    legend = top.get_legend()
    assert legend is not None
    *texts, band = [text.get_text() for text in legend.get_texts()]
    assert band == "95 % band, not reliable"
    assert texts == [legend_label(item) for item in analysis.fits]
    assert all(
        re.search(r"a = -0\.\d{3} (\[.*3 runs: not reliable|.*not identified)|not identified", t)
        for t in texts
    )
    drawn = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in top.get_lines()])
    assert set(analysis.points["linear"].y) <= set(drawn)
    save_figure(figure, tmp_path / "figure.png")
    pixels = imread(tmp_path / "figure.png")[..., :3]
    for item in analysis.fits:
        color = np.array([int(styles([item.group])[item.group][0][i : i + 2], 16) / 255 for i in (1, 3, 5)])
        assert (np.abs(pixels - color).max(axis=-1) < 0.02).sum() > 200


def frame_of(losses: list[float], scales: list[float], kind: str | None = "linear") -> pd.DataFrame:
    runs = [f"r{i}" for i in range(len(losses))]
    return pd.DataFrame(
        {"run": runs, "attention": kind, "train_flop": scales, "val_loss": losses, "samples_seen": scales}
    )


@pytest.mark.parametrize(
    ("losses", "scales"),
    [([2.5] * 4, [1e10, 1e11, 1e12, 1e13]), ([2.0, 1.9], [1e10, 1.01e10]), ([5e3, 1.0, 1e-3], [1.0, 1e10, 1e20]),
     ([2.0, 2.0 + 1e-9, 2.0], [1e10, 2e10, 3e10])],
    ids=["constant", "two-close-points", "many-decades", "almost-constant"],
)  # fmt: skip
def test_figures_of_extreme_data(tmp_path: Path, losses: list[float], scales: list[float]) -> None:
    frame = frame_of(losses, scales)
    analysis = analyse(frame, Settings(draws=100, laws=("power",)))
    save_figure(scaling_figure(analysis, "power"), tmp_path / "a.png")
    save_figure(metric_figure(frame_of(losses, scales, None), "val_loss"), tmp_path / "b.png")
    assert (tmp_path / "a.png").stat().st_size > 5000
    assert (tmp_path / "b.png").stat().st_size > 5000


def test_attention_kinds_keep_their_color_and_all_differ() -> None:
    everything = styles(ATTENTION_MACS)
    assert len(set(everything.values())) == len(ATTENTION_MACS)
    assert styles(["linear"])["linear"] == everything["linear"]
    mixed = styles(["softmax", "resnet", "convnext"])
    assert len(set(mixed.values())) == 3


def test_equal_figures_are_equal_files(ladder: Path, tmp_path: Path) -> None:
    collection = collect([ladder])
    for name in ("a.pdf", "b.pdf"):
        save_figure(curves_figure(collection.curves, collection.runs), tmp_path / name)
    assert (tmp_path / "a.pdf").read_bytes() == (tmp_path / "b.pdf").read_bytes()
    with pytest.raises(UserError, match=r"must end in one of \.png"):
        save_figure(curves_figure(collection.curves, collection.runs), tmp_path / "a.gif")


def test_report_links_what_it_writes_and_says_what_is_not_reliable(
    ladder: Path, tmp_path: Path, capsys: Any
) -> None:
    assert run("report", str(ladder), "-o", str(tmp_path / "out"), *FAST, "--json") == 0
    path = Path(strict_json(capsys.readouterr().out)["report"])
    text = path.read_text(encoding="utf-8")
    assert "Intervals are not reliable with fewer than 5 runs per attention" in text
    assert "with 3 runs each; intervals from fewer than 5 runs are not reliable" in text
    for heading in (
        "validation loss",
        "training loss",
        "color x shape/top1, error",
        "Runs",
        "Learning curves",
    ):
        assert re.search(rf"^## .*{re.escape(heading)}", text, re.MULTILINE), heading
    linked = re.findall(r"\]\(([^)]+)\)", text)
    assert len(linked) == len(set(linked)) >= 6
    others = {"report.md", "report.html", "fits.json"}
    assert {*linked, *others} == {file.name for file in path.parent.iterdir()}
    stored = strict_json((path.parent / "fits.json").read_text(encoding="utf-8"))
    assert [item["metric"] for item in stored] == ["val_loss", "train_loss", "shapes/color x shape/top1"]


def test_report_shows_every_exponent_at_a_glance(ladder: Path, tmp_path: Path) -> None:
    text = write_report(tmp_path, collect([ladder]), settings=Settings(draws=100)).read_text(encoding="utf-8")
    table = text.split("## Exponents at a glance")[1].split("## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("|")]
    assert rows[0] == "| metric | linear | softmax |"
    assert len(rows) == 2 + 3
    assert all(len(re.findall(r"-?\d\.\d{4} \[-?\d+\.\d{4}, -?\d+\.\d{4}\]", row)) == 2 for row in rows[2:])


@pytest.mark.parametrize(
    ("low", "high"), [(0.83, 3.5), (1.7, 3.5), (0.06, 1.2), (0.8, 0.9), (9.5, 11), (2, 2.1)]
)
def test_tick_labels_do_not_run_into_each_other(low: float, high: float) -> None:
    ticks = plain_ticks(low, high)
    assert len(ticks) >= 4
    assert low <= ticks[0] < ticks[-1] <= high
    assert np.diff(np.log(ticks)).min() >= 0.069 * np.log(high / low)
    assert all(len(f"{tick:.4g}") <= 5 for tick in ticks)


def test_report_states_differences_with_intervals(ladder: Path, tmp_path: Path) -> None:
    text = write_report(tmp_path, collect([ladder]), settings=Settings(draws=100)).read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| linear, softmax \| (power|saturating) \| a \| [+-]\d\.\d{4} \[.*\] \| .*\|$", text, re.MULTILINE
    )
    assert sorted(rows) == ["power"] * 3 + ["saturating"] * 3


def test_report_of_one_metric(ladder: Path, tmp_path: Path) -> None:
    assert run("report", str(ladder), "-o", str(tmp_path), "--metric", "train_loss", *FAST) == 0
    stored = strict_json((tmp_path / "fits.json").read_text(encoding="utf-8"))
    assert [item["metric"] for item in stored] == ["train_loss"]


def test_curves_tell_sizes_apart(ladder: Path) -> None:
    found = collect([ladder])
    legend = metric_figure(found.checkpoints, "val_loss").axes[0].get_legend()
    assert legend is not None
    texts = [text.get_text() for text in legend.get_texts()]
    assert texts[:2] == ["linear", "softmax"]
    assert len(texts) == 2 + 3
    assert all(text.endswith("parameters") for text in texts[2:])
    lines = {
        line.get_linestyle() for line in metric_figure(found.checkpoints, "val_loss").axes[0].get_lines()
    }
    assert lines == {"-", "--", ":"}


def test_report_names_a_metric_that_cannot_be_fitted(ladder: Path, tmp_path: Path) -> None:
    collection = collect([ladder])
    collection.checkpoints["val_loss"] = np.nan
    path = write_report(tmp_path, collection, ["val_loss", "train_loss"], Settings(draws=100))
    text = path.read_text(encoding="utf-8")
    assert "Not fitted: No row has both train_flop and val_loss" in text
    assert "E = b C^a" in text


def test_report_without_any_metric(tmp_path: Path) -> None:
    empty = collect_empty(tmp_path)
    with pytest.raises(UserError, match="neither a loss nor a top-1 accuracy"):
        write_report(tmp_path / "out", empty)


def collect_empty(tmp_path: Path) -> Collection:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "params.txt").write_text("model: x\n", encoding="utf-8")
    return collect([tmp_path / "run"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fit", "/nowhere"], "/nowhere does not exist; give a CSV table"),
        (["collect", "/nowhere"], "is not a folder"),
        (["fit", "{ladder}/y.csv"], "y.notices.json does not hold the notices"),
        (["fit", "{ladder}/z.csv"], "z.notices.json does not hold the notices"),
        (["report", "{ladder}", "--metric", "nope"], "no column 'nope'"),
        (["fit", "{ladder}", "--x", "step,step", "--law", "tied"], "--x step,step names one column twice"),
        (
            ["fit", "{ladder}", "--law", "cubic"],
            "--law cubic is unknown; use power, saturating, offset, broken, chinchilla, tied or",
        ),
        (["fit", "{ladder}", "--metric", "top9"], "no column 'top9'"),
        (["fit", "{ladder}", "--points", "some"], "Unknown selection 'some'"),
        (["fit", "{ladder}", "--draws", "3"], "at least 100"),
        (["fit", "{ladder}", "--draws", "1000000000"], "use at most 100000"),
        (["fit", "{ladder}", "{ladder}/x.csv"], "Give one CSV table"),
        (["plot", "{ladder}", "--format", "gif"], "--format gif is unknown"),
        (["report", "{ladder}", "-o", "{ladder}/x.csv/out"], "Cannot write"),
    ],
)
def test_wrong_input_is_a_sentence_and_status_2(
    ladder: Path, capsys: Any, arguments: list[str], message: str
) -> None:
    for name in "xyz":
        (ladder / f"{name}.csv").write_text("a,b\n1,2\n", encoding="utf-8")
    (ladder / "y.notices.json").write_text("{bad", encoding="utf-8")
    (ladder / "z.notices.json").write_text("[1]", encoding="utf-8")
    assert run(*(argument.format(ladder=ladder) for argument in arguments)) == 2
    output = capsys.readouterr()
    assert message in output.err
    assert "Traceback" not in output.err
    assert output.out == ""


def test_mixed_batch_sizes_are_refused_on_the_command_line(write_run: Any, fake: Any, capsys: Any) -> None:
    for name, batch in (("a", 8), ("b", 16)):
        writer = fake.LogWriter()
        params = {**fake.PARAMS, "batch_size": batch}
        writer.process(params)
        for epoch in range(3):
            writer.epoch(epoch, batch, 4 * batch, [2.0 / (epoch + 1)] * 4)
        folder = write_run(name, writer.text, params)
    assert run("fit", str(folder.parent), "--metric", "train_loss", *FAST) == 2
    assert "batch 8; batch 16" in capsys.readouterr().err
    assert (
        run("fit", str(folder.parent), "--metric", "train_loss", "--per-batch", "--law", "power", *FAST) == 0
    )
    assert "linear, batch 16" in capsys.readouterr().out


def test_json_has_no_nan() -> None:
    value = {"a": float("nan"), "b": [np.float64(np.inf), np.int64(3)], "c": (1.5, None, True)}
    assert json_ready(value) == {"a": None, "b": [None, 3], "c": [1.5, None, True]}
    assert slug("shapes/color x shape/top1") == "shapes-color-x-shape-top1"


def test_help_of_every_command(capsys: Any) -> None:
    for command in ("collect", "fit", "compare", "predict", "plot", "report", "coverage"):
        assert run(command, "--help") == 0
        assert "--json" in capsys.readouterr().out


def test_the_package_needs_neither_torch_nor_open_clip() -> None:
    code = (
        "import sys; import openclip_scaling.cli; "
        "print([m for m in ('torch', 'open_clip', 'openclip_linattn', 'matplotlib.pyplot') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
