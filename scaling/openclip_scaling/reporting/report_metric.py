"""The chapter of a report on one metric: fits, pictures, comparisons, and where it is lowest at equal compute."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd

from openclip_scaling.comparing.compare import Comparison, compare_groups
from openclip_scaling.errors import UserError
from openclip_scaling.fitting.analysis import Analysis
from openclip_scaling.fitting.metrics import axis_label
from openclip_scaling.isoflops.isoflop import SIZE, IsoFlopView, isoflop
from openclip_scaling.pictures import interactive_isoflop
from openclip_scaling.pictures.interactive import scaling
from openclip_scaling.pictures.isoflop_plot import isoflop_figure
from openclip_scaling.pictures.plot import scaling_figure
from openclip_scaling.reporting.markdown import comparisons_table, escaped, fits_table
from openclip_scaling.reporting.report_blocks import Block, Picture
from openclip_scaling.reporting.sweep_table import sweep_table

_UNCLEAR = re.compile(r"the exponents? of .+ (?:is|are) not identified")


@dataclass(frozen=True)
class Chapter:
    """The blocks of one metric, its findings as sentences, and what fits.json has of it."""

    title: str
    blocks: list[Block]
    findings: list[str]
    stored: dict[str, Any]


def metric_chapter(analysis: Analysis, frame: pd.DataFrame, stem: str) -> Chapter:
    """Everything on one metric; frame is the table of checkpoints, stem begins the names of the pictures."""
    settings = analysis.settings
    comparisons = [item for law in settings.laws for item in compare_groups(analysis.boots(law))]
    equal_compute, minima = _isoflop_part(analysis, frame, stem)
    blocks = [
        f"## {analysis.metric.label}",
        fits_table(analysis),
        *_pictures(analysis, frame, stem),
        comparisons_table(comparisons, analysis),
        sweep_table(frame, settings),
        _listed("To keep in mind", analysis.remarks),
        *equal_compute,
    ]
    stored = {
        "metric": settings.metric,
        "x": settings.x,
        "fits": [item.as_dict() for item in analysis.fits],
        "comparisons": [item.as_dict() for item in comparisons],
        "isoflop": minima,
        "notices": analysis.notices,
    }
    return Chapter(analysis.metric.label, blocks, findings(comparisons), stored)


def unfitted_chapter(metric: str, title: str, reason: str, sweep: str = "") -> Chapter:
    """The chapter of a metric that cannot be fitted, with its table of learning rates where there is one."""
    text = f"Not fitted: {reason}"
    return Chapter(title, [f"## {title}", text, sweep], [text], {"metric": metric, "error": reason})


def findings(comparisons: Iterable[Comparison]) -> list[str]:
    """The verdicts as sentences, pairs with one verdict under one law together, and laws that agree on them too.

    Which exponents are not identified is in the table of fits; here it would keep the pairs apart.
    """
    pairs: dict[tuple[str, str], list[str]] = {}
    for item in comparisons:
        pair = f"{item.first} and {item.second}"
        words = _UNCLEAR.sub("an exponent is not identified", item.verdict.removeprefix(f"{pair}: "))
        pairs.setdefault((item.law, words), []).append(pair)
    laws: dict[tuple[str, str], list[str]] = {}
    for (law, words), names in pairs.items():
        laws.setdefault(("; ".join(names), words), []).append(law)
    return [f"{names} ({' and '.join(found)} law): {words}" for (names, words), found in laws.items()]


def _pictures(analysis: Analysis, frame: pd.DataFrame, stem: str) -> list[Picture]:
    return [
        Picture(
            f"{analysis.metric.label} against {analysis.x_label}, {law} law",
            f"{stem}-{law}.png",
            partial(scaling_figure, analysis, law),
            partial(scaling, analysis, law, frame),
        )
        for law in analysis.settings.laws
        if analysis.by_law(law)
    ]


def _isoflop_part(
    analysis: Analysis, frame: pd.DataFrame, stem: str
) -> tuple[list[Block], list[dict[str, Any]]]:
    """The picture at equal compute with the table of its minima, and these for fits.json."""
    if not {"train_flop", SIZE} <= set(frame.columns):
        return [], []  # a table of another study, whose model sizes are not known
    try:
        view = isoflop(frame, analysis.settings)
    except UserError as error:
        return [f"Not drawn against model size: {error}"], []
    picture = Picture(
        f"{analysis.metric.label} against model size at equal training compute; stars: minima with the "
        "95 % intervals of their sizes",
        f"{stem}-isoflop.png",
        partial(isoflop_figure, view),
        partial(interactive_isoflop.isoflop, view),
    )
    return [picture, _minima_table(view, analysis.settings.by)], [p.as_dict() for p in view.profiles]


def _minima_table(view: IsoFlopView, by: str) -> str:
    heads = [by, *(f"{flop:.3g} FLOP" for flop in view.budgets)]
    rows = [
        f"The {axis_label(view.size)} at which the {view.curve} through the runs at one training compute is lowest, "
        "[95 % interval] by the t test of its slope; a run between two checkpoints is interpolated:",
        "",
        f"| {' | '.join(map(escaped, heads))} |",
        "|" + "---|" * len(heads),
    ]
    for group in view.groups:
        own = {p.flop: p.minimum.label if p.minimum else p.remark for p in view.profiles if p.group == group}
        cells = [escaped(group), *(own.get(flop, "fewer than three sizes") for flop in view.budgets)]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _listed(title: str, texts: Sequence[str]) -> str:
    return "\n".join([f"{title}:", "", *(f"- {text}" for text in texts)]) if texts else ""
