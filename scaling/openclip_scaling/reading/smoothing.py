"""What the logged training losses say: their level at the end with its noise, and whether the run has diverged."""

from __future__ import annotations

import math
from collections.abc import Sequence

from openclip_scaling.reading.records import FloatArray


def smoothed_loss(losses: Sequence[float] | FloatArray) -> tuple[float | None, float | None]:
    """Training loss at the end of `losses`: mean of the last tenth (at least 5 logged steps), and its error.

    The error is the standard error of that mean about a straight line, so that a slope is not taken for
    noise. Steps that are not finite are left out. None where there is nothing to average.
    """
    count = max(5, math.ceil(len(losses) / 10))
    tail = [(i, loss) for i, loss in enumerate(map(float, losses[-count:])) if math.isfinite(loss)]
    if not tail:
        return None, None
    n = len(tail)
    mean = sum(loss for _, loss in tail) / n
    if n < 4:
        return mean, None
    centre = sum(i for i, _ in tail) / n
    spread = sum((i - centre) ** 2 for i, _ in tail)
    slope = sum((i - centre) * (loss - mean) for i, loss in tail) / spread
    rest = sum((loss - mean - slope * (i - centre)) ** 2 for i, loss in tail)
    return mean, math.sqrt(rest / (n - 2) / n)


def divergence(
    losses: Sequence[float] | FloatArray, batch: int | None, contrastive: bool = True
) -> str | None:
    """Why a run counts as diverged, or None.

    A run has diverged when its last logged loss is not finite, or when its smoothed final loss exceeds
    1.2 ln(batch), 1.2 times the InfoNCE loss of guessing, and also its loss at the start.
    """
    if len(losses) == 0:
        return None
    if not math.isfinite(losses[-1]):
        return "its training loss ends as NaN or infinity"
    final, _ = smoothed_loss(losses)
    start = next(loss for loss in losses if math.isfinite(loss))
    if final is None or not contrastive or batch is None:
        return None
    limit = 1.2 * math.log(batch)
    if final > limit and final > start:
        return f"its training loss ends at {final:.3g}, above 1.2 ln(batch) = {limit:.3g}"
    return None
