"""Predictions beside the rows, and checkpoints compared by them."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from matplotlib.figure import Figure
from typer.testing import CliRunner, Result

from openclip_linattn.cli.evaluate import evaluate_command
from openclip_linattn.errors import UserError
from openclip_linattn.zeroshot.evaluate import EvaluationOptions, evaluate
from openclip_linattn.zeroshot.results.learning_curves import learning_curves
from openclip_linattn.zeroshot.results.pairs import compare_rows
from openclip_linattn.zeroshot.results.prediction_files import load_answers

SAVED = EvaluationOptions(workers=0, label_sets=["color x shape"])


@pytest.fixture
def runs(tmp_path: Path, make: Any) -> list[Path]:
    """Two runs with epochs 1 and 2; the second's run.json counts samples."""
    folders = [tmp_path / "logs" / name for name in ("a", "b")]
    for number, folder in enumerate(folders):
        for epoch in (1, 2):
            make.checkpoint(folder, epoch, seed=10 * number + epoch)
    return folders


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("COLUMNS", "200")
    app = typer.Typer()
    app.command()(evaluate_command)

    def call(*arguments: object) -> Result:
        plain = ("--workers", 0, "--label-set", "color x shape")
        return CliRunner().invoke(app, [str(argument) for argument in (*arguments, *plain)])

    return call


def checkpoint(run: Path, epoch: int = 1) -> Path:
    return run / "checkpoints" / f"epoch_{epoch}.pt"


def test_predictions_lie_beside_the_rows(runs: list[Path], data_folder: Path) -> None:
    (row,) = evaluate([checkpoint(runs[0])], [data_folder], SAVED)
    path = runs[0] / "checkpoints" / row["predictions"]
    assert path.parent.name == "predictions"
    with np.load(path) as kept:
        assert {key: str(kept[key].dtype) for key in ("labels", "best")} == {
            "labels": "int32",
            "best": "int32",
        }
        assert kept["best"].shape == (45, 5)
        assert (kept["best"][:, 0] == kept["labels"]).mean() == row["top1"]
        assert (kept["best"] == kept["labels"][:, None]).any(axis=1).mean() == row["top5"]
    assert load_answers(row, "a").right.mean() == row["top1"]


def test_an_evaluation_anew_replaces_its_predictions(runs: list[Path], data_folder: Path, make: Any) -> None:
    (first,) = evaluate([checkpoint(runs[0])], [data_folder], SAVED)
    before = (runs[0] / "checkpoints" / first["predictions"]).read_bytes()
    make.checkpoint(runs[0], 1, seed=77)
    (second,) = evaluate([checkpoint(runs[0])], [data_folder], SAVED)
    folder = runs[0] / "checkpoints" / "predictions"
    assert [path.name for path in folder.iterdir()] == [Path(second["predictions"]).name]
    assert (runs[0] / "checkpoints" / second["predictions"]).read_bytes() != before


def test_predictions_follow_a_run_that_moves(runs: list[Path], data_folder: Path) -> None:
    (row,) = evaluate([checkpoint(runs[0])], [data_folder], SAVED)
    moved = runs[0].rename(runs[0].with_name("moved"))
    (again,) = evaluate([checkpoint(moved)], [data_folder], SAVED)
    assert load_answers(again, "moved").right.mean() == row["top1"]


def by_hand(rows: list[dict[str, Any]]) -> tuple[int, int]:
    first, second = (load_answers(row, "").right for row in rows)
    return int((first & ~second).sum()), int((second & ~first).sum())


def test_two_checkpoints_are_compared_without_being_asked(
    cli: Any, runs: list[Path], data_folder: Path
) -> None:
    result = cli(*map(checkpoint, runs), "--data", data_folder)
    rows = evaluate(list(map(checkpoint, runs)), [data_folder], SAVED)
    first, second = by_hand(rows)
    said = re.search(r"a/epoch_1.pt is right on (\d+) images? where .* b/epoch_1.pt on (\d+):", result.stdout)
    assert said is not None
    assert (int(said[1]), int(said[2])) == (first, second)
    assert first + second > 0
    unsaved = cli(*map(checkpoint, runs), "--data", data_folder, "--no-save", "--again")
    assert (unsaved.exit_code, "is right on" in unsaved.stdout) == (0, False)
    shutil.rmtree(runs[0] / "checkpoints" / "predictions")
    lost = cli(*map(checkpoint, runs), "--data", data_folder)
    assert (lost.exit_code, "not compared: " in lost.stdout) == (0, True)


