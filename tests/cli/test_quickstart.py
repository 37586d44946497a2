"""The quickstart at its smoke size: everything for real, and a second call repeats nothing."""

import json
from pathlib import Path

import pytest

from openclip_linattn.errors import UserError
from openclip_linattn.quickstart import TINY, quickstart


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("quick")
    quickstart(out, sizes=("ViT-T32-8", "ViT-T64-8"), scale=TINY)
    return out


@pytest.mark.slow
def test_report_links_pictures_that_exist(finished):
    text = (finished / "report" / "report.md").read_text()
    pictures = [line.split("](")[1].rstrip(")") for line in text.splitlines() if line.startswith("![")]
    assert len(pictures) >= 6
    for picture in pictures:
        assert (finished / "report" / picture).stat().st_size > 5_000, picture
    assert "samples-shapes.png" in pictures
    assert "not reliable" in text
    for attention in ("softmax", "linear", "normlinear"):
        assert f"| ViT-T64-8-{attention} | 384 |" in text
    assert "shapes/color x shape/top1" in text
    assert "digits/digit/top1" in text
    assert str(finished) not in text


@pytest.mark.slow
def test_runs_are_finished_and_evaluated(finished):
    for attention in ("softmax", "linear", "normlinear"):
        folder = finished / "logs" / f"ViT-T32-8-{attention}"
        facts = json.loads((folder / "run.json").read_text())
        assert (facts["status"], facts["attention"]) == ("finished", attention)
        assert facts["seen"] == {"epochs": 3, "steps": 12, "samples": 384}
        rows = [
            json.loads(line) for line in (folder / "checkpoints" / "zeroshot.jsonl").read_text().splitlines()
        ]
        assert {row["epoch"] for row in rows} == {1, 2, 3}
        assert {(row["dataset"], row["n"]) for row in rows} == {("shapes", 64), ("digits", 360)}
        assert [path.name for path in (folder / "checkpoints").glob("*.pt")] == ["epoch_3.pt"]


@pytest.mark.slow
def test_a_second_call_trains_nothing(finished, monkeypatch):
    def refuse(*_: object) -> None:
        raise AssertionError("a finished run was started again")

    monkeypatch.setattr("openclip_linattn.ladder.children.Children.start", refuse)
    before = (finished / "report" / "report.md").read_text()
    quickstart(finished, sizes=("ViT-T32-8", "ViT-T64-8"), scale=TINY)
    assert (finished / "report" / "report.md").read_text() == before


@pytest.mark.slow
def test_other_settings_do_not_overwrite_the_runs(finished):
    from dataclasses import replace

    with pytest.raises(UserError, match="holds a run with other settings"):
        quickstart(finished, sizes=("ViT-T32-8",), scale=replace(TINY, epochs=4))
