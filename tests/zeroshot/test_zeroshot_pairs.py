"""Predictions beside the rows, and checkpoints compared by them."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import torch

from openclip_linattn.errors import UserError
from openclip_linattn.zeroshot.evaluate import EvaluationOptions, evaluate
from openclip_linattn.zeroshot.results.answers import AnswerBook
from openclip_linattn.zeroshot.results.pairs import comparable, compare_rows
from openclip_linattn.zeroshot.results.prediction_files import load_answers

SAVED = EvaluationOptions(workers=0, label_sets=["color x shape"])


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
    assert unsaved.exit_code == 0
    assert said[0] in unsaved.stdout
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


def test_what_failed_is_said_beside_what_could_not_be_compared_or_drawn(
    cli: Any, runs: list[Path], data_folder: Path, tmp_path: Path
) -> None:
    checkpoint(runs[1]).write_bytes(b"cut")
    asked = ("--data", data_folder, "--against", checkpoint(runs[1]), "--picture", tmp_path / "a.png")
    result = cli(*map(checkpoint, runs), *asked)
    assert result.exit_code == 2
    assert result.stderr.count("error: ") == 2
    assert "epoch_1.pt does not load" in result.stderr
    assert "there is nothing to compare" in result.stderr
    assert (tmp_path / "a.png").exists()


def test_sets_of_clip_benchmark_are_left_out_of_comparisons(runs: list[Path], data_folder: Path) -> None:
    rows = evaluate(list(map(checkpoint, runs)), [data_folder], SAVED)
    foreign = [{**row, "data": "cifar10@/sets", "label_set": "clip_benchmark"} for row in rows]
    for row in foreign:
        del row["predictions"]
    pairs = compare_rows([*rows, *foreign], {row["checkpoint"]: "x" for row in rows}, AnswerBook())
    assert [pair.data for pair in pairs] == [rows[0]["data"]]
    with pytest.raises(UserError, match="with --data a set for classification"):
        compare_rows(foreign, {}, AnswerBook())


@pytest.mark.parametrize("folder", ["one", "two"])
def test_lone_checkpoints_are_compared_without_predictions_on_disk(
    cli: Any, runs: list[Path], data_folder: Path, tmp_path: Path, make: Any, folder: str
) -> None:
    within = cli(*map(checkpoint, runs), "--data", data_folder, "--paired").stdout
    counts = re.findall(r"is right on (\d+) .* on (\d+):", within)
    lone = [tmp_path / "one" / "first.pt", tmp_path / folder / "second.pt"]
    for path, run in zip(lone, runs, strict=True):
        path.parent.mkdir(exist_ok=True)
        shutil.copy(checkpoint(run), path)
    result = cli(*lone, "--data", data_folder, "--paired", "--model", make.model)
    assert result.exit_code == 0, result.stderr
    assert re.findall(r"first.pt is right on (\d+) .* second.pt on (\d+):", result.stdout) == counts
    base = cli(*lone, "--data", data_folder, "--against", lone[0], "--model", make.model)
    assert re.search(r"second.pt is right on \d+ .* first.pt on \d+:", base.stdout)
    assert sorted(path.name for each in {path.parent for path in lone} for path in each.iterdir()) == [
        "first.pt", "second.pt",
    ]  # fmt: skip


def test_a_kept_row_without_predictions_is_named(runs: list[Path], data_folder: Path) -> None:
    (row,) = evaluate([checkpoint(runs[0])], [data_folder], replace(SAVED, save=False))
    with pytest.raises(UserError, match=r"of a no predictions are kept on .* evaluate with --again"):
        load_answers(row, "a")


def trained_at(run: Path, size: int) -> Path:
    """The run, taken for one that was trained at `size`."""
    path = checkpoint(run)
    content = torch.load(path, weights_only=True)
    model = open_clip.create_model("zeroshot-test-vit", force_image_size=size)
    open_clip.model.resize_pos_embed(content["state_dict"], model)
    torch.save(content, path)
    params = run / "params.txt"
    params.write_text(params.read_text().replace("force_image_size: None", f"force_image_size: {size}"))
    return path


def test_checkpoints_are_compared_as_trained_and_at_one_size(
    cli: Any, runs: list[Path], data_folder: Path
) -> None:
    small, large = checkpoint(runs[0]), trained_at(runs[1], 64)
    as_trained = cli(small, large, "--data", data_folder, "--paired")
    assert re.findall(r"color x shape( at \d+ px)?: a/epoch", as_trained.stdout) == [""]
    sizes = cli(small, large, "--data", data_folder, "--paired", "--image-size", "32,64,48")
    assert re.findall(r"color x shape( at \d+ px)?: a/epoch", sizes.stdout) == [
        "", " at 32 px", " at 48 px", " at 64 px",
    ]  # fmt: skip
    assert "(4 comparisons" in sizes.stdout
    rows = evaluate([small, large], [data_folder], replace(SAVED, image_sizes=[64]))
    first, second = by_hand(rows)
    found = re.search(r" at 64 px: a/epoch_1.pt is right on (\d+) .* on (\d+):", sizes.stdout)
    assert found is not None
    assert (int(found[1]), int(found[2])) == (first, second)
    base = cli(small, large, "--data", data_folder, "--against", small, "--image-size", "64")
    assert re.search(
        rf" at 64 px: b/epoch_1.pt is right on {second} .* a/epoch_1.pt on {first}:", base.stdout
    )


def test_one_checkpoint_at_two_sizes_is_no_comparison(runs: list[Path], data_folder: Path) -> None:
    rows = evaluate([checkpoint(runs[0])], [data_folder], replace(SAVED, image_sizes=[32, 64]))
    assert comparable(rows) == []


def test_probes_of_other_training_sets_are_never_compared(runs: list[Path], data_folder: Path) -> None:
    rows = evaluate(list(map(checkpoint, runs)), [data_folder], SAVED)
    first, second = ({**row, "train_data": f"/sets/{name}"} for row, name in zip(rows, "ab", strict=True))
    assert comparable([first, second]) == []
    assert len(comparable([first, {**second, "train_data": "/sets/a"}])) == 1


def test_unlike_images_are_never_compared(runs: list[Path], data_folder: Path, tmp_path: Path) -> None:
    """Rows of the same path whose images differ, which a list put together by hand can hold."""
    folder = Path(shutil.copytree(data_folder, tmp_path / "figures"))
    (first,) = evaluate([checkpoint(runs[0])], [folder], SAVED)
    (folder / "test" / "2.tar").unlink()
    (folder / "test" / "nshards.txt").write_text("2\n")
    (second,) = evaluate([checkpoint(runs[1])], [folder], SAVED)
    names = {row["checkpoint"]: row["checkpoint"] for row in (first, second)}
    with pytest.raises(UserError, match="were not evaluated on the same images"):
        compare_rows([first, second], names, AnswerBook())


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
