"""Times of quadratic kinds beyond the last length that was measured, always called extrapolated."""

import statistics
from collections.abc import Sequence

from openclip_linattn.bench.sweep import EXTRAPOLATED, MEASURED, Measurement, Workload


def extrapolate(measurements: Sequence[Measurement], workload: Workload) -> None:
    """Gives the skipped measurements of quadratic kinds the time of the longest one measured times (N / N_0)^2.

    In place. Only sizes beyond the longest measured one, in the same direction, get a time; memory does not.
    """
    longest: dict[tuple[str, str], Measurement] = {}
    for measurement in measurements:
        key = (measurement.name, measurement.direction)
        if measurement.status == MEASURED and workload.quadratic(measurement.name):
            best = longest.setdefault(key, measurement)
            longest[key] = max(best, measurement, key=lambda m: m.size)
    for measurement in measurements:
        base = longest.get((measurement.name, measurement.direction))
        if base is None or not measurement.status.startswith("skipped") or measurement.size <= base.size:
            continue
        factor = (workload.tokens(measurement.size) / workload.tokens(base.size)) ** 2
        measurement.status = EXTRAPOLATED
        measurement.times = [statistics.median(base.times) * factor]
