"""How much a benchmark may run: rounds, seconds, and how long one run may take."""

import time
from dataclasses import dataclass, field
from math import isfinite

from openclip_linattn.errors import UserError


@dataclass(frozen=True)
class Effort:
    """The bounds of a benchmark. Raises UserError for bounds that allow nothing.

    rounds: how often each candidate runs at each size. seconds: what the measurements may take together. run_limit: a
    candidate whose single run would take longer is skipped.
    """

    rounds: int
    seconds: float
    run_limit: float

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise UserError(f"--rounds must be at least 1, got {self.rounds}")
        for option, value in (("seconds", self.seconds), ("run-limit", self.run_limit)):
            if not (isfinite(value) and value > 0):
                raise UserError(f"--{option} must be a number above 0, got {value}")


@dataclass
class Clockwork:
    """Shares what is left of `seconds` among the cells (a size in one direction) that are still to come."""

    effort: Effort
    cells: int
    _start: float = field(default_factory=time.perf_counter)

    def left(self) -> float:
        """Seconds left, below zero where they are overdrawn."""
        return self.effort.seconds - (time.perf_counter() - self._start)

    def share(self) -> float:
        """Seconds for the next cell's rounds."""
        return max(0.0, self.left()) / max(1, self.cells)

    def cell_done(self) -> None:
        """One cell fewer to come."""
        self.cells -= 1
