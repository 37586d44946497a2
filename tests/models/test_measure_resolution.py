"""scripts/measure_resolution.py: its smoke form, and what it says of runs that are not made or that fail."""

import csv
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "scripts" / "measure_resolution.py"


@pytest.fixture
def measuring(monkeypatch):
    """The script as a module, whose processes of their own are replaced by one second per 100 patches."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    module = importlib.import_module(SCRIPT.stem)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(module, "run_child", lambda case, _: outcome(case.pixels**2 / 6400))
    return module


def outcome(seconds):
    return {
        "seconds": seconds,
        "cpu_seconds": seconds,
        "rounds": 3,
        "peak_bytes": int(1e7 * seconds),
        "energy_joules": None,
    }


def rows_of(module, monkeypatch, folder, *options):
    arguments = ["measure_resolution.py", "--models", "ViT-T32-8-normlinear", "--out", str(folder), *options]
    monkeypatch.setattr(sys, "argv", arguments)
    module.main()
    return json.loads((folder / "resolution.json").read_text())["rows"]


def test_a_size_or_a_pass_named_twice_is_measured_once(measuring, monkeypatch, tmp_path):
    options = ["--sizes", "96", "48", "96", "--passes", "plain", "low memory", "plain"]
    rows = rows_of(measuring, monkeypatch, tmp_path, *options)
    assert [(row["pass"], row["pixels"]) for row in rows] == [
        ("plain", 48), ("plain", 96), ("low memory", 48), ("low memory", 96)
    ]  # fmt: skip
    assert {row["status"] for row in rows} == {"measured"}
    assert {row["tokens_per_s"] for row in rows} == {37 / 0.36, 145 / 1.44}


def test_what_is_beyond_a_limit_is_extrapolated_with_the_reason(measuring, monkeypatch, tmp_path):
    options = ["--sizes", "48", "96", "192", "384", "--passes", "plain"]
    rows = rows_of(measuring, monkeypatch, tmp_path, *options, "--run-limit", "10")
    assert [row["status"] for row in rows] == ["measured"] * 3 + ["extrapolated"]
    assert rows[3]["skipped"] == "one run would take 23 s"
    work = rows[3]["forward_gflop"] / rows[2]["forward_gflop"]
    assert rows[3]["seconds"] == pytest.approx(rows[2]["seconds"] * work)
    rows = rows_of(measuring, monkeypatch, tmp_path, *options, "--memory-limit", "0.1")
    assert rows[3]["skipped"] == "it would take 0.2 GiB"
    assert rows[3]["failure"] is rows[3]["peak_bytes"] is None


@pytest.mark.parametrize(("broken", "status"), [(48, "failed"), (96, "extrapolated")])
def test_a_run_that_fails_is_reported_and_ends_with_an_error(
    measuring, monkeypatch, tmp_path, broken, status
):
    def run(case, _limit):
        return {"failure": "out of memory"} if case.pixels == broken else outcome(case.pixels)

    monkeypatch.setattr(measuring, "run_child", run)
    with pytest.raises(SystemExit) as ended:
        rows_of(measuring, monkeypatch, tmp_path, "--sizes", "48", "96", "192", "--passes", "plain")
    assert ended.value.code == (
        f"1 of 3 runs failed, the first of them ViT-T32-8-normlinear at {broken} px (plain): out of memory"
    )
    rows = json.loads((tmp_path / "resolution.json").read_text())["rows"]
    assert {row["pixels"]: row["status"] for row in rows} == {
        48: "measured", 96: "measured", 192: "measured", broken: status
    }  # fmt: skip
    assert (tmp_path / "resolution.png").exists()


def test_results_that_have_no_place_are_refused_before_anything_runs(measuring, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="File exists"):
        rows_of(measuring, monkeypatch, tmp_path / "file", "--sizes", "48")


def test_a_process_that_does_not_end_is_ended(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    module = importlib.import_module(SCRIPT.stem)
    case = module.Case("ViT-T32-8-normlinear", 48, "plain", 1, "cpu", "fp32")
    assert module.run_child(case, 0.01) == {"failure": "it did not end within 0 s"}


@pytest.mark.slow
def test_sizes_are_measured_and_what_would_take_too_long_is_extrapolated(tmp_path):
    limits = ["--memory-limit", "0.1"]
    command = [
        sys.executable,
        str(SCRIPT),
        "--tiny",
        "--out",
        str(tmp_path),
        "--passes",
        "low memory",
        *limits,
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=400, check=True)
    assert "rows" in result.stdout
    report = json.loads((tmp_path / "resolution.json").read_text())
    with (tmp_path / "resolution.csv").open() as lines:
        assert len(list(csv.DictReader(lines))) == len(report["rows"])
    assert (tmp_path / "resolution.png").read_bytes().startswith(b"\x89PNG")
    for row in report["rows"]:
        assert row["status"] == ("measured" if row["pixels"] == 48 else "extrapolated")
        assert row["tokens_per_s"] == pytest.approx(row["tokens"] / row["seconds"])
        assert (row["peak_bytes"] is None) == (row["status"] == "extrapolated")
    by_size = [row["seconds"] / row["forward_gflop"] for row in report["rows"][:3]]
    assert by_size == pytest.approx([by_size[0]] * 3)


@pytest.mark.slow
def test_an_unknown_model_ends_with_a_sentence(tmp_path):
    command = [
        sys.executable,
        str(SCRIPT),
        "--models",
        "ViT-S-16-normlinaer",
        "--out",
        str(tmp_path / "none"),
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert result.returncode == 1
    assert "unknown model 'ViT-S-16-normlinaer'; the closest are ViT-S-16-normlinear" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "none").exists()
