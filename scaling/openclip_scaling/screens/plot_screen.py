"""The command that draws figures into files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from matplotlib.figure import Figure

from openclip_scaling.errors import UserError
from openclip_scaling.fitting.analysis import laws_of
from openclip_scaling.fitting.settings import Settings
from openclip_scaling.isoflops.isoflop import SIZE, isoflop, law_isoflop
from openclip_scaling.pictures.curves_plot import curves_figure
from openclip_scaling.pictures.isoflop_plot import isoflop_figure
from openclip_scaling.pictures.plot import FORMATS, save_figure, scaling_figure
from openclip_scaling.pictures.surface_plot import surface_figure
from openclip_scaling.reading.runs import Collection
from openclip_scaling.reporting.as_json import slug
from openclip_scaling.screens.options import with_settings
from openclip_scaling.screens.shared import AsJson, Sources, analysed, print_json, print_notices, read, stdout

_Drawn = tuple[dict[str, Figure], list[str]]  # figures by name, and notices


@with_settings()
def plot_command(
    sources: Sources,
    settings: Settings,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the figures.")] = Path("figures"),
    formats: Annotated[
        list[str] | None, typer.Option("--format", help="png, svg or pdf; repeatable.")
    ] = None,
    equal_compute: Annotated[
        bool,
        typer.Option(
            "--isoflop",
            help="Draw the metric against model size at equal training compute instead, with parabolas, or with a "
            "fitted law (--law chinchilla --x gmac_per_pair,samples_seen).",
        ),
    ] = False,
    size: Annotated[
        str, typer.Option("--size", help="Column of the model size in --isoflop, such as parameters.")
    ] = SIZE,
    budgets: Annotated[
        list[float] | None,
        typer.Option(
            "--budget", help="Training FLOP of a curve of --isoflop; repeatable. Without it, four are chosen."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Draw metric against scale with fits, bands and residuals, and the training curves; or curves of equal compute."""
    for name in formats or []:
        if name not in FORMATS:
            raise UserError(f"--format {name} is unknown; use {', '.join(FORMATS)}.")
    if not equal_compute and (budgets or size != SIZE):
        raise UserError("--budget and --size belong to --isoflop.")
    collection = read(sources)
    if equal_compute:
        figures, notices = _equal_compute(collection, settings, size, budgets or [])
    else:
        figures, notices = _fits_and_curves(collection, settings)
    paths = [output / f"{name}.{suffix}" for name in figures for suffix in formats or ["png"]]
    for path in paths:
        save_figure(figures[path.stem], path)
    if as_json:
        print_json({"files": [str(path) for path in paths], "notices": notices})
        return
    for path in paths:
        stdout().print(str(path), soft_wrap=True)
    print_notices(notices)


def _fits_and_curves(collection: Collection, settings: Settings) -> _Drawn:
    analysis = analysed(collection, settings)
    figure_of = scaling_figure if len(settings.scales) == 1 else surface_figure
    figures = {f"{slug(settings.metric)}-{law}": figure_of(analysis, law)
               for law in settings.laws if analysis.by_law(law)}  # fmt: skip
    if not collection.curves.empty and not collection.runs.empty:
        figures["training-loss"] = curves_figure(collection.curves, collection.runs)
    return figures, analysis.notices


def _equal_compute(collection: Collection, settings: Settings, size: str, budgets: Sequence[float]) -> _Drawn:
    name = f"{slug(settings.metric)}-isoflop"
    laws_of(settings)  # a law of two scales would be passed over in silence without them
    if len(settings.scales) == 1:
        view = isoflop(collection.checkpoints, settings, size, budgets)
        return {name: isoflop_figure(view)}, [*view.notices, *view.sentences]
    if size != SIZE:
        raise UserError(
            f"--size {size} and a law of two scales exclude each other: its first scale is the size."
        )
    analysis = analysed(collection, settings)
    views = {law: law_isoflop(analysis, law, budgets) for law in settings.laws}
    figures = {f"{name}-{law}": isoflop_figure(view) for law, view in views.items()}
    minima = [f"{law} law, {sentence}" for law, view in views.items() for sentence in view.sentences]
    return figures, [*analysis.remarks, *minima]
