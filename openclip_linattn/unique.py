"""How many different samples a run sees: a bound, and what is to be expected."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Visit:
    """Some epochs of one set, which holds `held` samples.

    `reach` of them are what an epoch can get to, and `unique` different ones what one epoch is expected to see. None
    where it is not known.
    """

    pattern: str | None
    held: int | None
    epochs: int
    unique: float | None = None
    reach: int | None = None


def unique_bound(visits: Sequence[Visit], drawn: int, earlier: int = 0) -> int:
    """No more different samples than all sets hold can a run see, nor more than it draws.

    `earlier` samples were drawn, from sets that are not known, by a run whose checkpoint this one began with.
    """
    held = {(visit.pattern, visit.held) for visit in visits}  # with another number it is another set
    if any(number is None for _, number in held):
        return drawn
    return min(drawn, sum(number for _, number in held if number is not None) + earlier)


def unique_expected(visits: Sequence[Visit]) -> int | None:
    """Different samples to be expected where every epoch draws anew; None where a set is not known well enough.

    With replacement it is N (1 - (1 - 1/N)^d) for d draws of N samples, as if samples, not shards, were drawn; in
    whole epochs without replacement it is N. Shards are taken to be of equal size, and sets to have no common samples.
    """
    reach: dict[str | None, int] = {}
    missed: dict[str | None, float] = {}
    for visit in visits:
        if visit.unique is None or not visit.reach:
            return None
        reach[visit.pattern] = max(visit.reach, reach.get(visit.pattern, 0))
        share = (1 - visit.unique / visit.reach) ** visit.epochs
        missed[visit.pattern] = missed.get(visit.pattern, 1.0) * share
    return round(sum(reach[each] * (1 - missed[each]) for each in reach)) if reach else None
