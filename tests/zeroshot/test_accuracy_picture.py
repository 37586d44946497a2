"""The picture of an evaluation: learning curves, and accuracy against resolution."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from openclip_linattn.errors import UserError
from openclip_linattn.zeroshot.evaluate import EvaluationOptions, evaluate
from openclip_linattn.zeroshot.results.accuracy_picture import accuracy_picture


def count(run: Path, samples: int) -> None:
    seen = {"epochs": 2, "steps": 2, "samples": samples}
    segment = {"start_epoch": 0, "end": "x", "status": "finished", "planned": seen, "seen": seen}
    model = (run / "params.txt").read_text().split("model: ")[1].split()[0]
    (run / "run.json").write_text(json.dumps({"model": model, "segments": [segment]}))


def drawn(figure: Figure) -> list[tuple[str, list[list[float]]]]:
    return [
        (axes.get_xlabel(), [list(map(float, line.get_xdata())) for line in axes.lines])
        for axes in figure.axes
    ]


def test_curves_stand_against_samples_where_all_runs_count_them(
    cli: Any, runs: list[Path], data_folder: Path, tmp_path: Path
) -> None:
    count(runs[0], 2000)
    rows = evaluate(runs, [data_folder], EvaluationOptions(workers=0))
    names = {str(run): run.name for run in runs}
    by_epoch = drawn(accuracy_picture(rows, names))
    assert by_epoch == [("epochs", [[1, 2], [1, 2]])] * 3
    count(runs[1], 400)
    figure = accuracy_picture(rows, names)
    assert drawn(figure) == [("image-text pairs seen", [[1000, 2000], [200, 400]])] * 3
    assert [axes.get_title() for axes in figure.axes] == [
        "figures, color x shape", "figures, color", "figures, shape",
    ]  # fmt: skip
    heights = [list(map(float, line.get_ydata())) for line in figure.axes[0].lines]
    top1 = [100 * row["top1"] for row in rows if row["label_set"] == "color x shape"]
    assert heights == [top1[:2], top1[2:]]
    bands = figure.axes[0].collections
    low, high = bands[0].get_paths()[0].get_extents().intervaly
    own = [row["top1_interval"] for row in rows if row["label_set"] == "color x shape"][:2]
    assert (low, high) == pytest.approx((100 * min(a for a, _ in own), 100 * max(b for _, b in own)))
    picture = tmp_path / "curves.png"
    assert cli(*runs, "--data", data_folder, "--picture", picture).exit_code == 0
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_a_picture_that_cannot_be_is_refused_at_once(
    cli: Any, runs: list[Path], data_folder: Path, tmp_path: Path
) -> None:
    wrong = cli(*runs, "--data", data_folder, "--picture", tmp_path / "curves.jpg")
    assert wrong.exit_code == 2
    assert "must end in one of .png, .svg, .pdf" in wrong.stderr
    nowhere = cli(*runs, "--data", data_folder, "--picture", tmp_path / "no" / "curves.png")
    assert "cannot be written" in nowhere.stderr
    assert not (runs[0] / "checkpoints" / "zeroshot.jsonl").exists()
    with pytest.raises(UserError, match="there is no curve to draw"):
        accuracy_picture([], {})


def lines(axes: Axes) -> list[tuple[list[float], list[float]]]:
    return [(list(map(float, line.get_xdata())), list(map(float, line.get_ydata()))) for line in axes.lines]


def test_top1_stands_against_image_sizes_for_the_last_epochs(
    cli: Any, runs: list[Path], data_folder: Path, tmp_path: Path
) -> None:
    wanted = EvaluationOptions(workers=0, label_sets=["color x shape"], image_sizes=[64, 32, 48])
    rows = evaluate(runs, [data_folder], wanted)
    figure = accuracy_picture(rows, {str(run): run.name for run in runs})
    learning, by_size = figure.axes
    assert (learning.get_xlabel(), len(learning.lines)) == ("epochs", 2)
    top1 = {(row["run"], row["image_size"]): 100 * row["top1"] for row in rows if row["epoch"] == 2}
    expected = []
    for run in "ab":
        sizes = [32.0, 48.0, 64.0]
        expected += [(sizes, [top1[run, size] for size in sizes]), ([32.0], [top1[run, 32]])]
    assert lines(by_size) == expected
    assert [text.get_text() for text in by_size.get_xticklabels()] == [
        "32\n5 tokens", "48\n10 tokens", "64\n17 tokens",
    ]  # fmt: skip
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a (softmax)", "b (softmax)"]
    picture = tmp_path / "sizes.png"
    sizes = ("--image-size", "32,64")
    assert cli(*runs, "--data", data_folder, *sizes, "--picture", picture).exit_code == 0
    assert picture.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("sizes", "xlabel"), [([32, 64], "image size"), ([48, 64], "image size"), ([32], "epochs")]
)
def test_curves_of_single_points_stand_alone_only(
    runs: list[Path], data_folder: Path, sizes: list[int], xlabel: str
) -> None:
    wanted = EvaluationOptions(workers=0, label_sets=["color"], image_sizes=sizes)
    last = [run / "checkpoints" / "epoch_2.pt" for run in runs]
    (axes,) = accuracy_picture(
        evaluate(last, [data_folder], wanted), {str(run): run.name for run in runs}
    ).axes
    assert axes.get_xlabel().startswith(xlabel)


def test_checkpoints_outside_a_run_are_lines_of_their_own(
    runs: list[Path], data_folder: Path, tmp_path: Path, make: Any
) -> None:
    lone = [tmp_path / "lone" / name for name in ("first.pt", "second.pt")]
    lone[0].parent.mkdir()
    for epoch, path in enumerate(lone, start=1):
        shutil.copy(runs[0] / "checkpoints" / f"epoch_{epoch}.pt", path)
    wanted = EvaluationOptions(workers=0, label_sets=["color"], image_sizes=[32, 64], model=make.model)
    (axes,) = accuracy_picture(
        evaluate(lone, [data_folder], wanted), {str(path): path.name for path in lone}
    ).axes
    curves = {line.get_label(): len(line.get_xdata()) for line in axes.lines if "pt" in str(line.get_label())}
    assert curves == {"first.pt (softmax)": 2, "second.pt (softmax)": 2}


def test_the_legend_names_runs_that_only_later_panels_have(runs: list[Path], data_folder: Path) -> None:
    wanted = EvaluationOptions(workers=0, label_sets=["color", "shape"], image_sizes=[32, 64])
    rows = evaluate([run / "checkpoints" / "epoch_2.pt" for run in runs], [data_folder], wanted)
    kept = [row for row in rows if (row["run"], row["label_set"]) != ("b", "color")]
    figure = accuracy_picture(kept, {str(run): run.name for run in runs})
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a (softmax)", "b (softmax)"]


def test_one_foreign_size_is_no_curve(runs: list[Path], data_folder: Path) -> None:
    wanted = EvaluationOptions(workers=0, label_sets=["color"], image_sizes=[64])
    with pytest.raises(UserError, match="there is no curve to draw"):
        accuracy_picture(evaluate(runs, [data_folder], wanted), {str(run): run.name for run in runs})
