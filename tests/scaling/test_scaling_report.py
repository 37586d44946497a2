"""What a report says, and in which order: verdicts first, every metric in files of its own, failures named."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from openclip_scaling.cli import main
from openclip_scaling.comparing.compare import compare_groups
from openclip_scaling.fitting.analysis import Settings, analyse
from openclip_scaling.reading.runs import Collection, collect
from openclip_scaling.reporting.as_json import slug, slugs
from openclip_scaling.reporting.report_content import content
from openclip_scaling.reporting.report_metric import findings

FAST = Settings(draws=100)


@pytest.fixture
def collection(write_ladder: Any) -> Collection:
    kinds = ("softmax", "linear", "normlinear")
    return collect([write_ladder(kinds=kinds, widths=(32, 48, 64, 96, 128), epochs=2)])


def test_verdicts_come_first_and_are_those_of_the_tables(collection: Collection) -> None:
    blocks = content(collection, ["val_loss", "train_loss"], FAST).blocks
    text = "\n\n".join(block for block in blocks if isinstance(block, str))
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert headings[:2] == ["Verdict", "Exponents at a glance"]
    chapter = text.split("## Verdict")[1].split("## ")[0]
    assert re.findall(r"^\*\*(.+)\*\*$", chapter, re.MULTILINE) == [
        "validation loss (nats)",
        "training loss (nats)",
    ]
    assert len(chapter.splitlines()) < 25
    parts = dict(re.findall(r"\*\*(.+)\*\*\n\n((?:- .+\n)+)", chapter))
    for metric in ("val_loss", "train_loss"):
        analysis = analyse(
            collection.checkpoints, Settings(draws=100, metric=metric, laws=("power", "saturating"))
        )
        for law in analysis.settings.laws:
            for item in compare_groups(analysis.boots(law)):
                pair = f"{item.first} and {item.second}"
                wanted = rf"(?:- |; ){pair}(?:; .+)? \(.*\b{law}\b.* law\): (.+)"
                (found,) = re.findall(wanted, parts[analysis.metric.label])
                verdict = re.sub(r"the exponents? of .+ (is|are) not", "an exponent is not", item.verdict)
                assert found == verdict.removeprefix(f"{pair}: ")


def test_pairs_with_one_verdict_share_a_sentence_and_so_do_laws(collection: Collection) -> None:
    analysis = analyse(collection.checkpoints, FAST)
    comparisons = compare_groups(analysis.boots("power"))
    first, second, third = (f"{item.first} and {item.second}" for item in comparisons)
    words = ["not distinguishable.", "not distinguishable.", "different."]
    told = [_told(item, item.law, text) for item, text in zip(comparisons, words, strict=True)]
    other = [_told(item, "saturating", text) for item, text in zip(comparisons, words[:2], strict=False)]
    assert findings([*told, *other]) == [
        f"{first}; {second} (power and saturating law): not distinguishable.",
        f"{third} (power law): different.",
    ]
    unclear = [
        "no verdict; the exponent of a is not identified.",
        "no verdict; the exponents of a and b are not identified.",
    ]
    told = [_told(item, item.law, text) for item, text in zip(comparisons, unclear, strict=False)]
    assert findings(told) == [f"{first}; {second} (power law): no verdict; an exponent is not identified."]


def _told(item: Any, law: str, words: str) -> Any:
    return type(item)(**{**vars(item), "law": law, "verdict": f"{item.first} and {item.second}: {words}"})


def test_one_group_has_no_verdict(collection: Collection) -> None:
    collection.checkpoints = collection.checkpoints[collection.checkpoints["attention"] == "linear"]
    blocks = content(collection, ["val_loss"], FAST).blocks
    assert not any("## Verdict" in block for block in blocks if isinstance(block, str))


def test_metrics_of_like_names_have_files_of_their_own(collection: Collection) -> None:
    names, stems = ["a top1", "a/top1", "图像 top1"], ["a-top1", "a-top1-2", "图像-top1"]
    for name in names:
        collection.checkpoints[name] = collection.checkpoints["shapes/color x shape/top1"]
    blocks = [block for block in content(collection, names, FAST).blocks if not isinstance(block, str)]
    files = [block.file for block in blocks]
    assert len(files) == len(set(files))
    for name, stem in zip(names, stems, strict=True):
        own = {block.file for block in blocks if block.caption.startswith((f"{name},", f"{name} ("))}
        assert own >= {f"{stem}-{part}.png" for part in ("power", "saturating", "isoflop")}


def test_file_names_are_told_apart() -> None:
    assert slugs(["A b", "a_b", "a-b", "!", "?"]) == {"A b": "a-b", "a_b": "a-b-2", "a-b": "a-b-3", "!": "metric",
                                                     "?": "metric-2"}  # fmt: skip
    assert slug("école/図 1") == "école-図-1"


def test_a_report_without_any_fit_is_written_and_fails(
    collection: Collection, tmp_path: Path, capsys: Any
) -> None:
    collection.checkpoints["val_loss"] = np.nan
    collection.checkpoints["train_loss"] = -1.0
    collection.checkpoints.to_csv(tmp_path / "t.csv", index=False)
    arguments = ["report", str(tmp_path / "t.csv"), "-o", str(tmp_path / "out"), "--draws", "100", "--json"]
    with pytest.raises(SystemExit) as stop:
        main([*arguments, "--metric", "val_loss", "--metric", "train_loss"])
    assert stop.value.code == 2
    output = capsys.readouterr()
    assert set(json.loads(output.out)["not_fitted"]) == {"val_loss", "train_loss"}
    words = " ".join(output.err.split())
    assert "val_loss is not fitted: No row has both train_flop and val_loss" in words
    assert "No metric could be fitted" in words
    text = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert "**validation loss (nats)**\n\n- Not fitted:" in text


def test_a_metric_that_is_named_twice_is_reported_once(collection: Collection) -> None:
    report = content(collection, ["val_loss", "val_loss"], FAST)
    assert [item["metric"] for item in report.stored] == ["val_loss"]
