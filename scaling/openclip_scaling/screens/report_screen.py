"""The command that writes a report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from openclip_scaling.errors import UserError
from openclip_scaling.fitting.settings import Settings
from openclip_scaling.reporting.html_report import missing
from openclip_scaling.reporting.report import save_report
from openclip_scaling.reporting.report_content import content
from openclip_scaling.screens.options import with_settings
from openclip_scaling.screens.shared import AsJson, Sources, print_json, print_notices, read, stderr, stdout


@with_settings("metric", "law")
def report_command(
    sources: Sources,
    settings: Settings,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the report.")] = Path("report"),
    metrics: Annotated[
        list[str] | None,
        typer.Option(
            "--metric",
            "--metrics",
            help="What to report; repeatable. Without it, losses and top-1 accuracies.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write fits under both laws, verdicts, pictures, notices and runs: report.md, and report.html in one file.

    report.html is interactive and needs no network; without the extra `report` (plotly) only report.md is written.
    Where no metric can be fitted, the report has the runs and the reasons, and the exit status is 2.
    """
    if len(settings.scales) != 1:
        raise UserError("The report takes one column of --x; fit, compare, predict and plot take two.")
    collection = read(sources)
    with stderr().status("fitting") as status:
        report = content(collection, metrics, settings, lambda text: status.update(f"fitting {text}"))
        status.update("writing")
        path = save_report(output, report)
    problem = missing()
    page = None if problem else path.with_suffix(".html")
    if as_json:
        print_json(
            {
                "report": str(path),
                "html": None if page is None else str(page),
                "metrics": [item["metric"] for item in report.stored],
                "not_fitted": report.unfitted,
            }
        )
    else:
        for file in (path, page):
            if file is not None:
                stdout().print(str(file), soft_wrap=True)
    unfitted = [f"{metric} is not fitted: {reason}" for metric, reason in report.unfitted.items()]
    print_notices([*unfitted, *([problem] if problem else [])])
    if len(unfitted) == len(report.stored):
        raise UserError(f"No metric could be fitted, so that {path} has no law.")
