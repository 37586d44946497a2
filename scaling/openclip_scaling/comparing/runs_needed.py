"""How many more runs would halve an interval."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from scipy import stats

from openclip_scaling.fitting.uncertainty import LEVEL, Bootstrap, degrees_left


def runs_to_halve(runs: int) -> int:
    """How many runs more make a t interval half as wide, where runs scatter as before.

    The width goes as t(degrees of freedom) / sqrt(runs).
    """
    wanted, more = _width(runs) / 2, 1
    while _width(runs + more) > wanted:
        more += 1
    return more


def _width(runs: int) -> float:
    return float(stats.t.ppf((1 + LEVEL) / 2, degrees_left(runs))) / math.sqrt(runs)


def halving_sentences(fits: Sequence[Mapping[str, Bootstrap]]) -> list[str]:
    """For the groups with an interval, under one law or several: how many more runs halve it, and by what rule."""
    needed: dict[int, dict[str, None]] = {}
    for boots in fits:
        for group, boot in boots.items():
            if boot.intervals:
                needed.setdefault(boot.runs, {})[group] = None
    return [
        f"{' and '.join(groups)}: {runs_to_halve(runs)} more runs{' each' if len(groups) > 1 else ''} (now {runs}) "
        "would halve the intervals of the fits, if they lie and scatter as these do: the width goes as "
        "t(runs - 2) / sqrt(runs)."
        for runs, groups in needed.items()
    ]
