"""Weighted sources: what OpenCLIP's upsampling factors mean in samples, and the factors for wanted shares.

With --dataset-resampled OpenCLIP draws shards, each with a probability proportional to the factor of its source
(--train-data-upsampling-factors), and reads the drawn shard whole. A source of N samples in any number of shards of any
sizes therefore makes f N of every sum of f N samples in the long run: the factor weighs samples, whatever the shards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from openclip_linattn.data.remote_sizes import remote_counts
from openclip_linattn.data.sizes import shard_counts
from openclip_linattn.data.sources import as_pattern, expand
from openclip_linattn.errors import UserError

_DIGITS = 6  # of a computed factor: enough for a part in a million


@dataclass(frozen=True)
class Source:
    """A source as given and in OpenCLIP's form, its shards, and its usable samples (None: not known)."""

    name: str
    pattern: str
    shards: int
    samples: int | None
    uncounted: int = 0

    @property
    def components(self) -> int:
        """The parts of its pattern between `::`, each of which needs a factor of its own."""
        return self.pattern.count("::") + 1


@dataclass(frozen=True)
class Weighted:
    """A source with its factor, and the share of all drawn samples (None: not known) that it will make."""

    source: Source
    factor: float
    share: float | None

    def times_seen(self, draws: int) -> float | None:
        """How often each of its samples is expected among so many draws from all sources."""
        return draws * self.share / self.source.samples if self.share and self.source.samples else None

    def to_json(self, draws: int) -> dict[str, Any]:
        """The row as JSON values."""
        return {
            "source": self.source.name,
            "shards": self.source.shards,
            "samples": self.source.samples,
            "factor": self.factor,
            "share": self.share,
            "times_seen": self.times_seen(draws),
        }


def look_at(name: str) -> Source:
    """The source with its counts by sizes.json and `_stats.json`; raises UserError where it is wrong."""
    urls = expand(name)
    counts = {**shard_counts(urls), **remote_counts(urls)}
    uncounted = sum(url not in counts for url in urls)
    samples = None if uncounted else sum(counts[url] for url in urls)
    return Source(name, as_pattern(name), len(urls), samples, uncounted)


def samples_of(source: Source) -> int:
    """Its usable samples; raises UserError where they are not known, or there is none."""
    if source.samples is None:
        raise UserError(
            f"The samples of {source.uncounted:,} of {source.shards:,} shards of {source.name} are not known: run "
            "`openclip-linattn data check` on it, which writes the sizes.json that is read here. Remote shards need "
            "one beside them, and commands have none: there, give --num-samples, and --factors rather than --shares."
        )
    if not source.samples:
        raise UserError(f"{source.name} has no usable sample, by its sizes.json.")
    return source.samples


def weigh(sources: Sequence[Source], factors: Sequence[float]) -> list[Weighted]:
    """The sources with their factors and the shares that these make.

    Raises UserError where the numbers are not as many as the sources, or not positive.
    """
    _check("factors", sources, factors)
    if any(source.samples is None for source in sources):
        shares: list[float | None] = [None] * len(sources)
    else:
        drawn = [factor * samples_of(source) for source, factor in zip(sources, factors, strict=True)]
        shares = [part / sum(drawn) for part in drawn]
    rows = zip(sources, factors, shares, strict=True)
    return [Weighted(source, factor, share) for source, factor, share in rows]


def factors_for(sources: Sequence[Source], shares: Sequence[float]) -> list[float]:
    """Factors, the smallest of them 1, that make the sources so many per cent of the samples drawn.

    Raises UserError as `weigh` does, where the shares do not add up to 100, and where a source's samples are not
    known.
    """
    _check("shares", sources, shares)
    if not math.isclose(sum(shares), 100, abs_tol=1):
        raise UserError(
            f"The shares are per cent of the samples drawn and add up to 100, not {sum(shares):g}."
        )
    factors = [share / samples_of(source) for source, share in zip(sources, shares, strict=True)]
    return [float(f"{factor / min(factors):.{_DIGITS}g}") for factor in factors]


def _check(what: str, sources: Sequence[Source], numbers: Sequence[float]) -> None:
    if len(numbers) != len(sources):
        raise UserError(f"The {what} must be one number for each source: {len(numbers)} for {len(sources)}.")
    if not all(number > 0 and math.isfinite(number) for number in numbers):
        raise UserError(
            f"The {what} must be positive numbers; leave a source out rather than weigh it with 0."
        )
