"""The command that extrapolates: at given scales, for held-out runs, or to the best use of a budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from openclip_scaling.comparing.runs_needed import halving_sentences
from openclip_scaling.errors import UserError
from openclip_scaling.fitting.analysis import Analysis
from openclip_scaling.fitting.holdout import held_out
from openclip_scaling.fitting.optimum import best_split, check_budgets
from openclip_scaling.fitting.settings import Settings
from openclip_scaling.reporting.as_json import predictions
from openclip_scaling.reporting.markdown import bounds, scale_text
from openclip_scaling.screens.options import with_settings
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

_FACTORS = {"gmac_per_pair": 6e9}  # FLOP of training per GMAC of the forward pass and sample


@with_settings()
def predict_command(
    sources: Sources,
    settings: Settings,
    at: Annotated[
        list[str] | None,
        typer.Option(
            "--at", help="Scale, in the unit of --x (two with a comma for two columns); repeatable."
        ),
    ] = None,
    hold_out: Annotated[
        int, typer.Option("--hold-out", help="Fit without the N largest runs of every group, and score them.")
    ] = 0,
    budget: Annotated[
        list[float] | None,
        typer.Option("--budget", help="Training FLOP to split between the two columns of --x; repeatable."),
    ] = None,
    factor: Annotated[
        float | None,
        typer.Option(
            "--flop-factor",
            help="FLOP = factor x first column x second column; 6e9 for gmac_per_pair, else to be given.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Predict the metric at scales or for held-out runs, or find the best split of a budget; all with intervals."""
    if sum((bool(at), hold_out != 0, bool(budget))) != 1:
        raise UserError("Give one of --at, --hold-out and --budget.")
    if at:
        _at_scales(sources, settings, at, as_json)
    elif budget:
        _at_budgets(sources, settings, budget, factor, as_json)
    else:
        _at_held_out(sources, settings, hold_out, as_json)


def _at_scales(sources: Sources, settings: Settings, at: Sequence[str], as_json: bool) -> None:
    scales = [_scale(text, len(settings.scales)) for text in at]
    analysis = analysed(read(sources), settings)
    rows = predictions(analysis, scales)
    if as_json:
        _print_rows(settings, "predictions", rows, analysis.remarks, _to_halve(analysis))
        return
    heads = [settings.by, "law", "scale", "predicted [95 %]", "decades beyond the points"]
    cells = [
        [row["group"], row["law"], scale_text(_numbers(row["scale"])),
         f"{row['predicted']:.4f}{bounds(row['interval95'])}", f"{row['decades_beyond']:.2f}"]
        for row in rows
    ]  # fmt: skip
    stdout().print(table_of(f"{analysis.metric.label} at {analysis.x_label}", heads, cells))
    _print_sentences(_to_halve(analysis))
    print_notices(analysis.remarks)


def _at_held_out(sources: Sources, settings: Settings, count: int, as_json: bool) -> None:
    with stderr().status("fitting"):
        rows, notices = held_out(read(sources).checkpoints, settings, count)
    if as_json:
        _print_rows(settings, "held_out", rows, notices)
        return
    heads = [settings.by, "law", "run", "scale", "observed", "predicted [95 %]", "error", "in interval"]
    cells = [
        [row["group"], row["law"], row["run"], scale_text(_numbers(row["scale"])), f"{row['observed']:.4f}",
         f"{row['predicted']:.4f}{bounds(row['interval95'])}", f"{row['relative_error']:+.2%}", _inside(row["inside"])]
        for row in rows
    ]  # fmt: skip
    title = "the last point of the largest runs, predicted from the others"
    caption = (
        "error: predicted over observed, less 1; the interval is of the curve, without the scatter of one run"
    )
    stdout().print(table_of(title, heads, cells, caption))
    print_notices(notices)


def _at_budgets(
    sources: Sources, settings: Settings, budgets: Sequence[float], factor: float | None, as_json: bool
) -> None:
    if len(settings.scales) != 2:
        raise UserError(
            "--budget is split between two columns of --x; use --law chinchilla --x gmac_per_pair,samples_seen, say."
        )
    factor = factor if factor is not None else _FACTORS.get(settings.scales[0])
    if factor is None:
        raise UserError(
            f"What a unit of {settings.scales[0]} costs is not known; give --flop-factor, the training FLOP per unit "
            "and sample (6 for the parameters of a language model; a CLIP tower needs its own number)."
        )
    check_budgets(budgets, factor)
    analysis = analysed(read(sources), settings)
    rows, failures = [], []
    for item in analysis.fits:
        name = {"group": item.group, "law": item.fit.law.name}
        try:
            rows += [{**name, **best_split(item.boot, budget, factor)} for budget in budgets]
        except UserError as error:
            failures.append(f"{item.group} ({item.fit.law.name}): {error}")
    if not rows:
        raise UserError(" ".join(failures))
    if as_json:
        _print_rows(settings, "splits", rows, [*analysis.remarks, *failures], _to_halve(analysis))
        return
    first, second = settings.scales
    heads = [settings.by, "law", "FLOP", f"best {first} [95 %]", f"best {second} [95 %]", "predicted [95 %]"]
    cells = [
        [row["group"], row["law"], f"{row['budget']:.3g}", _open_text(row, "first"), _open_text(row, "second"),
         f"{row['predicted']:.4f}{bounds(row['predicted_interval95'])}"]
        for row in rows
    ]  # fmt: skip
    stdout().print(table_of("the best split of a budget", heads, cells))
    _print_sentences(_to_halve(analysis))
    print_notices([*analysis.remarks, *failures])


def _open_text(row: dict[str, Any], name: str) -> str:
    interval = row[f"{name}_interval95"]
    text = "(no interval)" if interval is None else f"[{interval[0]:.3g}, {interval[1]:.3g}]"
    return f"{row[name]:.4g} {text}"


def _inside(value: bool | None) -> str:
    return "-" if value is None else "yes" if value else "no"


def _numbers(scale: float | list[float]) -> list[float]:
    return scale if isinstance(scale, list) else [scale]


def _scale(text: str, count: int) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if len(values) != count or not all(math.isfinite(value) and value > 0 for value in values):
        wanted = "a positive number" if count == 1 else f"{count} positive numbers with a comma between"
        raise UserError(f"--at {text} must be {wanted}, in the unit of --x.")
    return values


def _to_halve(analysis: Analysis) -> list[str]:
    return halving_sentences([analysis.boots(law) for law in analysis.settings.laws])


def _print_sentences(sentences: Sequence[str]) -> None:
    for text in sentences:
        stdout().print(text, soft_wrap=True)


def _print_rows(
    settings: Settings,
    name: str,
    rows: Sequence[dict[str, Any]],
    notices: Sequence[str],
    sentences: Sequence[str] = (),
) -> None:
    print_json(
        {
            "metric": settings.metric,
            "x": settings.x,
            name: rows,
            "sentences": sentences,
            "notices": notices,
        }
    )
