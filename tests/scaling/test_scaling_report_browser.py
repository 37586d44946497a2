"""report.html in headless Chromium without a network: what is drawn, and that nothing fails or is asked for."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from openclip_scaling.fitting.analysis import Settings
from openclip_scaling.pictures.plot import styles
from openclip_scaling.reading.runs import Collection, collect
from openclip_scaling.reporting.report import write_report
from openclip_scaling.reporting.report_blocks import Picture
from openclip_scaling.reporting.report_content import content

BROWSER = shutil.which("chromium")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="Debian's chromium is not installed"),
]
FAST = Settings(draws=100)
# Nothing can be resolved and nothing reached, so what the page needs must be in it.
OFFLINE = (
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--proxy-server=http://127.0.0.1:9",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
)


@dataclass(frozen=True)
class Seen:
    """A page as it stands after its scripts ran, and what was written to its console."""

    page: str
    console: list[str]


def chromium(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    assert BROWSER is not None
    profile = path.parent / "profile"
    command = [
        BROWSER,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        *OFFLINE,
    ]
    command += [f"--user-data-dir={profile}", "--enable-logging=stderr", "--virtual-time-budget=20000"]
    return subprocess.run(
        [*command, *arguments, path.as_uri()], capture_output=True, text=True, check=True, timeout=120
    )


def opened(path: Path) -> Seen:
    done = chromium(path, "--dump-dom")
    return Seen(done.stdout, [line for line in done.stderr.splitlines() if ":CONSOLE" in line])


@pytest.fixture
def collection(write_ladder: Any) -> Collection:
    return collect([write_ladder(widths=(32, 64, 96, 128), epochs=5)])


@pytest.fixture
def page(collection: Collection, tmp_path: Path) -> Path:
    return write_report(tmp_path / "report", collection, ["val_loss"], FAST).with_suffix(".html")


def test_every_figure_is_drawn_with_all_its_traces(page: Path, collection: Collection) -> None:
    seen = opened(page)
    assert seen.console == []
    pictures = [b for b in content(collection, ["val_loss"], FAST).blocks if isinstance(b, Picture)]
    assert len(pictures) == 6
    plots = re.split(r'<div class="plot">', seen.page)[1:]
    assert len(plots) == len(pictures)
    for plot, picture in zip(plots, pictures, strict=True):
        drawn = plot.partition("<figcaption>")[0]
        assert 'class="main-svg"' in drawn
        traces = picture.interactive()["data"]
        shown = [trace for trace in traces if trace.get("visible") != "legendonly"]
        assert len(re.findall(r'class="trace scatter', drawn)) == len(shown), picture.caption
        keys = [t for t in traces if t.get("showlegend", True)]
        assert drawn.count('class="legendtext"') == len(keys), picture.caption


def framed(page: Path, width: int) -> Path:
    """A page that shows the report in a frame of that width, and notes the width that the report needs.

    A window of Chromium itself is never as narrow as a phone.
    """
    tell = "<script>addEventListener('load', () => setTimeout(() => parent.postMessage("
    tell += "document.documentElement.scrollWidth, '*'), 500))</script></body>"
    page.write_text(page.read_text(encoding="utf-8").replace("</body>", tell), encoding="utf-8")
    listen = "<script>addEventListener('message', event => document.body.dataset.width = event.data)</script>"
    frame = f'<iframe src="{page.name}" width="{width}" height="3000" style="border:0"></iframe>'
    outer = page.with_name("frame.html")
    outer.write_text(f'<!doctype html><body style="margin:0">{listen}{frame}</body>', encoding="utf-8")
    return outer


@pytest.mark.parametrize("width", [390, 1280], ids=["phone", "desktop"])
def test_the_page_fits_the_screen_and_shows_curves(page: Path, width: int) -> None:
    outer = framed(page, width)
    found = re.search(r'data-width="(\d+)"', opened(outer).page)
    assert found is not None
    assert int(found[1]) <= width
    target = page.with_suffix(".png")
    chromium(outer, f"--screenshot={target}", f"--window-size={max(width, 500)},3000", "--hide-scrollbars")
    pixels = np.asarray(imread(target))[..., :3]
    for color, _ in styles(["softmax", "linear"]).values():
        wanted = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
        assert (np.abs(pixels - wanted).max(axis=-1) < 0.05).sum() > 500


def test_a_page_that_fails_or_asks_for_more_is_noticed(page: Path) -> None:
    faults = {
        '<script src="https://example.com/x.js"></script>': "Loading the script 'https://example.com/x.js' violates",
        "<script>fetch('https://example.com').catch(() => 0)</script>": "Connecting to 'https://example.com/' violates",
        "<script>Plotly.nothing()</script>": "Plotly.nothing is not a function",
    }
    text = page.read_text(encoding="utf-8").replace("</body>", "".join(faults) + "</body>")
    page.write_text(text, encoding="utf-8")
    console = "\n".join(opened(page).console)
    for words in faults.values():
        assert words in console
