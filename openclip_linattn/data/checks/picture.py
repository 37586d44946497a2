"""A page that shows a check: what is lost, in which shards, and how large images and captions are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from openclip_linattn.data.checks.dataset_report import DatasetReport
from openclip_linattn.data.checks.histograms import CAPTIONS, SIDES, Scale
from openclip_linattn.data.checks.problems import percent
from openclip_linattn.data.reading import local_path, scheme_of
from openclip_linattn.errors import UserError
from openclip_linattn.files import atomic_path

USABLE, LOST, NEUTRAL, ABSENT = "tab:green", "tab:red", "tab:blue", "black"
MAX_TITLE = 110
STRETCHES = 400


def draw_report(report: DatasetReport, path: Path) -> None:
    """Draw the report as a PNG of 1600 x 1000 pixels; raises UserError where there is no shard to draw."""
    if not report.shards:
        raise UserError(f"{report.source} has no checked shard to draw.")
    figure = Figure(figsize=(16, 10), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    # A dollar sign would start matplotlib's mathematics.
    figure.suptitle(_title(report).replace("$", r"\$"), fontsize=14)
    (reasons, shards), (sides, captions) = figure.subplots(2, 2)
    _draw_reasons(reasons, report)
    _draw_shards(shards, report)
    _draw_histogram(sides, SIDES, SIDES.total(shard.sides for shard in report.shards))
    _draw_histogram(captions, CAPTIONS, CAPTIONS.total(shard.captions for shard in report.shards))
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png")


def _title(report: DatasetReport) -> str:
    source = report.source.encode(errors="backslashreplace").decode()
    if len(source) > MAX_TITLE:
        source = f"...{source[-MAX_TITLE:]}"
    counts = f"{report.usable:,} of {report.samples:,} samples usable"
    return f"{source}\n{counts}, {len(report.shards):,} of {report.total_shards:,} shards checked"


def _draw_reasons(axes: Axes, report: DatasetReport) -> None:
    lost = sorted(report.lost.items(), key=lambda item: -item[1])
    names = ["usable", *(reason for reason, _ in lost)]
    counts = [report.usable, *(count for _, count in lost)]
    bars = axes.barh(names, counts, color=[USABLE] + [LOST] * len(lost))
    whole = max(report.samples, 1)
    axes.bar_label(bars, [f"{count:,} ({percent(count, whole)})" for count in counts], padding=4)
    axes.invert_yaxis()
    axes.margins(x=0.4)
    axes.set(title="Samples by what becomes of them", xlabel="samples")
    _thousands(axes, "x")


def _draw_shards(axes: Axes, report: DatasetReport) -> None:
    """Samples and usable ones by shard; of many shards the mean of each stretch, and the range within it."""
    places, absent, unit = _places(report)
    usable = np.array([shard.usable for shard in report.shards])
    samples = np.array([shard.samples for shard in report.shards])
    stretches = np.array_split(np.arange(len(usable)), min(len(usable), STRETCHES))
    middles = [places[stretch].mean() for stretch in stretches]
    lowest = [usable[stretch].min() for stretch in stretches]
    highest = [usable[stretch].max() for stretch in stretches]
    axes.plot(
        middles, [samples[stretch].mean() for stretch in stretches], ".-", color=NEUTRAL, label="samples"
    )
    axes.plot(middles, [usable[stretch].mean() for stretch in stretches], ".-", color=USABLE, label="usable")
    if len(usable) > len(stretches):
        label = f"least to most usable of {len(stretches[0])} shards"
        axes.fill_between(middles, lowest, highest, color=USABLE, alpha=0.25, linewidth=0, label=label)
    empty = places[usable == 0]
    if len(empty):
        axes.plot(
            empty, np.zeros(len(empty)), "x", color=LOST, label=f"shard with none usable: {len(empty):,}"
        )
    if absent:
        axes.plot(
            absent, [0] * len(absent), "|", ms=12, color=ABSENT, label=f"no such shard: {len(absent):,}"
        )
    axes.set(title="Shards in the order of the source", xlabel=unit, ylabel="samples in the shard")
    top = max(1, samples.max())
    axes.set_ylim(-0.05 * top, 1.25 * top)  # the legend stands above the curves
    axes.legend(loc="upper center", ncols=3, fontsize=9)
    _thousands(axes, "x")
    _thousands(axes, "y")


def _places(report: DatasetReport) -> tuple[NDArray[np.int64], list[int], str]:
    """Where each checked shard and each absent one is drawn, and what the places are.

    They are the numbers in the file names where these grow, so that holes show; else the shards are counted off.
    """
    numbers = [_number(shard.url) for shard in report.shards]
    known = [number for number in numbers if number is not None]
    if len(known) == len(numbers) and all(one < next_ for one, next_ in pairwise(known)):
        absent = {_number(url) for url in (*report.gaps, *report.missing)}
        return (
            np.array(known),
            sorted(number for number in absent if number is not None),
            "number of the shard",
        )
    return np.arange(1, len(numbers) + 1), [], "place among the checked shards"


def _number(url: str) -> int | None:
    stem = local_path(url).stem
    return int(stem) if scheme_of(url) == "local" and stem.isdecimal() and len(stem) < 10 else None


def _draw_histogram(axes: Axes, scale: Scale, counts: Sequence[int]) -> None:
    places = range(len(counts))
    axes.bar(places, counts, width=1, align="edge", color=NEUTRAL, edgecolor="white")
    axes.set_xticks(places, [f"{edge:g}" for edge in scale.edges], fontsize=9)
    axes.set(
        title=f"{scale.name[0].upper()}{scale.name[1:]}, usable samples",
        xlabel=f"{scale.unit} (lower edge of each bin; the last has no upper one)",
        ylabel="samples",
    )
    _thousands(axes, "y")


def _thousands(axes: Axes, which: str) -> None:
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axis.set_major_formatter("{x:,.0f}")
