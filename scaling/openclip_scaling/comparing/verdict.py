"""One plain sentence on the exponents of two groups under one law; their levels may differ where these do not."""

from __future__ import annotations

from openclip_scaling.fitting.uncertainty import MINIMUM_RUNS, Bootstrap


def verdict(
    names: tuple[str, str],
    exponent: str,
    interval: tuple[float, float] | None,
    boots: tuple[Bootstrap, Bootstrap],
    pairs: int = 0,
) -> str:
    """What the interval of a difference of exponents says, and over how many runs, of which `pairs` correspond."""
    pair, runs = " and ".join(names), _runs(boots, pairs)
    if len(boots[0].fit.law.exponents) > 1:
        pair += f" ({exponent})"
    bare = [name for name, boot in zip(names, boots, strict=True) if not boot.intervals]
    if bare or interval is None:
        return f"{pair}: no verdict with {runs}; no interval for {' and '.join(bare)}."
    unclear = _unclear(names, exponent, boots)
    differ = excludes(interval, 0.0)
    if not all(boot.reliable for boot in boots):
        found = unclear or (
            "the exponents differ on these points" if differ else "exponents not distinguishable"
        )
        return (
            f"{pair}: {found}, with {runs}; intervals from fewer than {MINIMUM_RUNS} runs are not reliable."
        )
    if unclear:
        return f"{pair}: no verdict; {unclear}."
    if differ:
        return f"{pair}: different exponents; {_faster(names, exponent, boots)} with scale ({runs})."
    return f"{pair}: exponents not distinguishable with {runs}."


def excludes(interval: tuple[float, float] | None, value: float) -> bool:
    """Whether there is an interval, without the value."""
    return interval is not None and not interval[0] <= value <= interval[1]


def _unclear(names: tuple[str, str], exponent: str, boots: tuple[Bootstrap, Bootstrap]) -> str:
    """The words for exponents that are not identified; none for exponents that are."""
    unclear = [
        name for name, boot in zip(names, boots, strict=True) if not boot.intervals[exponent].identified
    ]
    if not unclear:
        return ""
    form = "exponents of {} are" if len(unclear) > 1 else "exponent of {} is"
    return f"the {form.format(' and '.join(unclear))} not identified"


def _faster(names: tuple[str, str], exponent: str, boots: tuple[Bootstrap, Bootstrap]) -> str:
    slopes = [boot.fit.law.rising * boot.fit.parameters[exponent] for boot in boots]
    low, high = names if slopes[0] < slopes[1] else names[::-1]
    return f"{high} rises faster" if min(slopes) > 0 else f"{low} falls faster"


def _runs(boots: tuple[Bootstrap, Bootstrap], pairs: int) -> str:
    first, second = (boot.runs for boot in boots)
    text = f"{first} and {second} runs"
    if first == second:
        text = f"{first} run{'s' if first > 1 else ''} each"
    if not pairs:
        return text
    return f"{text}, {'in pairs' if pairs == first == second else f'{pairs} of them in pairs'}"
