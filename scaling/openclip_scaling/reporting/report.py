"""Writes a report on a set of runs: report.md with its pictures, fits.json, and report.html, one interactive file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from openclip_scaling.fitting.analysis import Progress, Settings
from openclip_scaling.pictures.plot import save_figure
from openclip_scaling.reading.runs import Collection, write_atomically
from openclip_scaling.reporting.as_json import json_ready
from openclip_scaling.reporting.html_report import missing, write_html
from openclip_scaling.reporting.report_blocks import Block, Picture
from openclip_scaling.reporting.report_content import Report, content


def write_report(
    folder: Path,
    collection: Collection,
    metrics: Sequence[str] | None = None,
    settings: Settings | None = None,
    progress: Progress | None = None,
) -> Path:
    """Fit and write a report into `folder`; returns the path of report.md. See `content` and `save_report`."""
    return save_report(folder, content(collection, metrics, settings, progress))


def save_report(folder: Path, report: Report) -> Path:
    """Write report.md with its pictures, fits.json and report.html into `folder`; returns the path of report.md.

    Without plotly there is no report.html, and one of an earlier report is removed (see html_report.missing).
    """
    for block in report.blocks:
        if isinstance(block, Picture):
            save_figure(block.still(), folder / block.file)
    stored = json.dumps(json_ready(report.stored), indent=1, allow_nan=False)
    write_atomically(folder / "fits.json", stored + "\n")
    page = folder / "report.html"
    if missing():
        page.unlink(missing_ok=True)
    else:
        write_html(page, report.blocks)
    path = folder / "report.md"
    write_atomically(path, "\n\n".join(map(_markdown, report.blocks)) + "\n")
    return path


def _markdown(block: Block) -> str:
    if isinstance(block, str):
        return block
    caption = block.caption.replace("[", "\\[").replace("]", "\\]")  # which would end it
    return f"![{caption}]({block.file})"
