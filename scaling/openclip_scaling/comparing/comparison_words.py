"""What a comparison says beside its verdict, in sentences and rows: equal loss, secondary tests, forms, more runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

from openclip_scaling.comparing.compare import Comparison
from openclip_scaling.comparing.equal_loss import EqualLoss
from openclip_scaling.comparing.runs_needed import halving_sentences
from openclip_scaling.comparing.secondary import FTest, SecondaryTests, fit_aicc, secondary_tests
from openclip_scaling.errors import UserError
from openclip_scaling.fitting.analysis import Analysis
from openclip_scaling.fitting.selections import selection_named
from openclip_scaling.forms.laws import BOTH, law_named

CAVEAT = (
    "Secondary tests: least squares of ln E with all points taken as independent. Checkpoints of one run and points "
    "selected for being low are not, so that p values are too small and AICc favours separate laws; the verdict is "
    "that of the intervals over runs."
)
_SCALES = {
    "train_flop": "training compute",
    "samples_seen": "samples",
    "gpu_hours": "GPU-hours",
    "hours": "hours of wall-clock time",
}
_METRICS = {"val_loss": "a validation loss of {} nats", "train_loss": "a training loss of {} nats"}
_WORTH_SAYING = 0.05  # decades outside of the points


def remarks_of(comparisons: Sequence[Comparison], analysis: Analysis) -> list[str]:
    """Every sentence beside the verdicts, in the order of reading."""
    return [
        *equal_loss_sentences(comparisons, analysis),
        *_disagreements(comparisons),
        *_forms(analysis),
        *halving_sentences([analysis.boots(law) for law in analysis.settings.laws]),
    ]


def equal_loss_sentences(comparisons: Sequence[Comparison], analysis: Analysis) -> list[str]:
    """How much more scale one group needs than the other, for every pair, law and level."""
    found = [_needs(item, at, analysis) for item in comparisons for at in item.equal_losses]
    return list(dict.fromkeys(found))


def _needs(item: Comparison, at: EqualLoss, analysis: Analysis) -> str:
    level = _METRICS.get(analysis.settings.metric, f"{analysis.metric.label} of {{}}").format(
        f"{at.level:.4g}"
    )
    law = f"{item.law} law"
    if at.ratio is None:
        return _unreached(item, at, analysis, level)
    names, ratio, interval, beyond = (item.first, item.second), at.ratio, at.interval, at.beyond
    if ratio < 1:
        names, ratio, beyond = names[::-1], 1 / ratio, beyond[::-1]
        interval = None if interval is None else (_inverse(interval[1]), _inverse(interval[0]))
    scale = _SCALES.get(analysis.settings.x, analysis.settings.x)
    text = (
        f"{names[0]} needs {ratio:.3g} times{_limits(interval)} the {scale} of {names[1]} for {level} ({law})"
    )
    if interval is not None and interval[0] <= 1 <= interval[1]:
        text += "; the interval holds 1, so neither is shown to need less"
    far = [f"{name} by {d:.2g}" for name, d in zip(names, beyond, strict=True) if d > _WORTH_SAYING]
    if far:
        text += f"; extrapolated, in decades: {', '.join(far)}"
    return text + (". Not reliable." if interval is not None and not item.reliable else ".")


def _unreached(item: Comparison, at: EqualLoss, analysis: Analysis, level: str) -> str:
    fits = analysis.by_law(item.law)
    parts = []
    for name, scale in zip((item.first, item.second), at.scales, strict=True):
        fit = fits[name].fit
        floor = fit.parameters[fit.law.floor] if fit.law.floor else 0.0
        if math.isinf(scale) and at.level <= floor:
            parts.append(f"{name} does not reach {level}, which is not above its floor of {floor:.4g}")
        elif not 0 < scale < math.inf:
            parts.append(f"{name} does not pass {level} at any scale")
    return f"{' and '.join(parts)} ({item.law} law); there is no ratio."


def _inverse(value: float) -> float:
    return 1 / value if value else math.inf


def _limits(interval: tuple[float, float] | None) -> str:
    if interval is None:
        return " (no interval)"
    return f" [{interval[0]:.3g}, {interval[1]:.3g}]"


def _disagreements(comparisons: Sequence[Comparison]) -> list[str]:
    """A word for every pair whose differences under two forms have opposite signs."""
    by_pair: dict[tuple[str, str], dict[str, float]] = {}
    for item in comparisons:
        if item.exponent == "a":
            by_pair.setdefault((item.first, item.second), {})[item.law] = item.difference
    return [
        f"{first} and {second}: which falls faster depends on the form: the difference is "
        f"{' and '.join(f'{value:+.4f} under the {law} law' for law, value in signs.items())}."
        for (first, second), signs in by_pair.items()
        if min(signs.values()) < 0 < max(signs.values())
    ]


def _forms(analysis: Analysis) -> list[str]:
    """Power law or saturating law for each group, by AICc on its own points."""
    parts = []
    fits = [analysis.by_law(law) for law in BOTH]
    for group in fits[0]:
        values = [fit_aicc(own[group].fit) if group in own else None for own in fits]
        if values[0] is not None and values[1] is not None:
            better = BOTH[0] if values[0] <= values[1] else BOTH[1]
            parts.append(f"{group}: {better}, by {abs(values[0] - values[1]):.1f}")
    return [f"Form that AICc prefers: {'; '.join(parts)} (points taken as independent)."] if parts else []


def secondary_of(analysis: Analysis) -> list[SecondaryTests]:
    """The secondary tests of every pair under every law that they take; none where there are too few points."""
    select = selection_named(analysis.settings.points)
    found = []
    for law in map(law_named, analysis.settings.laws):
        for pair in combinations(analysis.by_law(law.name), 2):
            try:
                found.append(secondary_tests({name: select(analysis.points[name]) for name in pair}, law))
            except UserError:
                continue
    return found


SECONDARY_HEADS = ("law", "first, second", "one exponent", "one law", "AICc, one exponent", "AICc, one law")


def secondary_rows(tests: Sequence[SecondaryTests]) -> list[list[str]]:
    """Cells under SECONDARY_HEADS; AICc is less that of separate laws."""
    return [
        [
            item.law,
            ", ".join(item.groups),
            _f_text(item.equal_exponents),
            _f_text(item.one_law),
            *(
                "-" if value is None else f"{value:+.1f}"
                for value in (item.aicc_shared_exponent, item.aicc_one_law)
            ),
        ]
        for item in tests
    ]


def _f_text(test: FTest) -> str:
    p = "< 0.0001" if test.p < 1e-4 else f"= {test.p:.4f}"
    return f"F({test.degrees[0]}, {test.degrees[1]}) = {test.f:.3f}, p {p}"
