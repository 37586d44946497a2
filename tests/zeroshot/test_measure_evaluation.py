"""scripts/measure_evaluation.py at smoke size: what it writes, and the tables from it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch

from openclip_linattn.data.drawn.shapes import write_shapes

SCRIPT = Path(__file__).parents[2] / "scripts" / "measure_evaluation.py"


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the results of all measurements."""
    home = tmp_path_factory.mktemp("measured")
    write_shapes(home / "shapes", 2, test_samples=40, image_size=32, samples_per_shard=20)
    for kind in ("softmax", "normlinear"):
        name = f"ViT-T32-8-{kind}"
        torch.manual_seed(2)
        folder = home / "logs" / kind / "checkpoints"
        folder.mkdir(parents=True)
        torch.save(
            {"epoch": 1, "state_dict": open_clip.create_model(name).state_dict()}, folder / "epoch_1.pt"
        )
        (folder.parent / "params.txt").write_text(f"model: {name}\n")
    runs = ("logs/softmax", "logs/normlinear", "--data", "shapes")
    tiny = ("--model", "ViT-T32-8-normlinear")
    measure(home, "agreement", *runs, *tiny, "--templates", "one")
    measure(home, "imagenet21k", *tiny, "--templates", "one", "--classes", 90)
    measure(
        home, "speed", *tiny, "--images", 12, "--side", 32, "--batch-size", 8, "--workers", 1, "--rounds", 1
    )
    measure(home, "resolutions", *runs, "--sizes", "48,32", "--label-set", "color")
    return home


def measure(home: Path, *arguments: object) -> str:
    command = [sys.executable, SCRIPT, *arguments, "--out", home / "out"]
    result = subprocess.run(
        [str(part) for part in command], cwd=home, capture_output=True, text=True, timeout=600, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def report(home: Path, name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((home / "out" / f"{name}.json").read_text())
    assert content["command"].startswith(f"python scripts/measure_evaluation.py {name} ")
    assert str(home) not in json.dumps(content)
    return content


@pytest.mark.slow
def test_all_measurements_and_their_tables(measured: Path) -> None:
    agreement = report(measured, "agreement")
    (row,) = agreement["libraries"]
    assert row["n"] == 1000
    assert row["distinct_answers"] > 3
    assert (row["openclip"]["top1_differs"], row["openclip"]["top5_differs"]) == (0, 0)
    assert row["openclip"]["top1"] == row["ours"]["top1"]
    assert row["clip_benchmark"]["top1"] == row["ours"]["top1"]
    assert row["clip_benchmark"]["mean_per_class"] == pytest.approx(row["ours"]["mean_per_class"])
    assert len(agreement["precisions"]) == 2 * 3
    for each in agreement["precisions"]:
        apart = each["only_amp_bf16"] - each["only_fp32"]
        assert each["points"] == pytest.approx(100 * apart / 40)

    texts = report(measured, "imagenet21k")
    assert (texts["classes"], texts["texts"], texts["classes_of_the_set"]) == (90, 90, 21843)
    assert texts["peak_rss_bytes"] >= texts["peak_rss_bytes_before"] > 0

    (speed,) = report(measured, "speed")["models"]
    evaluation, tower = (speed["seconds_per_image"][task][0] for task in ("evaluation", "tower"))
    assert speed["ratio"] == pytest.approx(tower / evaluation)
    assert 0 < speed["highest_ratio_on_shared_cores"] <= 1

    sizes = report(measured, "resolutions")
    assert [(row["image_size"], row["trained_image_size"], row["tokens"]) for row in sizes["rows"]] == [
        (48, 48, 37), (32, 48, 17), (48, 48, 37), (32, 48, 17),
    ]  # fmt: skip
    assert (measured / "out" / "resolutions.png").read_bytes()[:4] == b"\x89PNG"

    tables = measure(measured, "tables")
    assert tables.count("\n|---|") == 5
    for part in (
        "| ViT-T32-8-normlinear | 1,000 |",
        "| ViT-T32-8-softmax | shapes, color x shape | 40 |",
        "| ViT-T32-8-normlinear | 90 | 90 |",
        f"| {speed['ratio']:.2f} |",
        "| model | labels | 48 px, 37 tokens | 32 px, 17 tokens |",
        f"| **{100 * sizes['rows'][0]['top1']:.2f} %** | {100 * sizes['rows'][1]['top1']:.2f} % |",
    ):
        assert part in tables


def test_wrong_input_is_a_sentence(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "resolutions", str(tmp_path / "none"), "--data", "nowhere"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 1
    assert result.stderr.startswith("error: ")
    assert "none does not exist" in result.stderr
