"""report.html without a browser: valid figures, everything inside, names as text, and what happens without plotly."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest
from plotly.offline import get_plotlyjs

from openclip_scaling.cli import main
from openclip_scaling.fitting.analysis import Settings, analyse
from openclip_scaling.isoflops.isoflop import isoflop
from openclip_scaling.pictures import interactive, interactive_isoflop
from openclip_scaling.pictures.interactive_curves import loss_curves, metric_curves
from openclip_scaling.pictures.interactive_layout import SYMBOLS, describe
from openclip_scaling.pictures.plot import COLORS, styles
from openclip_scaling.reading.runs import Collection, collect
from openclip_scaling.reporting import html_report
from openclip_scaling.reporting.report import write_report
from openclip_scaling.reporting.report_blocks import Picture
from openclip_scaling.reporting.report_content import content

FAST = Settings(draws=100)


@pytest.fixture
def ladder(write_ladder: Any) -> Path:
    folder = write_ladder(widths=(32, 64, 96, 128), epochs=5)
    assert isinstance(folder, Path)
    return folder


@pytest.fixture
def collection(ladder: Path) -> Collection:
    return collect([ladder])


def own_part(page: str) -> str:
    """The page without the library."""
    before, _, after = page.partition(get_plotlyjs())
    return before + after


def test_figures_are_what_plotly_takes(collection: Collection) -> None:
    frame = collection.checkpoints
    analysis = analyse(frame, Settings(draws=100, laws=("power",), points="frontier"))
    figures = [
        interactive.scaling(analysis, "power", frame),
        loss_curves(collection.curves, collection.runs),
        metric_curves(frame, "val_loss"),
        interactive_isoflop.isoflop(isoflop(frame, FAST)),
    ]
    for figure in figures:
        go.Figure(figure)  # raises on an unknown property or value
        json.dumps(figure, allow_nan=False)
    with pytest.raises(ValueError, match="Invalid property"):
        go.Figure({"data": [{"type": "scatter", "colour": "red"}]})


def test_every_checkpoint_is_a_point_that_says_what_it_is(collection: Collection) -> None:
    frame = collection.checkpoints
    analysis = analyse(frame, Settings(draws=100, laws=("power",)))
    figure = interactive.scaling(analysis, "power", frame)
    points = [t for t in figure["data"] if t["mode"] == "markers" and "text" in t and t.get("yaxis") != "y2"]
    assert sum(len(trace["x"]) for trace in points) == len(frame) == 40
    last = frame.iloc[-1]
    (place,) = [
        (trace, index)
        for trace in points
        for index, text in enumerate(trace["text"])
        if text.startswith(f"{last['run']}<br>epoch {last['epoch']}<br>")
    ]
    trace, index = place
    assert trace["x"][index] == pytest.approx(last["train_flop"], rel=1e-5)
    assert trace["y"][index] == pytest.approx(last["val_loss"], rel=1e-5)
    assert f"{last['samples_seen']:,} pairs seen" in trace["text"][index]
    assert "GMAC per pair" in trace["text"][index]
    assert "validation loss (nats)" in trace["hovertemplate"]
    assert "training compute (FLOP)" in trace["hovertemplate"]


def test_bands_and_residuals_are_those_of_the_fit(collection: Collection) -> None:
    analysis = analyse(collection.checkpoints, Settings(draws=100, laws=("power",)))
    item = analysis.by_law("power")["linear"]
    figure = interactive.scaling(analysis, "power", collection.checkpoints)
    own = [trace for trace in figure["data"] if trace.get("legendgroup") == "linear"]
    low, high = own[:2]
    band = item.boot.band(low["x"])
    assert band is not None
    assert low["y"] == pytest.approx(band[0], rel=1e-4)
    assert high["y"] == pytest.approx(band[1], rel=1e-4)
    residuals = next(trace for trace in own if trace.get("yaxis") == "y2")
    assert residuals["y"] == pytest.approx(100 * np.expm1(item.fit.residuals), rel=1e-4, abs=1e-6)


def test_what_was_not_fitted_is_pale_and_the_frontier_is_marked(collection: Collection) -> None:
    analysis = analyse(collection.checkpoints, Settings(draws=100, laws=("power",), points="frontier"))
    figure = interactive.scaling(analysis, "power", collection.checkpoints)
    item = analysis.by_law("power")["linear"]
    own = [t for t in figure["data"] if t.get("legendgroup") == "linear" and "text" in t]
    fitted, left_out, _ = own
    assert fitted["x"] == pytest.approx(item.fit.points.x, rel=1e-5)
    assert fitted["marker"]["opacity"] > 2 * left_out["marker"]["opacity"]
    assert len(fitted["x"]) + len(left_out["x"]) == 20
    frontier, hull = figure["data"][-2:]
    assert (frontier["visible"], hull["visible"]) == (True, "legendonly")
    assert set(fitted["x"]) <= set(frontier["x"])
    assert len(hull["x"]) <= len(frontier["x"])


def test_an_attention_has_its_color_and_marker_in_every_figure(collection: Collection) -> None:
    frame = collection.checkpoints
    analysis = analyse(frame, Settings(draws=100, laws=("power",)))
    figures = [
        interactive.scaling(analysis, "power", frame),
        loss_curves(collection.curves, collection.runs),
        metric_curves(frame, "val_loss"),
        interactive_isoflop.isoflop(isoflop(frame, FAST)),
    ]
    for figure in figures:
        for kind, (color, marker) in styles(["linear", "softmax"]).items():
            (key,) = [t for t in figure["data"] if t.get("name", "").startswith(kind)]
            assert (key["line"]["color"], key["marker"]["symbol"]) == (color, SYMBOLS[marker])
            assert key["legendgroup"] == kind
    assert len(SYMBOLS) == len(set(SYMBOLS.values())) == len(COLORS)


def test_long_curves_are_thinned_and_keep_their_ends(collection: Collection) -> None:
    curves = collection.curves
    long = curves.loc[np.repeat(curves.index, 7)].reset_index(drop=True)
    long["samples_seen"] = np.arange(1, len(long) + 1)
    long["run"] = curves["run"].iloc[0]
    curve = loss_curves(long, collection.runs)["data"][0]
    assert len(curve["x"]) == 200
    assert curve["x"][0] == 1
    assert curve["x"][-1] == len(long)


def test_the_page_holds_everything_and_asks_for_nothing(ladder: Path, tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["report", str(ladder), "-o", str(tmp_path), "--draws", "100", "--json"])
    assert not stop.value.code
    page_path = Path(json.loads(capsys.readouterr().out)["html"])
    page = page_path.read_text(encoding="utf-8")
    assert get_plotlyjs() in page
    own = own_part(page)
    assert re.findall(r"(?:https?:)?//[\w.-]+", own.replace("<!doctype html>", "")) == []
    assert re.findall(r"""(?:src|href)\s*=\s*["'](?!#|data:)""", own) == []
    assert "default-src 'none'" in own
    assert len(own) < 2_000_000
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert own.count("<figure>") == text.count("![") > 8
    assert own.count("<tr>") == sum(
        line.startswith("| ") and not set(line) <= set("|- ") for line in text.splitlines()
    )
    for heading in re.findall(r"^## (.+)$", text, re.MULTILINE):
        assert f"<h2>{heading}</h2>" in own
        assert re.search(rf'<a href="#part\d+">{re.escape(heading)}</a>', own)


