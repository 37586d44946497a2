"""scripts/bench_h200.sh with a stand-in for Python: what it keeps, prints and returns when a part fails."""

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SUMMARY = ROOT / "scripts" / "summarise_bench.py"
# Prints a name for the files; writes a report wherever a benchmark is asked for; fails in the parts named in FAIL.
STAND_IN = """#!/usr/bin/env bash
case "$1" in
    -c) echo bench-some-card; exit ;;
    scripts/*) exec {python} "$@" ;;
esac
part=$2
while [ $# -gt 0 ]; do
    case "$1" in
        bench) part=$2 ;;
        --out) mkdir -p "$2" && cp {report} "$2/$part-some-card.json" ;;
    esac
    shift
done
echo "ran $part"
[[ " $FAIL " != *" $part "* ]]
"""


def row(**changes):
    usual = {
        "operator": "normlinear",
        "pass": "forward",
        "batch": 4,
        "heads": 12,
        "tokens": 16384,
        "seconds": 1e-4,
        "status": "measured",
        "check": "passed",
        "least_bytes_per_s": 3.6e12,
        "softmax_speedup": 40.0,
        "softmax_status": "measured",
    }
    return usual | changes


def report(*rows):
    return json.dumps({"ceilings": {"copy_bytes_per_s": 4e12}, "rows": rows})


@pytest.fixture
def run(tmp_path):
    (tmp_path / "report.json").write_text(report(row()))
    python = tmp_path / "python"
    python.write_text(STAND_IN.format(python=sys.executable, report=tmp_path / "report.json"))
    python.chmod(0o755)

    def call(*arguments, fail="", out=None):
        environment = os.environ | {
            "OPENCLIP_LINATTN_PYTHON": str(python),
            "FAIL": fail,
            "OUT": str(out or ""),
        }
        command = ["bash", str(ROOT / "scripts" / "bench_h200.sh"), *map(str, arguments)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    return call


@pytest.mark.parametrize("failing", ["", "pytest", "ops", "towers"])
def test_a_part_that_fails_spoils_the_status_and_nothing_else(failing, run, tmp_path):
    result = run(tmp_path / "results", fail=failing)
    assert result.returncode == (1 if failing else 0), result.stderr
    reports = {str(path.relative_to(tmp_path / "results")) for path in (tmp_path / "results").rglob("*.json")}
    assert reports == {
        "ops-some-card.json",
        "towers-some-card.json",
        "vit-b-16-224/ops-some-card.json",
        "vit-b-16-2048/ops-some-card.json",
    }
    assert (tmp_path / "results" / "tests.log").read_text().startswith("ran pytest\n")
    assert result.stdout.count("normlinear forward, B*H 48, N 16384: 90% of the measured copy bandwidth") == 3
    assert result.stdout.count("normlinear forward, B*H 48, N 16384: softmax takes 40 times as long") == 3


def test_one_archive_is_left_in_out(run, tmp_path):
    out = tmp_path / "out"
    assert run(out=out).returncode == 0
    assert [path.name for path in out.iterdir()] == ["bench-some-card.tar.gz"]
    with tarfile.open(out / "bench-some-card.tar.gz") as archive:
        names = archive.getnames()
    assert {"./summary.log", "./vit-b-16-224/ops-some-card.json", "./towers-some-card.json"} <= set(names)


def summary(folder):
    command = [sys.executable, str(SUMMARY), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_summary_says_what_was_not_measured(tmp_path):
    rows = [
        row(tokens=64),
        row(operator="infsa"),
        row(operator="linear", softmax_status="extrapolated"),
        row(tokens=512, check="failed", softmax_speedup=None),
        row(tokens=1024, seconds=None, status="skipped", softmax_speedup=None),
    ]
    (tmp_path / "ops-some-card.json").write_text(report(*rows))
    assert summary(tmp_path).stdout.splitlines() == [
        "normlinear forward, B*H 48, N 64: 90% of the measured copy bandwidth of 4 TB/s",
        "linear forward, B*H 48, N 16384: 90% of the measured copy bandwidth of 4 TB/s",
        "normlinear forward, B*H 48, N 512: no share (failed, measured)",
        "normlinear forward, B*H 48, N 1024: no share (passed, skipped)",
        "linear forward, B*H 48, N 16384: softmax takes 40 times as long, softmax extrapolated",
        "normlinear forward, B*H 48, N 512: no ratio to softmax (failed, measured)",
        "normlinear forward, B*H 48, N 1024: no ratio to softmax (passed, skipped)",
    ]


def test_the_summary_of_nothing_fails(tmp_path):
    result = summary(tmp_path)
    assert result.returncode == 1
    assert "wrote no report" in result.stderr
