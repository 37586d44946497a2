import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import typer
from PIL import Image
from typer.testing import CliRunner, Result

from openclip_linattn.cli.evaluate import evaluate_command
from openclip_linattn.cli.evaluate.titles import short_names


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("COLUMNS", "200")
    app = typer.Typer()
    app.command()(evaluate_command)

    def run(*arguments: object) -> Result:
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    return run


PLAIN = ("--no-save", "--workers", 0)


def test_the_table_holds_the_numbers(cli: Any, run_folder: Path, data_folder: Path) -> None:
    rows = json.loads(cli(run_folder, "--data", data_folder, "--json", *PLAIN).stdout)
    result = cli(run_folder, "--data", data_folder, *PLAIN, "--per-class")
    assert result.exit_code == 0
    assert "figures: 45 images in 3 shard(s)" in result.stderr
    for row in rows:
        assert f"{100 * row['top1']:.2f}" in result.stdout
    for text in ("accuracy on figures", "epoch_2.pt", "epoch_10.pt", "color x shape (8)", "red disk"):
        assert text in result.stdout


def test_two_sets_of_one_name_are_told_apart(
    cli: Any, checkpoint: Path, data_folder: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(data_folder, tmp_path / "other" / "figures")
    result = cli(checkpoint, "--data", data_folder, "--data", other, "--label-set", "color", *PLAIN)
    assert "other/figures/test" in result.stdout
    assert f"{data_folder.parent.name}/figures/test" in result.stdout


def test_json_is_alone_on_stdout(cli: Any, checkpoint: Path, data_folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "rows, all.json"
    result = cli(checkpoint, "--data", data_folder, "--json", "-o", output, *PLAIN)
    assert result.exit_code == 0
    rows = json.loads(result.stdout)
    assert len(rows) == 3
    assert json.loads(output.read_text()) == rows
    assert "NaN" not in result.stdout


def test_label_sets_are_chosen(cli: Any, checkpoint: Path, data_folder: Path) -> None:
    chosen = ("--label-set", "shape", "--label-set", "color")
    rows = json.loads(cli(checkpoint, "--data", data_folder, *chosen, "--json", *PLAIN).stdout)
    assert [row["label_set"] for row in rows] == ["color", "shape"]
    assert all("top5" not in row for row in rows)


def test_rows_are_saved_and_used_again(cli: Any, make: Any, data_folder: Path, tmp_path: Path) -> None:
    path = make.checkpoint(tmp_path / "run", 1, 0)
    first = cli(path, "--data", data_folder, "--json", "--workers", 0)
    second = cli(path, "--data", data_folder, "--json", "--workers", 0)
    assert second.stdout == first.stdout
    assert "3 row(s) were there already" in second.stderr
    assert "already" not in first.stderr
    assert (path.parent / "zeroshot.jsonl").is_file()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--model", "ViT-B16"], "unknown model 'ViT-B16'; the closest are"),
        (["--batch-size", "0"], "the batch size is 0"),
        (["--precision", "half"], "unknown precision 'half'"),
        (["--label-set", "size"], "no label set 'size'"),
        (["--classnames", "/nowhere.txt"], "/nowhere.txt does not exist"),
        (["--device", "tpu"], "device 'tpu' cannot be used"),
    ],
)
def test_bad_input_is_a_sentence_and_status_2(
    cli: Any, checkpoint: Path, data_folder: Path, arguments: list[str], reason: str
) -> None:
    result = cli(checkpoint, "--data", data_folder, *PLAIN, *arguments)
    assert result.exit_code == 2
    assert "error: " in result.stderr
    assert reason in result.stderr
    assert "Traceback" not in result.output
    assert result.stdout == ""


def test_a_wrong_template_is_named_by_line(
    cli: Any, checkpoint: Path, data_folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "templates.txt"
    path.write_text("a {c}\na {name}\n")
    result = cli(checkpoint, "--data", data_folder, "--templates", path, *PLAIN)
    assert result.exit_code == 2
    assert f"{path}: line 2" in result.stderr
    assert "{name}" in result.stderr


def test_a_checkpoint_that_fails_leaves_the_rows_of_the_others(
    cli: Any, checkpoint: Path, data_folder: Path, tmp_path: Path, make: Any
) -> None:
    broken = tmp_path / "epoch_3.pt"
    broken.write_bytes(b"nothing")
    result = cli(broken, checkpoint, "--data", data_folder, "--model", make.model, "--json", *PLAIN)
    assert result.exit_code == 2
    assert [row["epoch"] for row in json.loads(result.stdout)] == [2] * 3
    assert "epoch_3.pt does not load as" in result.stderr


def test_a_damaged_image_is_named_below_the_rows_of_the_other_sets(
    cli: Any, checkpoint: Path, data_folder: Path, pets: Path
) -> None:
    (pets / "cat" / "0.png").write_bytes(b"nothing")
    result = cli(checkpoint, "--data", pets, "--data", data_folder, *PLAIN)
    assert result.exit_code == 2
    assert "accuracy on figures" in result.stdout
    assert "0.png cannot be read as an image" in result.stderr
    assert "; pets was left out" in result.stderr


def test_names_are_as_short_as_they_can_be() -> None:
    assert short_names(["/a/b/epoch_1.pt", "/a/b/epoch_2.pt"]) == {
        "/a/b/epoch_1.pt": "epoch_1.pt",
        "/a/b/epoch_2.pt": "epoch_2.pt",
    }
    assert short_names(["/x/b/c", "/y/b/c"]) == {"/x/b/c": "x/b/c", "/y/b/c": "y/b/c"}
    assert short_names(["/r/checkpoints/c", "/s/checkpoints/c"]) == {
        "/r/checkpoints/c": "r/c",
        "/s/checkpoints/c": "s/c",
    }
    assert short_names(["/r/checkpoints/c", "/r/c"]) == {"/r/checkpoints/c": "checkpoints/c", "/r/c": "r/c"}
    assert short_names([]) == {}
    assert short_names(["/a/b", "/a/b"]) == {"/a/b": "b"}


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    """Three class folders of two images each."""
    for number in range(6):
        path = tmp_path / "pets" / ("cat", "dog", "eel")[number % 3] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 36), (40 * number, 90, 0)).save(path)
    return tmp_path / "pets"