def test_every_pair_is_compared_or_each_with_one(cli: Any, runs: list[Path], data_folder: Path) -> None:
    assert "is right on" not in cli(*runs, "--data", data_folder).stdout
    every = cli(*runs, "--data", data_folder, "--paired")
    assert every.stdout.count("is right on") == 6
    assert "(6 comparisons" in every.stdout
    base = checkpoint(runs[1], 2)
    some = cli(*runs, "--data", data_folder, "--against", base)
    assert some.stdout.count("is right on") == some.stdout.count(", b/epoch_2.pt on") == 3
    absent = cli(checkpoint(runs[0]), *runs[1:], "--data", data_folder, "--against", checkpoint(runs[0], 2))
    assert absent.exit_code == 2
    assert "is not among the checkpoints that are evaluated" in absent.stderr


def test_json_stays_alone_on_stdout_beside_comparisons(cli: Any, runs: list[Path], data_folder: Path) -> None:
    result = cli(*runs, "--data", data_folder, "--paired", "--json")
    assert len(json.loads(result.stdout)) == 4
    assert result.stderr.count("is right on") == 6


def test_nothing_to_compare_is_said(cli: Any, runs: list[Path], data_folder: Path) -> None:
    alone = cli(checkpoint(runs[0]), "--data", data_folder, "--paired")
    assert alone.exit_code == 2
    assert "there is nothing to compare" in alone.stderr
    unsaved = cli(*map(checkpoint, runs), "--data", data_folder, "--paired", "--no-save")
    assert unsaved.exit_code == 2
    assert "comparing needs the kept predictions" in unsaved.stderr


def test_a_checkpoint_outside_a_run_keeps_no_predictions(
    cli: Any, runs: list[Path], data_folder: Path, tmp_path: Path, make: Any
) -> None:
    lone = shutil.copy(checkpoint(runs[0]), tmp_path / "lone.pt")
    result = cli(lone, checkpoint(runs[1]), "--data", data_folder, "--paired", "--model", make.model)
    assert result.exit_code == 2
    assert f"{lone} cannot be compared" in result.stderr
    assert not (runs[1] / "checkpoints" / "zeroshot.jsonl").exists()  # told before the evaluation
    (row,) = evaluate([lone], [data_folder], replace(SAVED, model=make.model))
    with pytest.raises(UserError, match="of lone no predictions are kept"):
        load_answers(row, "lone")


def test_unlike_images_are_never_compared(runs: list[Path], data_folder: Path, tmp_path: Path) -> None:
    """Rows of the same path whose images differ, which a list put together by hand can hold."""
    folder = Path(shutil.copytree(data_folder, tmp_path / "figures"))
    (first,) = evaluate([checkpoint(runs[0])], [folder], SAVED)
    (folder / "test" / "2.tar").unlink()
    (folder / "test" / "nshards.txt").write_text("2\n")
    (second,) = evaluate([checkpoint(runs[1])], [folder], SAVED)
    names = {row["checkpoint"]: row["checkpoint"] for row in (first, second)}
    with pytest.raises(UserError, match="were not evaluated on the same images"):
        compare_rows([first, second], names)


@pytest.mark.parametrize("fault", ["cut", "gone", "foreign"])
def test_predictions_that_cannot_be_used_are_named(runs: list[Path], data_folder: Path, fault: str) -> None:
    (row,) = evaluate([checkpoint(runs[0])], [data_folder], SAVED)
    path = runs[0] / "checkpoints" / row["predictions"]
    if fault == "cut":
        path.write_bytes(path.read_bytes()[:100])
    elif fault == "gone":
        path.unlink()
    else:
        row = {**row, "asked": "other"}
    with pytest.raises(UserError, match=rf"{path.name}.*evaluate with --again"):
        load_answers(row, "a")


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
    by_epoch = drawn(learning_curves(rows, names))
    assert by_epoch == [("epochs", [[1, 2], [1, 2]])] * 3
    count(runs[1], 400)
    figure = learning_curves(rows, names)
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
        learning_curves([], {})
