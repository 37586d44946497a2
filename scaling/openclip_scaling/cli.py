"""The command `openclip-scaling`: one screen per subcommand, errors as sentences with exit status 2."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer
from rich.table import Table

from openclip_scaling.errors import UserError
from openclip_scaling.fitting.analysis import Analysis
from openclip_scaling.fitting.settings import Settings
from openclip_scaling.reporting.markdown import READING, fits_rows
from openclip_scaling.screens.collect_screen import collect_command
from openclip_scaling.screens.compare_screen import compare_command
from openclip_scaling.screens.coverage_screen import coverage_command
from openclip_scaling.screens.options import with_settings
from openclip_scaling.screens.plot_screen import plot_command
from openclip_scaling.screens.predict_screen import predict_command
from openclip_scaling.screens.report_screen import report_command
from openclip_scaling.screens.shared import (
    AsJson,
    Sources,
    analysed,
    print_json,
    print_notices,
    read,
    stderr,
    stdout,
    table_of,
)

app = typer.Typer(
    help="Scaling laws from OpenCLIP runs or any CSV table. FLOP = 2 x MAC; training FLOP = 3 x forward.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("collect")(collect_command)
app.command("compare")(compare_command)
app.command("predict")(predict_command)
app.command("plot")(plot_command)
app.command("report")(report_command)
app.command("coverage")(coverage_command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; exits with 0, or with 2 and a sentence on stderr when the input is wrong."""
    try:
        app(args=None if arguments is None else list(arguments))
    except UserError as error:
        stderr().print(f"Error: {error}", soft_wrap=True)
        sys.exit(2)


@app.command("fit")
@with_settings()
def fit_command(sources: Sources, settings: Settings, as_json: AsJson = False) -> None:
    """Fit scaling laws to every group, with intervals from resampled runs."""
    analysis = analysed(read(sources), settings)
    if as_json:
        print_json({"metric": settings.metric, "x": settings.x, "fits": [item.as_dict() for item in
        analysis.fits],
                     "notices": analysis.notices})  # fmt: skip
    else:
        stdout().print(_fits_table(analysis))
        print_notices(analysis.remarks)


def _fits_table(analysis: Analysis) -> Table:
    settings = analysis.settings
    heads, rows = fits_rows(analysis)
    return table_of(
        f"{analysis.metric.label} against {analysis.x_label}; points: {settings.points}", heads, rows, READING
    )


if __name__ == "__main__":
    main()