def test_class_folders_are_evaluated(cli: Any, checkpoint: Path, pets: Path) -> None:
    result = cli(checkpoint, "--data", f"folder:{pets}", "--templates", "simple7", "--json", *PLAIN)
    assert result.exit_code == 0
    (row,) = json.loads(result.stdout)
    assert (row["dataset"], row["label_set"], row["n"], row["classes"]) == ("pets", "folder", 6, 3)
    assert row["templates"] == 7
    assert row["per_class"][1][:2] == ["dog", 2]
    assert "pets: 6 images in 3 class folder(s); labels: folder" in result.stderr


def test_an_empty_class_is_refused_unless_told(cli: Any, checkpoint: Path, pets: Path) -> None:
    (pets / "ape").mkdir()
    refused = cli(checkpoint, "--data", pets, *PLAIN)
    assert refused.exit_code == 2
    assert "1 class folder(s) hold no image, first 'ape'" in refused.stderr
    result = cli(checkpoint, "--data", pets, "--classes", "present", "--json", *PLAIN)
    assert json.loads(result.stdout)[0]["classes"] == 3
    assert "the classes are 'some'; they can be all or present" in (
        cli(checkpoint, "--data", pets, "--classes", "some", *PLAIN).stderr
    )


def said(folder: Path, make: Any) -> Path:
    """Tars of images with captions."""
    content = {
        key: {"png": members["png"], "txt": f"caption of {key}".encode()}
        for key, members in make.samples(12).items()
    }
    make.set(folder, content)
    (folder / "dataset_type.txt").write_text("retrieval\n")
    return folder


def test_every_task_has_a_table_of_its_own(
    cli: Any, checkpoint: Path, data_folder: Path, make: Any, tmp_path: Path
) -> None:
    place = said(tmp_path / "said", make)
    both = ("--data", data_folder, "--data", place, "--label-set", "color")
    rows = json.loads(cli(checkpoint, *both, "--json", *PLAIN).stdout)
    shown = cli(checkpoint, *both, *PLAIN).stdout
    assert shown.index("Zero-shot accuracy on figures") < shown.index("Retrieval, recall on said")
    low, high = rows[0]["top1_interval"]
    assert f"[{100 * low:.2f}, {100 * high:.2f}]" in shown
    for k in (1, 5, 10):
        assert f"{100 * rows[1][f'image_to_text_recall@{k}']:.2f}" in shown
        assert f"{100 * rows[1][f'text_to_image_recall@{k}']:.2f}" in shown


def test_a_probe_has_a_table(
    cli: Any, checkpoint: Path, data_folder: Path, make: Any, tmp_path: Path
) -> None:
    train = make.set(tmp_path / "train", make.samples(60))
    result = cli(checkpoint, "--data", data_folder, "--probe", train, "--label-set", "color", *PLAIN)
    assert result.exit_code == 0
    assert "Linear probe, accuracy on figures" in result.stdout
    assert "color/probe (4)" in result.stdout


def test_accuracy_stands_against_resolution(cli: Any, checkpoint: Path, data_folder: Path) -> None:
    sizes = ("--image-size", "64,32", "--label-set", "color x shape")
    rows = json.loads(cli(checkpoint, "--data", data_folder, *sizes, "--json", *PLAIN).stdout)
    shown = cli(checkpoint, "--data", data_folder, *sizes, *PLAIN).stdout
    table = shown[shown.index("Top-1 against image size") :]
    assert "on figures, color x shape (8), %" in " ".join(table.split())
    lines = [line.split() for line in table.splitlines()]
    heading = lines.index(["32", "px", "64", "px"])
    assert lines[heading + 1] == ["checkpoint", "trained", "at", "5", "tokens", "17", "tokens"]
    numbers = [f"{100 * row['top1']:.2f}" for row in reversed(rows)]
    assert lines[heading + 3] == ["epoch_2.pt", "32", *numbers]
    refused = cli(checkpoint, "--data", data_folder, "--image-size", "224x224", *PLAIN)
    assert (refused.exit_code, "--image-size is '224x224'" in refused.stderr) == (2, True)


# clip_benchmark leaves shards to be closed by the collector.
@pytest.mark.filterwarnings(r"ignore:unclosed file .*\.tar'>:ResourceWarning")
def test_sets_of_clip_benchmark_have_a_mean(
    cli: Any, checkpoint: Path, data_folder: Path, tmp_path: Path
) -> None:
    for name in ("one", "two"):
        shutil.copytree(data_folder, tmp_path / name)
    named = ("--benchmark", "wds/one", "--benchmark", "wds/two", "--benchmark-root", tmp_path / "{dataset}")
    rows = json.loads(cli(checkpoint, *named, "--json", *PLAIN).stdout)
    shown = cli(checkpoint, *named, "--benchmark", "wds/three", *PLAIN)
    mean = 50 * (rows[0]["top1"] + rows[1]["top1"])
    assert f"mean top-1 of 2 sets of clip_benchmark at 32 px is {mean:.2f} %" in shown.stdout
    assert shown.exit_code == 2
    assert "wds/three: " in shown.stderr
