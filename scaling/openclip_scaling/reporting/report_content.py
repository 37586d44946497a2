"""What a report says, before it is a file: the verdicts first, then a chapter on every metric, curves and runs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from openclip_scaling.errors import UserError
from openclip_scaling.fitting.analysis import Analysis, Progress, Settings, analyse
from openclip_scaling.fitting.loss import Loss
from openclip_scaling.fitting.metrics import axis_label, metric_columns, metric_named, numbers, value_label
from openclip_scaling.fitting.uncertainty import MINIMUM_RUNS
from openclip_scaling.forms.laws import BOTH
from openclip_scaling.pictures.curves_plot import curves_figure, metric_figure
from openclip_scaling.pictures.interactive_curves import loss_curves, metric_curves
from openclip_scaling.reading.runs import Collection, grouped
from openclip_scaling.reporting.as_json import records, slugs
from openclip_scaling.reporting.markdown import READING, cell, summary
from openclip_scaling.reporting.report_blocks import Block, Picture
from openclip_scaling.reporting.report_metric import Chapter, metric_chapter, unfitted_chapter
from openclip_scaling.reporting.sweep_table import sweep_table

_DEFAULT_METRICS = re.compile(r"(^val_loss|^train_loss|top-?1)$")


@dataclass(frozen=True)
class Report:
    """blocks in their order, text as markdown; stored is the content of fits.json."""

    blocks: list[Block]
    stored: list[dict[str, Any]]

    @property
    def unfitted(self) -> dict[str, str]:
        """The metrics that could not be fitted, each with the reason."""
        return {str(item["metric"]): str(item["error"]) for item in self.stored if "error" in item}


def default_metrics(collection: Collection) -> list[str]:
    """Losses and top-1 accuracies that the table has."""
    return [name for name in metric_columns(collection.checkpoints) if _DEFAULT_METRICS.search(name)]


def content(
    collection: Collection,
    metrics: Sequence[str] | None = None,
    settings: Settings | None = None,
    progress: Progress | None = None,
) -> Report:
    """Fit every metric under both laws, as verdicts can depend on the form; without metrics the default ones.

    A metric that cannot be fitted is named with the reason. Raises UserError where there is no metric at all, or the
    table has no such column.
    """
    settings = settings or Settings()
    names = list(dict.fromkeys(metrics or default_metrics(collection)))
    if not names:
        raise UserError("The runs have neither a loss nor a top-1 accuracy; name a column with --metric.")
    for name in names:
        # A column that is not there is a wrong name, and no metric that cannot be fitted.
        numbers(collection.checkpoints, metric_named(name).column)
    stems = slugs([*names, *default_metrics(collection)])
    found: list[Analysis] = []
    chapters: list[Chapter] = []
    for name in names:
        if progress:
            progress(name)
        try:
            analysis = analyse(collection.checkpoints, replace(settings, metric=name, laws=BOTH))
        except UserError as error:
            sweep = sweep_table(collection.checkpoints, replace(settings, metric=name))
            chapters.append(unfitted_chapter(name, metric_named(name).label, str(error), sweep))
            continue
        found.append(analysis)
        chapters.append(metric_chapter(analysis, collection.checkpoints, stems[name]))
    blocks = [
        _head(collection, settings, found),
        _verdict(chapters),
        summary(found, names),
        *(block for chapter in chapters for block in chapter.blocks),
        *_curves_chapter(collection, stems),
        _notices_chapter(collection),
        _runs_chapter(collection),
        _reading(settings),
    ]
    return Report([block for block in blocks if block], [chapter.stored for chapter in chapters])


def _head(collection: Collection, settings: Settings, analyses: Sequence[Analysis]) -> str:
    frame = collection.checkpoints
    runs = frame["run"].nunique() if "run" in frame.columns else len(frame)
    lines = [
        "# Scaling report",
        f"{len(frame)} checkpoints of {runs} runs; scale: {axis_label(settings.x)}. `a` is the exponent of a law: "
        "the metric, less its floor E0 where the law has one, goes as scale to the power `a`, so the more negative, "
        "the faster it falls. In brackets: 95 % interval.",
    ]
    counts: dict[str, int] = {}
    for item in (item for analysis in analyses for item in analysis.fits):
        counts[item.group] = max(item.boot.runs, counts.get(item.group, 0))
    few = {name: count for name, count in sorted(counts.items()) if count < MINIMUM_RUNS}
    if few:
        listed = ", ".join(f"{name}: {count}" for name, count in few.items())
        lines.append(
            f"**Intervals are not reliable with fewer than {MINIMUM_RUNS} runs per {settings.by}** "
            f"({listed}). Read the verdicts as descriptions of these runs."
        )
    return "\n\n".join(lines)


def _verdict(chapters: Sequence[Chapter]) -> str:
    """What was found on every metric, before all numbers; empty where nothing was compared."""
    parts = [
        "\n".join([f"**{chapter.title}**", "", *(f"- {text}" for text in chapter.findings)])
        for chapter in chapters
        if chapter.findings
    ]
    return "\n\n".join(["## Verdict", *parts]) if parts else ""


def _reading(settings: Settings) -> str:
    return (
        "## How the numbers were made\n\n"
        f"Fits by {Loss(settings.delta, settings.residuals).name}, points: {settings.points}. Intervals are t "
        "intervals over whole runs: the jackknife's standard error, and degrees of freedom runs less two. "
        f"Where points are selected by their values they take in the middle 95 % of {settings.draws} resamples of the "
        f"runs, and where a floor E0 is held at a bound the profile of the fit over it. {READING} Training FLOP = "
        "3 x 2 x forward MAC x samples seen."
    )


def _curves_chapter(collection: Collection, stems: Mapping[str, str]) -> list[Block]:
    frame = collection.checkpoints
    blocks: list[Block] = []
    if not collection.curves.empty and not collection.runs.empty:
        blocks.append(
            Picture(
                "Training loss of every run",
                "training-loss.png",
                partial(curves_figure, collection.curves, collection.runs),
                partial(loss_curves, collection.curves, collection.runs),
            )
        )
    drawable = {"run", "attention", "samples_seen"} <= set(frame.columns)
    names = [name for name in default_metrics(collection) if name != "train_loss"] if drawable else []
    blocks += [
        Picture(
            f"{value_label(name)} of every checkpoint",
            f"{stems[name]}-curves.png",
            partial(metric_figure, frame, name),
            partial(metric_curves, frame, name),
        )
        for name in names
    ]
    return ["## Learning curves", *blocks] if blocks else []


def _notices_chapter(collection: Collection) -> str:
    texts = [f"- {text}" for text in grouped(collection.notices)]
    return "\n".join(["## What was repaired, assumed or left out", "", *texts]) if texts else ""


_RUN_TABLE = {
    "run": "run", "model": "model", "attention": "attention", "parameters": "parameters",
    "gmac_per_pair": "GMAC per pair", "batch": "batch", "samples_seen": "samples seen",
    "unique_samples_bound": "different samples, at most", "train_flop": "training FLOP", "hours": "hours",
    "train_loss": "training loss", "val_loss": "validation loss", "diverged": "diverged",
}  # fmt: skip


def _runs_chapter(collection: Collection) -> str:
    frame = collection.runs
    columns = [column for column in _RUN_TABLE if column in frame.columns]
    if not columns:
        return ""
    head = "| " + " | ".join(_RUN_TABLE[column] for column in columns) + " |"
    rows = ["| " + " | ".join(cell(row[column]) for column in columns) + " |" for row in records(frame)]
    return "\n".join(["## Runs", "", head, "|" + "---|" * len(columns), *rows])
