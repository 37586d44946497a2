"""Fits, comparisons and cells of the report as markdown, and the words for intervals that every screen uses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from openclip_scaling.analysis import Analysis, GroupFit
from openclip_scaling.compare import Comparison


def summary(analyses: Sequence[Analysis], names: Sequence[str]) -> str:
    """The exponents of the power law, one row per metric and one column per group, as markdown."""
    if not analyses:
        return ""
    tables = {analysis.settings.metric: (analysis, analysis.by_law("power")) for analysis in analyses}
    groups = list(dict.fromkeys(group for _, fits in tables.values() for group in fits))
    lines = [
        "## Exponents at a glance",
        "",
        "Power law, E = b C^a; every metric under both laws is below.",
        "",
        f"| metric | {' | '.join(escaped(group) for group in groups)} |",
        "|" + "---|" * (len(groups) + 1),
    ]
    for name in names:
        if name in tables:
            analysis, fits = tables[name]
            cells = [with_interval(fits[group], "a") if group in fits else "" for group in groups]
            lines.append("| " + " | ".join([escaped(analysis.metric.label), *cells]) + " |")
    return "\n".join(lines)


def verdicts(comparisons: Sequence[Comparison]) -> list[str]:
    """The sentences of the comparisons, each once with the laws that it holds under."""
    where: dict[str, list[str]] = {}
    for item in comparisons:
        where.setdefault(item.verdict, []).append(item.law)
    return [f"{' and '.join(laws)} law: {text}" for text, laws in where.items()]


def comparisons_table(comparisons: Sequence[Comparison], analysis: Analysis) -> str:
    """Differences of exponents and ratios of the metric for every pair, with verdicts, as markdown."""
    if not comparisons:
        return ""
    rows = [
        "Differences, first minus second; ratio of the fitted metric, first over second, at the largest "
        f"{analysis.x_label} that both reached:",
        "",
        "| first, second | law | difference of a [95 %] | ratio [95 %] | at | verdict |",
        "|---|---|---|---|---|---|",
    ]
    for item in comparisons:
        cells = [
            f"{item.first}, {item.second}",
            item.law,
            f"{item.difference:+.4f}{bounds(item.interval)}",
            f"{item.ratio:.3f}{bounds(item.ratio_interval, digits=3)}",
            f"{item.scale:.3g}",
            item.verdict.removeprefix(f"{item.first} and {item.second}: "),
        ]
        rows.append("| " + " | ".join(map(escaped, cells)) + " |")
    return "\n".join(rows)


def bounds(interval: tuple[float, float] | None, digits: int = 4) -> str:
    """An interval behind its estimate, or the word that there is none."""
    if interval is None:
        return " (no interval)"
    return f" [{interval[0]:.{digits}f}, {interval[1]:.{digits}f}]"


def fits_table(analysis: Analysis) -> str:
    """The fits as a markdown table."""
    names = (analysis.settings.by, "law", "a [95 %]", "b", "E0 [95 %]", "runs", "points", "AIC", "at optimum")
    head, rule = f"| {' | '.join(names)} |", "|" + "---|" * len(names)
    rows = []
    for item in analysis.fits:
        fit = item.fit
        cells = [
            escaped(item.group), fit.law.formula, with_interval(item, "a"), f"{fit.parameters['b']:.4g}",
            with_interval(item, "E0"), str(item.boot.runs), str(len(fit.points)),
            "" if fit.aic is None else f"{fit.aic:.1f}", f"{fit.starts_at_optimum}/{fit.starts}",
        ]  # fmt: skip
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join([head, rule, *rows])


def escaped(text: str) -> str:
    """Text that cannot end its cell of a table."""
    return text.replace("|", "\\|")


def with_interval(item: GroupFit, name: str) -> str:
    """A parameter with its interval, or with the word that it is not identified."""
    if name not in item.fit.parameters:
        return ""
    value = f"{item.fit.parameters[name]:.4f}"
    interval = item.boot.intervals.get(name)
    if interval is None:
        return f"{value} (no interval)"
    text = f"{value} [{interval.low:.4f}, {interval.high:.4f}]"
    return text if interval.identified else f"{text} not identified"


def cell(value: Any) -> str:
    """A number or text as a cell of a table; empty for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        return f"{value:,.0f}" if float(value).is_integer() and abs(value) < 1e9 else f"{value:.4g}"
    return escaped(str(value))
