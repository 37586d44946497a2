"""Small real shards for the training tests, drawn once."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from openclip_linattn.data.drawn.shapes import write_shapes


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4 shards of 32 captioned shapes, and 16 held-out ones in test/."""
    folder = tmp_path_factory.mktemp("shapes")
    write_shapes(folder, samples=128, test_samples=16, samples_per_shard=32)
    return folder


@pytest.fixture
def run() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a Python command with one thread and two minutes of patience."""

    def call(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            capture_output=True,
            text=True,
            timeout=240,
            cwd=cwd,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=False,
        )

    return call


@pytest.fixture
def flags(shards: Path, tmp_path: Path) -> Sequence[str]:
    """A training command of OpenCLIP at smoke size: 4 steps of 32 pairs an epoch."""
    return [
        *(
            "--train-data",
            f"{shards}/{{00000..00003}}.tar",
            "--dataset-type",
            "webdataset",
            "--batch-size",
            "32",
        ),
        *("--workers", "1", "--epochs", "1", "--warmup", "1", "--log-every-n-steps", "1", "--device", "cpu"),
        *("--precision", "fp32", "--logs", str(tmp_path / "logs")),
    ]
