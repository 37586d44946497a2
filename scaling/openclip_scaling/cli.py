"""The command `openclip-scaling`: one screen per subcommand, errors as sentences with exit status 2."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from openclip_scaling.analysis import Analysis, Settings, analyse
from openclip_scaling.compare import Comparison, SlopeTest, compare_groups, equal_slopes_test
from openclip_scaling.errors import UserError
from openclip_scaling.markdown import bounds, verdicts, with_interval
from openclip_scaling.options import with_settings
from openclip_scaling.plot import FORMATS, curves_figure, save_figure, scaling_figure
from openclip_scaling.points import selection_named
from openclip_scaling.report import (
    comparison_dict,
    default_metrics,
    json_ready,
    predictions,
    records,
    slug,
    write_report,
)
from openclip_scaling.runs import Collection, collect, grouped, load, save

app = typer.Typer(
    help="Scaling laws from OpenCLIP runs or any CSV table. FLOP = 2 x MAC; training FLOP = 3 x forward.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
Sources = Annotated[
    list[Path], typer.Argument(help="A CSV table, or run folders, or folders that hold runs.")
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on stdout, and nothing else there.")]
_WIDE = 160  # columns where stdout is not a terminal


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; exits with 0, or with 2 and a sentence on stderr when the input is wrong."""
    try:
        app(args=None if arguments is None else list(arguments))
    except UserError as error:
        _stderr().print(f"Error: {error}", soft_wrap=True)
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
    with _stderr().status("reading runs"):
        collection = collect(runs)
    files = save(collection, output) if output else []
    if as_json:
        _print_json(
            {
                "checkpoints": records(collection.checkpoints),
                "runs": records(collection.runs),
                "notices": [{"run": notice.run, "text": notice.text} for notice in collection.notices],
                "files": [str(path) for path in files],
            }
        )
    else:
        _stdout().print(_runs_table(collection))
    _print_notices(grouped(collection.notices))


@app.command("fit")
@with_settings()
def fit_command(sources: Sources, settings: Settings, as_json: AsJson = False) -> None:
    """Fit scaling laws to every group, with intervals from resampled runs."""
    analysis = _analyse(_load(sources), settings)
    if as_json:
        _print_json({"metric": settings.metric, "x": settings.x, "fits": [item.as_dict() for item in
        analysis.fits],
                     "notices": analysis.notices})  # fmt: skip
    else:
        _stdout().print(_fits_table(analysis))
        _print_notices(analysis.remarks)


@app.command("compare")
@with_settings()
def compare_command(sources: Sources, settings: Settings, as_json: AsJson = False) -> None:
    """Compare the exponents of every pair of groups."""
    analysis = _analyse(_load(sources), settings)
    comparisons = [item for law in settings.laws for item in compare_groups(_boots(analysis, law))]
    if not comparisons:
        raise UserError(f"There is one group only ({analysis.fits[0].group}); a comparison needs two.")
    slopes = _slopes(analysis)
    if as_json:
        test = None if slopes is None else {"F": slopes.f, "df": slopes.degrees, "p": slopes.p}
        _print_json({"metric": settings.metric, "x": settings.x, "equal_slopes_test": test,
                     "comparisons": [comparison_dict(item) for item in comparisons],
                     "notices": analysis.notices})  # fmt: skip
        return
    _stdout().print(_comparison_table(comparisons))
    for text in verdicts(comparisons):
        _stdout().print(text, soft_wrap=True)
    if slopes is not None:
        _stdout().print(
            f"Equal slopes (power law, points taken as independent): F{slopes.degrees} = {slopes.f:.3f}, "
            f"p = {slopes.p:.4f}; checkpoints of one run make this p too small.",
            soft_wrap=True,
        )
    _print_notices(analysis.remarks)


