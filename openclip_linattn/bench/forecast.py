"""What a longer run will take, from the shorter ones: so that none is started that cannot end well."""

import math
from dataclasses import dataclass, field


@dataclass
class Forecast:
    """Time and memory of one candidate in one direction, from its two last lengths.

    Time is a power of the tokens between the first and the second, the second for a quadratic kind; memory is
    a N + b N^2 through the two last points, neither part below zero.
    """

    quadratic: bool
    seen: list[tuple[int, float, int]] = field(default_factory=list)

    def add(self, tokens: int, seconds: float, peak: int) -> None:
        """A length was run."""
        self.seen.append((tokens, seconds, peak))

    def seconds(self, tokens: int) -> float | None:
        """Expected seconds of one run, None before anything was run."""
        if not self.seen:
            return None
        last_tokens, last, _ = self.seen[-1]
        power = 2.0 if self.quadratic else 1.0
        if not self.quadratic and len(self.seen) > 1:
            before_tokens, before, _ = self.seen[-2]
            slope = math.log(last / before) / math.log(last_tokens / before_tokens)
            power = min(2.0, max(1.0, slope))
        return float(last * (tokens / last_tokens) ** power)

    def peak(self, tokens: int) -> int | None:
        """Expected bytes, None before anything was run."""
        if not self.seen:
            return None
        n2, _, m2 = self.seen[-1]
        if len(self.seen) == 1:
            return int(m2 * (tokens / n2) ** (2 if self.quadratic else 1))
        n1, _, m1 = self.seen[-2]
        square = max(0.0, (m2 / n2 - m1 / n1) / (n2 - n1))
        linear = max(0.0, m2 / n2 - square * n2)
        return int(linear * tokens + square * tokens**2)


def with_scouts(sizes: list[int], *, first: int, factor: int, step: int = 1) -> list[tuple[int, bool]]:
    """The sizes in rising order, each with False, and scouts, each with True, where the way to the next is far.

    A size more than factor^2 from the one before it, or the first one, is led up to by scouts at size / factor,
    size / factor^2 and so on, not below `first`; scouts are multiples of `step`.
    """
    path: list[tuple[int, bool]] = []
    for size in sorted(set(sizes)):
        before = path[-1][0] if path else 0
        scouts = set()
        scout = size // factor // step * step
        while size > factor**2 * before and scout > max(before, first - 1):
            scouts.add(scout)
            scout = scout // factor // step * step
        path += [(scout, True) for scout in sorted(scouts)]
        path.append((size, False))
    return path
