"""scripts/measure_check.py in its smoke form."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "measure_check.py"


@pytest.mark.slow
def test_the_cost_of_a_check_is_measured_and_extrapolated():
    result = subprocess.run(
        [sys.executable, str(SCRIPT), "--tiny"], capture_output=True, text=True, timeout=240, check=True
    )
    report = json.loads(result.stdout)
    assert report["samples"] == 20
    rates = report["rates"]
    assert set(rates) == {"tar_reading", "judging", "check_1_process", "check_2_processes"}
    laion, per_core = report["laion_400m"], rates["judging"]["samples_per_second"]
    assert laion["hours_on_64_cores"] == pytest.approx(laion["samples"] / per_core / 64 / 3600, rel=0.01)
