"""The command that compares groups: verdicts from intervals over runs, costs at equal loss, secondary tests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.table import Table

from openclip_scaling.comparing.compare import Comparison, compare_groups
from openclip_scaling.comparing.comparison_words import (
    CAVEAT,
    SECONDARY_HEADS,
    remarks_of,
    secondary_of,
    secondary_rows,
)
from openclip_scaling.comparing.secondary import equal_slopes_test
from openclip_scaling.errors import UserError
from openclip_scaling.fitting.analysis import Analysis
from openclip_scaling.fitting.selections import selection_named
from openclip_scaling.fitting.settings import Settings
from openclip_scaling.reporting.markdown import bounds, cost_text, scale_text, verdicts
from openclip_scaling.screens.options import with_settings
from openclip_scaling.screens.shared import (
    AsJson,
    Sources,
    analysed,
    print_json,
    print_notices,
    read,
    stdout,
    table_of,
)


@with_settings()
def compare_command(
    sources: Sources,
    settings: Settings,
    levels: Annotated[
        list[float] | None,
        typer.Option(
            "--at-loss",
            help="Metric at which the scales of groups are compared, as it is fitted (accuracies as errors); "
            "repeatable. Without it, the best that both reach.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare every pair of groups: exponents, and the scale that each needs for the same metric."""
    for level in levels or []:
        if not (math.isfinite(level) and level > 0):
            raise UserError(f"--at-loss must be a positive number, not {level:g}.")
    analysis = analysed(read(sources), settings)
    comparisons = [
        item for law in settings.laws for item in compare_groups(analysis.boots(law), levels or ())
    ]
    if not comparisons:
        raise UserError(_too_few_groups(analysis))
    if as_json:
        _print_json(analysis, comparisons)
        return
    stdout().print(_comparison_table(comparisons))
    for text in [*verdicts(comparisons), *remarks_of(comparisons, analysis)]:
        stdout().print(text, soft_wrap=True)
    tests = secondary_of(analysis)
    if tests:
        caption = f"{CAVEAT} AICc: less that of separate laws; below 0 the simpler model is better."
        stdout().print(table_of("secondary tests", SECONDARY_HEADS, secondary_rows(tests), caption))
    print_notices(analysis.remarks)


def _too_few_groups(analysis: Analysis) -> str:
    if len(analysis.points) == 1:
        return f"There is one group only ({analysis.fits[0].group}); a comparison needs two."
    return f"No law could be fitted to two groups, so nothing is compared: {'; '.join(analysis.notices)}"


def _print_json(analysis: Analysis, comparisons: Sequence[Comparison]) -> None:
    print_json(
        {
            "metric": analysis.settings.metric,
            "x": analysis.settings.x,
            "equal_slopes_test": _slopes(analysis),
            "secondary_tests": [item.as_dict() for item in secondary_of(analysis)],
            "comparisons": [item.as_dict() for item in comparisons],
            "sentences": remarks_of(comparisons, analysis),
            "notices": analysis.remarks,
        }
    )


def _slopes(analysis: Analysis) -> dict[str, Any] | None:
    """The test that all groups have one exponent under the power law, where there are points enough for it."""
    select = selection_named(analysis.settings.points)
    try:
        return equal_slopes_test({name: select(points) for name, points in analysis.points.items()}).as_dict()
    except UserError:
        return None


def _comparison_table(comparisons: Sequence[Comparison]) -> Table:
    heads = (
        "law",
        "first",
        "second",
        "exponent",
        "difference [95 %]",
        "ratio [95 %]",
        "at scale",
        "scale for equal metric [95 %]",
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
            cost_text(item),
            "yes" if item.reliable else "no",
        ]
        for item in comparisons
    ]
    caption = (
        "difference: of exponents, first minus second; ratio: of the predicted metric, first over second, at the "
        "largest common scale; scale for equal metric: what the first needs over what the second needs"
    )
    return table_of("groups compared", heads, rows, caption)
