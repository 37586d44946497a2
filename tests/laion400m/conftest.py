"""The scripts are run as a user runs them, with this interpreter and small drawn shards."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from openclip_linattn.data.drawn.shapes import write_shapes

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts" / "laion400m"
Runner = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """One thread, and the interpreter of the tests instead of a virtual environment in the checkout."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "OPENCLIP_LINATTN_PYTHON": sys.executable,
    }


@pytest.fixture(scope="session")
def run(environment: dict[str, str]) -> Runner:
    """Runs a command in the checkout, with three minutes of patience; keyword arguments are more environment."""

    def call(*command: str | Path, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(part) for part in command],
            capture_output=True,
            text=True,
            timeout=180,
            cwd=ROOT,
            env={**environment, **more},
            check=False,
        )

    return call


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4 shards of 128 captioned shapes, and 64 held-out ones in test/."""
    folder = tmp_path_factory.mktemp("shapes") / "shards"
    write_shapes(folder, samples=512, test_samples=64, samples_per_shard=128)
    return folder
