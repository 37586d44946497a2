"""scripts/measure_evaluation.py at smoke size: what it writes, and the tables from it."""

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "measure_evaluation.py"
Measure = Callable[..., str]


@pytest.fixture
def measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Measure:
    """Runs the script in a folder of its own, and returns what it prints; raises SystemExit where it fails."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    monkeypatch.setenv("TQDM_DISABLE", "1")
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, arguments), "--out", "out"])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        if ended.value.code:
            raise ended.value
        return capsys.readouterr().out

    return run


@pytest.fixture
def runs(tmp_path: Path, make: Any, data_folder: Path) -> tuple[str, ...]:
    """Arguments that name two runs of one model and a set of 45 images with three label sets."""
    for seed, name in enumerate(("first", "second")):
        make.checkpoint(tmp_path / "logs" / name, 1, seed)
    return "logs/first", "logs/second", "--data", str(data_folder)


def report(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(Path("out", f"{name}.json").read_text())
    assert content["command"].startswith(f"python scripts/measure_evaluation.py {name} ")
    assert str(Path.cwd().parent) not in json.dumps(content)
    return content


# OpenCLIP's accuracy turns arrays of one element into numbers.
@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
def test_agreement(measure: Measure, runs: tuple[str, ...], make: Any) -> None:
    measure("agreement", *runs, "--model", make.model, "--templates", "one")
    agreement = report("agreement")
    (row,) = agreement["libraries"]
    assert row["n"] == 1000
    assert row["distinct_answers"] > 1
    assert (row["openclip"]["top1_differs"], row["openclip"]["top5_differs"]) == (0, 0)
    assert row["openclip"]["top1"] == row["ours"]["top1"]
    assert row["clip_benchmark"]["top1"] == row["ours"]["top1"]
    assert row["clip_benchmark"]["mean_per_class"] == pytest.approx(row["ours"]["mean_per_class"])
    assert [each["run"] for each in agreement["precisions"]] == ["first"] * 3 + ["second"] * 3
    for each in agreement["precisions"]:
        apart = each["only_amp_bf16"] - each["only_fp32"]
        assert each["points"] == pytest.approx(100 * apart / 45)
    tables = measure("tables")
    assert tables.count("\n|---|") == 2
    assert f"| {make.model} | 1,000 |" in tables
    assert f"| {make.model} (first) | figures, color x shape | 45 |" in tables


def test_class_embeddings_of_imagenet21k(measure: Measure, make: Any) -> None:
    measure("imagenet21k", "--model", make.model, "--templates", "one", "--classes", 90)
    texts = report("imagenet21k")
    assert (texts["classes"], texts["texts"], texts["classes_of_the_set"]) == (90, 90, 21843)
    assert texts["peak_rss_bytes"] >= texts["peak_rss_bytes_before"] > 0
    assert f"| {make.model} | 90 | 90 |" in measure("tables")


def test_speed(measure: Measure, make: Any) -> None:
    size = ("--images", 12, "--side", 32, "--batch-size", 8, "--workers", 1, "--rounds", 1)
    measure("speed", "--model", make.model, *size)
    (speed,) = report("speed")["models"]
    evaluation, tower = (speed["seconds_per_image"][task][0] for task in ("evaluation", "tower"))
    assert speed["ratio"] == pytest.approx(tower / evaluation)
    assert 0 < speed["highest_ratio_on_shared_cores"] <= 1
    assert f"| {speed['ratio']:.2f} |" in measure("tables")


def test_resolutions_of_two_runs_of_one_model(measure: Measure, runs: tuple[str, ...], make: Any) -> None:
    measure("resolutions", *runs, "--sizes", "32,64", "--label-set", "color")
    rows = report("resolutions")["rows"]
    assert [(row["run"], row["image_size"], row["trained_image_size"], row["tokens"]) for row in rows] == [
        ("first", 32, 32, 5), ("first", 64, 32, 17), ("second", 32, 32, 5), ("second", 64, 32, 17),
    ]  # fmt: skip
    assert Path("out", "resolutions.png").read_bytes()[:4] == b"\x89PNG"
    table = measure("tables").splitlines()
    assert "| run | labels | 32 px, 5 tokens | 64 px, 17 tokens |" in table
    for trained, resized in (rows[:2], rows[2:]):
        numbers = f"**{100 * trained['top1']:.2f} %** | {100 * resized['top1']:.2f} %"
        assert f"| {make.model} ({trained['run']}) | figures, color | {numbers} |" in table


def test_wrong_input_is_a_sentence(measure: Measure) -> None:
    with pytest.raises(SystemExit, match=r"^error: none does not exist"):
        measure("resolutions", "none", "--data", "nowhere")
