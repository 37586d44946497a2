"""A recipe, runs in any state, and plans for the ladder's tests."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from openclip_linattn.ladder.runs import Recipe, Run

RECIPE = Recipe(
    "a.tar", "b.tar", 8, epoch_samples=64, epochs=2, batch_size=8, learning_rate=1e-3, warmup_steps=1
)
PLAN = {
    "sizes": ["ViT-T32-8", "ViT-T64-8"],
    "attentions": ["softmax", "linear"],
    "samples": 256,
    "data": {"train": "shards"},
    "training": {"batch": 32, "learning_rate": 1e-3, "warmup": 2, "epochs": 2, "precision": "fp32"},
}


@pytest.fixture
def write_plan(tmp_path: Path) -> Callable[..., Path]:
    """Writes a plan that is right but for the sections that are given; one that is None is left out."""

    def write(**sections: Any) -> Path:
        content = {key: value for key, value in {**PLAN, **sections}.items() if value is not None}
        path = tmp_path / "plan.yaml"
        path.write_text(yaml.safe_dump(content))
        return path

    return write


@pytest.fixture
def new_run(tmp_path: Path) -> Run:
    """A run of two epochs whose folder is not there."""
    return Run("a", "ViT-T32-8-linear", RECIPE, tmp_path)


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Run]:
    """Makes the folder of a run that has so many checkpoints and a status in run.json."""

    def make(name: str = "a", *, epochs: int = 0, status: str = "running") -> Run:
        run = Run(name, "ViT-T32-8-linear", RECIPE, tmp_path)
        (run.folder / "checkpoints").mkdir(parents=True)
        (run.folder / "out.log").write_text("... Train Epoch: 1 [16/64 (25%)] Data (t): 0\n")
        for epoch in range(1, epochs + 1):
            (run.folder / "checkpoints" / f"epoch_{epoch}.pt").touch()
        command = " ".join(["python", "-m", "openclip_linattn.train", *run.arguments])
        (run.folder / "run.json").write_text(json.dumps({"status": status, "command": command}))
        return run

    return make
