"""The command `openclip-scaling`: one screen per subcommand, errors as sentences with exit status 2."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from openclip_scaling.analysis import Analysis
from openclip_scaling.compare import Comparison, SlopeTest, compare_groups, equal_slopes_test
from openclip_scaling.coverage_screen import coverage_command
from openclip_scaling.curves_plot import curves_figure
from openclip_scaling.errors import UserError
from openclip_scaling.markdown import READING, bounds, fits_rows, scale_text, verdicts
from openclip_scaling.options import with_settings
from openclip_scaling.plot import FORMATS, save_figure, scaling_figure
from openclip_scaling.predict_screen import predict_command
from openclip_scaling.report import comparison_dict, default_metrics, records, slug, write_report
from openclip_scaling.runs import Collection, collect, grouped, save
from openclip_scaling.screens import (
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
from openclip_scaling.selections import selection_named
from openclip_scaling.settings import Settings
from openclip_scaling.surface_plot import surface_figure

app = typer.Typer(
    help="Scaling laws from OpenCLIP runs or any CSV table. FLOP = 2 x MAC; training FLOP = 3 x forward.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("predict")(predict_command)
app.command("coverage")(coverage_command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; exits with 0, or with 2 and a sentence on stderr when the input is wrong."""
    try:
        app(args=None if arguments is None else list(arguments))
    except UserError as error:
        stderr().print(f"Error: {error}", soft_wrap=True)
        sys.exit(2)


@app.command("collect")
def collect_command(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders that hold them.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="CSV file for the checkpoints.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Read run folders into one table of checkpoints; runs, loss curves and notices are written beside it."""
    with stderr().status("reading runs"):
        collection = collect(runs)
    files = save(collection, output) if output else []
    if as_json:
        print_json(
            {
                "checkpoints": records(collection.checkpoints),
                "runs": records(collection.runs),
                "notices": [{"run": notice.run, "text": notice.text} for notice in collection.notices],
                "files": [str(path) for path in files],
            }
        )
    else:
        stdout().print(_runs_table(collection))
    print_notices(grouped(collection.notices))


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


@app.command("compare")
@with_settings()
def compare_command(sources: Sources, settings: Settings, as_json: AsJson = False) -> None:
    """Compare the exponents of every pair of groups."""
    analysis = analysed(read(sources), settings)
    comparisons = [item for law in settings.laws for item in compare_groups(analysis.boots(law))]
    if not comparisons:
        raise UserError(f"There is one group only ({analysis.fits[0].group}); a comparison needs two.")
    slopes = _slopes(analysis)
    if as_json:
        test = None if slopes is None else {"F": slopes.f, "df": slopes.degrees, "p": slopes.p}
        print_json({"metric": settings.metric, "x": settings.x, "equal_slopes_test": test,
                     "comparisons": [comparison_dict(item) for item in comparisons],
                     "notices": analysis.notices})  # fmt: skip
        return
    stdout().print(_comparison_table(comparisons))
    for text in verdicts(comparisons):
        stdout().print(text, soft_wrap=True)
    if slopes is not None:
        p = "< 0.0001" if slopes.p < 1e-4 else f"= {slopes.p:.4f}"
        stdout().print(
            f"Equal slopes (power law, points taken as independent): F{slopes.degrees} = {slopes.f:.3f}, "
            f"p {p}; checkpoints of one run make this p too small.",
            soft_wrap=True,
        )
    print_notices(analysis.remarks)


@app.command("plot")
@with_settings()
def plot_command(
    sources: Sources,
    settings: Settings,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the figures.")] = Path("figures"),
    formats: Annotated[
        list[str] | None, typer.Option("--format", help="png, svg or pdf; repeatable.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Draw metric against scale with fits, bands and residuals, and the training curves."""
    for name in formats or []:
        if name not in FORMATS:
            raise UserError(f"--format {name} is unknown; use {', '.join(FORMATS)}.")
    collection = read(sources)
    analysis = analysed(collection, settings)
    figure_of = scaling_figure if len(settings.scales) == 1 else surface_figure
    figures = {f"{slug(settings.metric)}-{law}": figure_of(analysis, law)
               for law in settings.laws if analysis.by_law(law)}  # fmt: skip
    if not collection.curves.empty and not collection.runs.empty:
        figures["training-loss"] = curves_figure(collection.curves, collection.runs)
    paths = [output / f"{name}.{suffix}" for name in figures for suffix in formats or ["png"]]
    for path in paths:
        save_figure(figures[path.stem], path)
    if as_json:
        print_json({"files": [str(path) for path in paths], "notices": analysis.notices})
    else:
        for path in paths:
            stdout().print(str(path), soft_wrap=True)
        print_notices(analysis.notices)


@app.command("report")
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
    """Write report.md with fits under both laws, verdicts, pictures, notices and the table of runs."""
    if len(settings.scales) != 1:
        raise UserError("The report takes one column of --x; fit, compare, predict and plot take two.")
    collection = read(sources)
    with stderr().status("fitting") as status:
        path = write_report(
            output, collection, metrics, settings, lambda text: status.update(f"fitting {text}")
        )
    if as_json:
        print_json({"report": str(path), "metrics": metrics or default_metrics(collection)})
    else:
        stdout().print(str(path), soft_wrap=True)


def _slopes(analysis: Analysis) -> SlopeTest | None:
    select = selection_named(analysis.settings.points)
    try:
        return equal_slopes_test({group: select(points) for group, points in analysis.points.items()})
    except UserError:
        return None


def _runs_table(collection: Collection) -> Table:
    table = Table(title=f"{len(collection.checkpoints)} checkpoints of {len(collection.runs)} runs")
    heads = {
        "run": "run", "model": "model", "attention": "attention", "gmac_per_pair": "GMAC/pair",
        "batch": "batch", "epoch": "epochs", "samples_seen": "samples", "train_flop": "training FLOP",
        "train_loss": "train loss", "val_loss": "val loss", "diverged": "diverged",
    }  # fmt: skip
    for name in heads.values():
        table.add_column(name)
    for row in records(collection.runs):
        table.add_row(*(_short(row.get(column)) for column in heads))
    return table


def _short(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if value.is_integer() and abs(value) < 1e9 else f"{value:.4g}"
    return str(value)


def _fits_table(analysis: Analysis) -> Table:
    settings = analysis.settings
    heads, rows = fits_rows(analysis)
    return table_of(
        f"{analysis.metric.label} against {analysis.x_label}; points: {settings.points}", heads, rows, READING
    )


def _comparison_table(comparisons: Sequence[Comparison]) -> Table:
    heads = (
        "law",
        "first",
        "second",
        "exponent",
        "difference [95 %]",
        "ratio [95 %]",
        "at scale",
        "reliable",
    )
    rows = [
        [
            item.law,
            item.first,
            item.second,
            item.exponent,
            f"{item.difference:+.4f}{bounds(item.interval)}",
            f"{item.ratio:.4f}{bounds(item.ratio_interval)}",
            scale_text(item.scale),
            "yes" if item.reliable else "no",
        ]
        for item in comparisons
    ]
    caption = (
        "difference: of exponents, first minus second; ratio: of the predicted metric, first over second"
    )
    return table_of("groups compared, at the largest common scale", heads, rows, caption)


if __name__ == "__main__":
    main()
