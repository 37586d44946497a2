"""Checks shards as OpenCLIP will read them: what is usable, what is lost and why, what stops training."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from openclip_linattn.data.build import no_progress
from openclip_linattn.data.problems import Problem, find_problems
from openclip_linattn.data.reading import scheme_of
from openclip_linattn.data.shard_report import ShardReport, check_shard
from openclip_linattn.data.sources import expand, find_gaps, find_missing
from openclip_linattn.errors import UserError

SILENCE = 60.0
READABLE = ("local", "pipe")


@dataclass
class DatasetReport:
    """The shards that were checked, the number in the source, and what it means (`problems`).

    `missing` are local shards of the source that do not exist, `gaps` those that a folder seems to lack (see
    `find_gaps`); `unread` counts remote ones, which were not checked.
    """

    source: str
    total_shards: int
    shards: list[ShardReport]
    missing: list[str] = field(default_factory=list)
    unread: int = 0
    gaps: list[str] = field(default_factory=list)

    @property
    def samples(self) -> int:
        """Samples in the checked shards, usable or not."""
        return sum(shard.samples for shard in self.shards)

    @property
    def usable(self) -> int:
        """Samples that OpenCLIP trains on."""
        return sum(shard.usable for shard in self.shards)

    @property
    def recoverable(self) -> int:
        """Lost samples with a good image and caption."""
        return sum(shard.recoverable for shard in self.shards)

    @property
    def empty_captions(self) -> int:
        """Usable samples whose caption is empty."""
        return sum(shard.empty_captions for shard in self.shards)

    @property
    def lost(self) -> dict[str, int]:
        """Lost samples by reason."""
        return _sum([shard.lost for shard in self.shards])

    @property
    def members(self) -> dict[str, int]:
        """Samples that have each suffix."""
        return _sum([shard.members for shard in self.shards])

    @property
    def complete(self) -> bool:
        """Whether every sample of every shard was read."""
        return len(self.shards) == self.total_shards and all(shard.complete for shard in self.shards)

    @property
    def problems(self) -> list[Problem]:
        """What was found, in sentences."""
        problems = find_problems(self.shards)
        if self.missing:
            text = f"{_shards_are(self.missing)} missing: {_first(self.missing)}."
            problems.append(Problem("warning", text))
        if self.gaps:
            text = (
                f"{_shards_are(self.gaps)} not there, going by the numbers and statistics beside the others"
            )
            problems.append(Problem("warning", f"{text}: {_first(self.gaps)}."))
        if self.unread:
            text = f"{self.unread:,} remote shards were not checked; files and pipe: commands are."
            problems.append(Problem("warning", text))
        return problems

    @property
    def errors(self) -> list[str]:
        """Sentences of the problems that stop training."""
        return [problem.text for problem in self.problems if problem.severity == "error"]

    @property
    def warnings(self) -> list[str]:
        """Sentences of the other problems."""
        return [problem.text for problem in self.problems if problem.severity == "warning"]

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {
            "source": self.source,
            "total_shards": self.total_shards,
            "checked_shards": len(self.shards),
            "complete": self.complete,
            "samples": self.samples,
            "usable": self.usable,
            "lost": self.lost,
            "empty_captions": self.empty_captions,
            "recoverable": self.recoverable,
            "members": self.members,
            "missing": self.missing,
            "gaps": self.gaps,
            "unread": self.unread,
            "problems": [{"severity": problem.severity, "text": problem.text} for problem in self.problems],
            "shards": [shard.to_json() for shard in self.shards],
        }


def check(
    source: str,
    *,
    sample_shards: int | None = None,
    sample_limit: int | None = None,
    workers: int = 1,
    allow_missing: bool = False,
    silence: float = SILENCE,
    progress: Callable[[int], None] = no_progress,
) -> DatasetReport:
    """Check the shards of `source`, decoding every sample; `progress(1)` is called after each shard.

    With `sample_shards` only that many are read (the first, the last, the others evenly between), and with
    `sample_limit` that many samples of each. `workers` processes share the work. A `pipe:` command may be
    silent for `silence` seconds; after one that was, no further command is run. Raises UserError where the
    source itself is wrong, or shards are missing (unless `allow_missing`, which leaves them out).
    """
    if workers < 1:
        raise UserError(f"The number of workers must be at least 1, not {workers}.")
    urls = expand(source, allow_missing=allow_missing)
    missing = find_missing(source) if allow_missing else []
    chosen = choose(urls, sample_shards)
    readable = [url for url in chosen if scheme_of(url) in READABLE]
    shards = []
    for shard in _reports(readable, sample_limit, workers, silence):
        shards.append(shard)
        progress(1)
        if shard.timed_out:
            break
    return DatasetReport(source, len(urls), shards, missing, len(chosen) - len(readable), find_gaps(source))


def choose(urls: Sequence[str], count: int | None) -> list[str]:
    """The first, the last and evenly spaced others of `urls`, `count` in all and in their order."""
    if count is None or count >= len(urls):
        return list(urls)
    if count < 1:
        raise UserError(f"The number of shards to check must be at least 1, not {count}.")
    steps = max(1, count - 1)
    return [urls[place] for place in sorted({round(i * (len(urls) - 1) / steps) for i in range(count)})]


def _reports(urls: Sequence[str], limit: int | None, workers: int, silence: float) -> Iterator[ShardReport]:
    task = partial(check_shard, limit=limit, silence=silence)
    workers = min(workers, len(urls))
    if workers <= 1:
        yield from map(task, urls)
        return
    # A forked child would inherit the threads of whatever the caller has loaded.
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(task, urls)


def _shards_are(shards: Sequence[str]) -> str:
    return f"{len(shards):,} shards are" if len(shards) > 1 else "1 shard is"


def _first(shards: Sequence[str]) -> str:
    return ", ".join(shards[:3]) + (", ..." if len(shards) > 3 else "")


def _sum(counts: Sequence[dict[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for count in counts:
        for name, number in count.items():
            total[name] = total.get(name, 0) + number
    return total
