"""Fits, comparisons and cells of the report as markdown, and the words for intervals that every screen uses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from openclip_scaling.comparing.compare import Comparison
from openclip_scaling.comparing.comparison_words import (
    CAVEAT,
    SECONDARY_HEADS,
    remarks_of,
    secondary_of,
    secondary_rows,
)
from openclip_scaling.fitting.analysis import Analysis, GroupFit

# What the heads of a table of fits mean, and the words in it.
READING = (
    "Rmse (ln): root mean square of ln E less its fit. AIC compares laws on the same points (lower is better; "
    "checkpoints of one run are not independent, so small differences mean nothing). At optimum: how many starts of "
    "the optimiser reached the best fit. Not identified: the interval of an exponent reaches 0 or is wider than twice "
    "the exponent, that of a floor covers half of the lowest observed value or more, or that of another parameter "
    "reaches 0 or spans a factor of 100. In simulations with 9 runs and more, intervals contain the truth in 93 to "
    "97 % of cases. Wider than that are exponents beside a floor that is hardly seen (98 to 99 %: a truth next to a "
    "bound is missed on one side only) and their differences (99 % and more), and with 9 runs differences of exponents "
    "above other floors (98 %: of two fits the steeper is the less certain one) and between frontiers (98 %)."
)


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
    """Differences, ratios and verdicts for every pair, what they mean, and secondary tests, as markdown."""
    if not comparisons:
        return ""
    rows = [
        "Differences, first minus second; ratio of the fitted metric, first over second, at the largest "
        f"{analysis.x_label} that both reached; equal metric: the {analysis.x_label} that the first needs for the best "
        "value that both reach, over what the second needs:",
        "",
        "| first, second | law | exponent | difference [95 %] | ratio [95 %] | at | equal metric [95 %] | verdict |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for item in comparisons:
        cells = [
            f"{item.first}, {item.second}",
            item.law,
            item.exponent,
            f"{item.difference:+.4f}{bounds(item.interval)}",
            f"{item.ratio:.3f}{bounds(item.ratio_interval, digits=3)}",
            scale_text(item.scale),
            cost_text(item),
            item.verdict.removeprefix(f"{item.first} and {item.second}: "),
        ]
        rows.append("| " + " | ".join(map(escaped, cells)) + " |")
    rows += ["", *(f"- {text}" for text in remarks_of(comparisons, analysis))]
    tests = secondary_of(analysis)
    if tests:
        rows += ["", f"{CAVEAT} AICc is less that of separate laws: below 0 the simpler model is better.", ""]
        rows += ["| " + " | ".join(SECONDARY_HEADS) + " |", "|" + "---|" * len(SECONDARY_HEADS)]
        rows += ["| " + " | ".join(map(escaped, cells)) + " |" for cells in secondary_rows(tests)]
    return "\n".join(rows)


def cost_text(item: Comparison) -> str:
    """The ratio of the scales that two groups need for the same metric, at the first level."""
    if not item.equal_losses:
        return "-"
    at = item.equal_losses[0]
    if at.ratio is None:
        return f"not reached ({at.level:.4g})"
    limits = " (no interval)" if at.interval is None else f" [{at.interval[0]:.3g}, {at.interval[1]:.3g}]"
    return f"{at.ratio:.3g}{limits} for {at.level:.4g}"


def scale_text(scale: Sequence[float]) -> str:
    """A scale, or two, in three digits."""
    return ", ".join(f"{value:.3g}" for value in scale)


def bounds(interval: tuple[float, float] | None, digits: int = 4) -> str:
    """An interval behind its estimate, or the word that there is none."""
    if interval is None:
        return " (no interval)"
    return f" [{interval[0]:.{digits}f}, {interval[1]:.{digits}f}]"


def fits_rows(analysis: Analysis) -> tuple[list[str], list[list[str]]]:
    """Heads and cells of the table of fits: one column for every parameter of any of the laws."""
    roles = {role.name: role for item in analysis.fits for role in item.fit.law.roles}
    shown = sorted(roles.values(), key=lambda role: _ORDER.index(role.kind))
    heads = [role.name if role.kind == "amplitude" else f"{role.name} [95 %]" for role in shown]
    rows = []
    for item in analysis.fits:
        fit = item.fit
        rows.append(
            [item.group, fit.law.formula, *(with_interval(item, role.name) for role in shown), str(item.boot.runs),
             str(len(fit.points)), f"{fit.rmse:.2g}", "-" if fit.aic is None else f"{fit.aic:.1f}",
             f"{fit.starts_at_optimum}/{fit.starts}"]
        )  # fmt: skip
    return [analysis.settings.by, "law", *heads, "runs", "points", "rmse (ln)", "AIC", "at optimum"], rows


_ORDER = ("exponent", "amplitude", "shift", "position", "width", "floor")


def fits_table(analysis: Analysis) -> str:
    """The fits as a markdown table."""
    heads, rows = fits_rows(analysis)
    head, rule = f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)
    return "\n".join([head, rule, *("| " + " | ".join(map(escaped, row)) + " |" for row in rows)])


def escaped(text: str) -> str:
    """Text that cannot end its cell of a table."""
    return text.replace("|", "\\|")


def with_interval(item: GroupFit, name: str) -> str:
    """A parameter with its interval, or with the word that it is not identified; an amplitude has none."""
    role = next((role for role in item.fit.law.roles if role.name == name), None)
    if role is None:
        return ""
    style = ".4f" if role.kind in ("exponent", "floor") else ".4g"
    value = f"{item.fit.parameters[name]:{style}}"
    if role.kind == "amplitude":
        return value
    interval = item.boot.intervals.get(name)
    if interval is None:
        return f"{value} (no interval)"
    text = f"{value} [{interval.low:{style}}, {interval.high:{style}}]"
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