@app.command("predict")
@with_settings()
def predict_command(
    sources: Sources,
    settings: Settings,
    at: Annotated[list[float], typer.Option("--at", help="Scale, in the unit of --x; repeatable.")],
    as_json: AsJson = False,
) -> None:
    """Predict the metric at given scales, with intervals; says how far beyond the points a scale lies."""
    if not all(math.isfinite(scale) and scale > 0 for scale in at):
        raise UserError("--at needs positive numbers.")
    analysis = _analyse(_load(sources), settings)
    rows = predictions(analysis, at)
    if as_json:
        _print_json(
            {"metric": settings.metric, "x": settings.x, "predictions": rows, "notices": analysis.notices}
        )
        return
    table = Table(title=f"{analysis.metric.label} at {analysis.x_label}")
    for name in (settings.by, "law", "scale", "predicted [95 %]", "decades beyond the points"):
        table.add_column(name)
    for row in rows:
        interval = bounds(row["interval95"])
        value = f"{row['predicted']:.4f}{interval}"
        table.add_row(row["group"], row["law"], f"{row['scale']:.3g}", value, f"{row['decades_beyond']:.2f}")
    _stdout().print(table)
    _print_notices(analysis.remarks)


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
    collection = _load(sources)
    analysis = _analyse(collection, settings)
    figures = {f"{slug(settings.metric)}-{law}": scaling_figure(analysis, law)
               for law in settings.laws if analysis.by_law(law)}  # fmt: skip
    if not collection.curves.empty and not collection.runs.empty:
        figures["training-loss"] = curves_figure(collection.curves, collection.runs)
    paths = [output / f"{name}.{suffix}" for name in figures for suffix in formats or ["png"]]
    for path in paths:
        save_figure(figures[path.stem], path)
    if as_json:
        _print_json({"files": [str(path) for path in paths], "notices": analysis.notices})
    else:
        for path in paths:
            _stdout().print(str(path), soft_wrap=True)
        _print_notices(analysis.notices)


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
    collection = _load(sources)
    with _stderr().status("fitting") as status:
        path = write_report(
            output, collection, metrics, settings, lambda text: status.update(f"fitting {text}")
        )
    if as_json:
        _print_json({"report": str(path), "metrics": metrics or default_metrics(collection)})
    else:
        _stdout().print(str(path), soft_wrap=True)


def _load(sources: Sequence[Path]) -> Collection:
    files = [source for source in sources if source.is_file()]
    if not files:
        return collect(sources)
    if len(sources) > 1:
        raise UserError("Give one CSV table, or any number of run folders, but not both.")
    return load(files[0])


def _analyse(collection: Collection, settings: Settings) -> Analysis:
    with _stderr().status("fitting") as status:
        return analyse(collection.checkpoints, settings, lambda text: status.update(f"fitting {text}"))


def _boots(analysis: Analysis, law: str) -> dict[str, Any]:
    return {group: item.boot for group, item in analysis.by_law(law).items()}


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
    table = Table(title=f"{analysis.metric.label} against {analysis.x_label}; points: {settings.points}")
    for name in (
        settings.by,
        "law",
        "a [95 %]",
        "b",
        "E0 [95 %]",
        "runs",
        "points",
        "rmse (ln)",
        "AIC",
        "at optimum",
    ):
        table.add_column(name)
    for item in analysis.fits:
        fit = item.fit
        table.add_row(
            item.group,
            fit.law.formula,
            with_interval(item, "a"),
            f"{fit.parameters['b']:.4g}",
            with_interval(item, "E0"),
            str(item.boot.runs),
            str(len(fit.points)),
            f"{fit.rmse:.2g}",
            "-" if fit.aic is None else f"{fit.aic:.1f}",
            f"{fit.starts_at_optimum}/{fit.starts}",
        )
    return table


def _comparison_table(comparisons: Sequence[Comparison]) -> Table:
    table = Table(
        title="differences of exponents, and ratio of the predicted metric at the largest common scale"
    )
    for name in ("law", "first", "second", "a difference [95 %]", "ratio [95 %]", "at scale", "reliable"):
        table.add_column(name)
    for item in comparisons:
        table.add_row(
            item.law,
            item.first,
            item.second,
            f"{item.difference:+.4f}{bounds(item.interval)}",
            f"{item.ratio:.4f}{bounds(item.ratio_interval)}",
            f"{item.scale:.3g}",
            "yes" if item.reliable else "no",
        )
    return table


def _stdout() -> Console:
    # Names of runs and metrics may hold brackets, which are not markup.
    console = Console(markup=False, highlight=False, emoji=False)
    return (
        console if console.is_terminal else Console(markup=False, highlight=False, emoji=False, width=_WIDE)
    )


def _stderr() -> Console:
    return Console(stderr=True, markup=False, highlight=False, emoji=False)


def _print_notices(notices: Sequence[str]) -> None:
    for notice in dict.fromkeys(notices):
        _stderr().print(f"Note: {notice}", soft_wrap=True)


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(json_ready(value), indent=1, allow_nan=False) + "\n")


if __name__ == "__main__":
    main()
