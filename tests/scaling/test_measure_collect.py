"""scripts/measure_collect.py at its smallest."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "measure_collect.py"


@pytest.mark.slow
def test_a_small_measurement(tmp_path: Path) -> None:
    out = tmp_path / "new" / "x.json"
    arguments = [sys.executable, str(SCRIPT), "--folders", "2", "--megabytes", "0.02", "--out", str(out)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=120)
    result = json.loads(out.read_text(encoding="utf-8"))
    assert json.loads(done.stdout) == result
    assert result["folders"] == 2
    assert 10_000 < result["bytes"] < 40_000
    assert all(result[part]["peak_megabytes"] > 10 for part in ("reading", "reading_and_writing_tables"))
    assert result["checkpoints"] == 16
