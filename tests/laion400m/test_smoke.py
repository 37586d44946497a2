"""The whole road at its smallest: check, clean, train two kinds of attention, evaluate, collect."""

import csv
import json
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts" / "laion400m"


@pytest.mark.slow
def test_the_road_leads_from_shards_to_fitted_laws(run, tmp_path):
    result = run("bash", SCRIPTS / "smoke.sh", tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr

    (report,) = json.loads((tmp_path / "shards.check.json").read_text())
    assert report["usable"] == 512
    assert (tmp_path / "shards.check.png").stat().st_size > 0
    account = json.loads((tmp_path / "clean" / "account.json").read_text())
    assert account["in"] == 512
    assert json.loads((tmp_path / "clean" / "sizes.json").read_text()).keys() == {
        f"{number:05}.tar" for number in range(4)
    }
    for attention in ("softmax", "normlinear"):
        folder = tmp_path / "logs" / f"T32-8-{attention}-1k-lr1.5e-3-seed0"
        record = json.loads((folder / "run.json").read_text())
        assert (record["status"], record["seen"]["samples"]) == ("finished", 1024)
        assert len((folder / "checkpoints" / "zeroshot.jsonl").read_text().splitlines()) == 2 * 3
    with (tmp_path / "report" / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {(row["attention"], row["samples_seen"]) for row in rows} == {
        (attention, samples) for attention in ("softmax", "normlinear") for samples in ("512", "1024")
    }
    laws = json.dumps(json.loads((tmp_path / "report" / "fits.json").read_text()))
    assert all(name in laws for name in ("val_loss", "color x shape", "softmax", "normlinear"))
