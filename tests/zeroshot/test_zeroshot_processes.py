"""Several processes of torchrun evaluate as one does."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from openclip_linattn.errors import UserError
from openclip_linattn.zeroshot.checkpoints import CheckpointError
from openclip_linattn.zeroshot.processes import Processes
from openclip_linattn.zeroshot.sets.streaming import DataError

CHILD = """
import sys
import open_clip
open_clip.add_model_config(sys.argv[1])
sys.argv = ["openclip-linattn", *sys.argv[2:]]
from openclip_linattn.cli import main
main()
"""


@pytest.fixture
def launch(tmp_path: Path, tiny_model: str) -> Any:
    """Run `openclip-linattn` with the tests' model in a number of processes."""
    path = next(
        each for each in __import__("open_clip").factory._MODEL_CONFIG_PATHS if tiny_model in str(each)
    )
    script = tmp_path / "child.py"
    script.write_text(CHILD)

    def run(count: int, *arguments: object) -> subprocess.CompletedProcess[str]:
        several = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(count)]
        command = [sys.executable, *several, script, path, *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "160"}
        return subprocess.run(
            [str(each) for each in command],
            capture_output=True, text=True, timeout=170, check=False, env=environment,
        )  # fmt: skip

    return run


def pictures(folder: Path, count: int) -> Path:
    """Class folders of `count` noisy images."""
    rng = np.random.default_rng(0)
    for number in range(count):
        path = folder / "abcdefg"[number % 7] / f"{number:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (36, 40, 3)).astype(np.uint8)).save(path)
    return folder


def said(folder: Path, data: Path) -> Path:
    """A captions file of the pictures in `data`."""
    names = sorted(path.relative_to(data).as_posix() for path in data.glob("*/*.png"))
    folder.mkdir()
    path = folder / "captions.token"
    path.write_text("".join(f"{name}#0\tpicture {name}\n" for name in names))
    return path


def comparable(run: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The rows of a run without what differs from run to run, and their predictions."""
    lines = (run / "checkpoints" / "zeroshot.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    kept = []
    for row in (each for each in rows if "predictions" in each):
        with np.load(run / "checkpoints" / row["predictions"]) as file:
            kept.append({key: file[key].tolist() for key in file})
    own = {"checkpoint", "run", "checkpoint_mtime_ns", "images_per_s", "predictions"}
    return [{key: value for key, value in row.items() if key not in own} for row in rows], kept


@pytest.mark.slow
def test_two_processes_find_what_one_finds(launch: Any, tmp_path: Path, make: Any, data_folder: Path) -> None:
    # 45 images in 3 tars and 37 files: neither can be halved.
    folders = pictures(tmp_path / "pictures", 37)
    (folders / "a" / ".hidden").touch()
    captions = said(tmp_path / "said", folders)
    found = []
    for count in (1, 2):
        run = tmp_path / f"with-{count}"
        make.checkpoint(run, 1, seed=3)
        data = ("--data", data_folder, "--data", folders, "--data", captions, "--images", folders)
        result = launch(count, "eval", run, *data, "--batch-size", 4, "--workers", 1, "--json")
        assert result.returncode == 0, result.stderr
        assert len(json.loads(result.stdout)) == 5
        assert result.stderr.count("hidden file(s)") == 1
        found.append(comparable(run))
    assert [row.get("n") for row in found[0][0]] == [45, 45, 45, 37, None]
    assert found[0] == found[1]


def benchmark_sets(root: Path, make: Any) -> Path:
    """Sets of clip_benchmark: tars, fewer than processes, tars with captions, and numbered images."""
    make.set(root / "figures", make.samples(45), shards=3)
    make.set(root / "single", make.samples(30), shards=1)
    content = {
        key: {"png": members["png"], "txt": f"{key} is the first\nthe second of {key}".encode()}
        for key, members in make.samples(21).items()
    }
    (make.set(root / "said", content) / "dataset_type.txt").write_text("retrieval")
    rng = np.random.default_rng(0)
    for number in range(23):
        path = root / "fer2013" / "test" / str(number % 7) / f"{number:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (36, 40, 3)).astype(np.uint8)).save(path)
    return root


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_two_processes_share_the_sets_of_clip_benchmark(
    launch: Any, tmp_path: Path, make: Any, workers: int
) -> None:
    root = benchmark_sets(tmp_path / "sets", make)
    names = ("wds/figures", "wds/single", "wds/said", "fer2013", "cifar10")
    found = []
    for count in (1, 2):
        run = tmp_path / f"with-{count}"
        make.checkpoint(run, 1, seed=3)
        asked = [part for name in names for part in ("--benchmark", name)]
        where = ("--benchmark-root", root / "{dataset_cleaned}")
        result = launch(count, "eval", run, *asked, *where, "--batch-size", 4, "--workers", workers, "--json")
        assert result.returncode != 0
        assert result.stderr.count("cifar10: the data is not all in") == 1
        rows, _ = comparable(run)
        found.append([{**row, "data": Path(row["data"]).name} for row in rows])
    assert [row.get("n", row.get("images")) for row in found[0]] == [45, 30, 21, 23]
    assert found[0] == found[1]


@pytest.mark.slow
def test_a_faulty_image_ends_all_processes_with_one_sentence(launch: Any, tmp_path: Path, make: Any) -> None:
    folders = pictures(tmp_path / "pictures", 20)
    (folders / "a" / "000.png").write_bytes(b"none")
    run = tmp_path / "run"
    make.checkpoint(run, 1, seed=3)
    result = launch(2, "eval", run, "--data", folders, "--batch-size", 4, "--workers", 0)
    assert result.returncode != 0
    assert result.stderr.count("error: ") == 1
    assert "000.png cannot be read as an image" in result.stderr
    assert not (run / "checkpoints" / "zeroshot.jsonl").exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_processes_that_fail_differently_raise_the_same(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = [DataError("a broken image"), CheckpointError("not finite")]

    def gather(everyone: list[Any], own: tuple[None, UserError]) -> None:
        assert own == (None, errors[rank])
        everyone[:] = [(None, error) for error in errors]

    def fail() -> None:
        raise errors[rank]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    with pytest.raises(DataError, match="a broken image"):
        Processes(rank, 2).collect(fail)


def test_a_process_that_did_its_work_hears_of_another_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(everyone: list[Any], own: tuple[int, None]) -> None:
        everyone[:] = [own, (None, UserError("the second failed"))]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    with pytest.raises(UserError, match="the second failed"):
        Processes(0, 2).collect(lambda: 3)


def test_one_process_does_the_work_itself() -> None:
    alone = Processes()
    assert alone.collect(lambda: 3) == [3]
    assert alone.by_first(lambda: 4) == 4

    def fail() -> None:
        raise UserError("no")

    with pytest.raises(UserError, match="no"):
        alone.collect(fail)