def test_names_are_text_and_no_markup(collection: Collection, tmp_path: Path) -> None:
    name = "<script>alert(1)</script>"
    for frame in (collection.checkpoints, collection.runs, collection.curves):
        frame["run"] = frame["run"].astype(object).replace(frame["run"].iloc[0], name)
    write_report(tmp_path, collection, ["val_loss"], FAST)
    own = own_part((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert "script>alert" not in own
    assert "&lt;script&gt;alert(1)" in own
    assert describe({"run": "<b>x</b>"}) == "&lt;b&gt;x&lt;/b&gt;"


def test_without_plotly_the_report_is_written_and_a_sentence_says_how_to_get_the_page(
    ladder: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without(name: str) -> Any:
        return None if name == "plotly" else find_spec(name)

    monkeypatch.setattr(html_report, "find_spec", without)
    (tmp_path / "report.html").write_text("of an earlier report", encoding="utf-8")
    with pytest.raises(SystemExit) as stop:
        main(["report", str(ladder), "-o", str(tmp_path), "--metric", "val_loss", "--draws", "100", "--json"])
    assert not stop.value.code
    output = capsys.readouterr()
    assert json.loads(output.out)["html"] is None
    words = " ".join(output.err.split())
    assert "because plotly is not installed; pip install 'openclip-linattn[report]'" in words
    assert (tmp_path / "report.md").is_file()
    assert not (tmp_path / "report.html").exists()


def test_a_report_says_where_loss_is_lowest_at_equal_compute_or_why_not(collection: Collection) -> None:
    blocks = content(collection, ["val_loss"], FAST).blocks
    assert any(isinstance(block, Picture) and block.file == "val-loss-isoflop.png" for block in blocks)
    (text,) = [block for block in blocks if isinstance(block, str) and "t test of its slope" in block]
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert [row[0] for row in rows] == ["| attention", "| linear", "| softmax"]
    assert [len(row) for row in rows] == [5, 5, 5]
    few = collection.checkpoints[collection.checkpoints["gmac_per_pair"] > 0].copy()
    few["gmac_per_pair"] = few["gmac_per_pair"].min()
    collection.checkpoints = few
    blocks = content(collection, ["val_loss"], FAST).blocks
    assert not any(isinstance(block, Picture) and "isoflop" in block.file for block in blocks)
    assert any(isinstance(block, str) and "need at least 3 model sizes" in block for block in blocks)
