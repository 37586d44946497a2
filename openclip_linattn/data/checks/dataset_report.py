"""What was found in a whole source: sums over its shards, and what they mean for training."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from openclip_linattn.data.checks.between_shards import Overlap, find_overlap
from openclip_linattn.data.checks.histograms import ASPECTS, CAPTIONS, SIDES
from openclip_linattn.data.checks.problems import Problem, find_problems
from openclip_linattn.data.checks.shard_report import ShardReport


@dataclass
class DatasetReport:
    """The shards that were checked, the number in the source, and what it means (`problems`).

    `missing` are local shards of the source that do not exist, `gaps` those that a folder seems to lack (see
    `find_gaps`), `repeated` those that the source lists more than once (they are read and counted once).
    `unread` counts shards that the check cannot read, and `unfinished` are those that it did not come to.
    """

    source: str
    total_shards: int
    shards: list[ShardReport]
    missing: list[str] = field(default_factory=list)
    unread: int = 0
    gaps: list[str] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Label shards of several folders by their paths where their file names are the same."""
        times = Counter(shard.name for shard in self.shards)
        for shard in self.shards:
            if times[shard.name] > 1 and shard.local is not None:
                shard.label = str(shard.local)

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
        return _sum(shard.lost for shard in self.shards)

    @property
    def members(self) -> dict[str, int]:
        """Samples that have each suffix."""
        return _sum(shard.members for shard in self.shards)

    @property
    def complete(self) -> bool:
        """Whether every sample of every shard was read."""
        whole = len(self.shards) == self.total_shards
        return whole and all(shard.settled for shard in self.shards)

    @cached_property
    def overlap(self) -> Overlap:
        """What the shards have in common."""
        return find_overlap(self.shards)

    @cached_property
    def problems(self) -> list[Problem]:
        """What was found, in sentences."""
        problems = find_problems(self.shards, self.overlap)
        if self.unfinished:
            text = f"{_shards(self.unfinished, 'were', 'was')} not read: {_first(self.unfinished)}."
            problems.append(Problem("error", f"{text} Run the same command again to read the rest."))
        if self.missing:
            text = f"{_shards(self.missing, 'are', 'is')} missing: {_first(self.missing)}."
            problems.append(Problem("warning", text))
        if self.gaps:
            text = (
                f"{_shards(self.gaps, 'are', 'is')} not there, going by the numbers and statistics beside the "
                f"others: {_first(self.gaps)}."
            )
            problems.append(Problem("warning", text))
        if self.repeated:
            text = f"{_shards(self.repeated, 'are', 'is')} listed more than once: {_first(self.repeated)}."
            problems.append(Problem("warning", f"{text} Training reads each as often as it is listed."))
        if self.unread:
            text = f"{self.unread:,} remote shards were not checked: their scheme cannot be read here."
            problems.append(Problem("warning", text))
        return problems

    @property
    def errors(self) -> list[str]:
        """Sentences of the problems that stop training or spoil it."""
        return [problem.text for problem in self.problems if problem.severity == "error"]

    @property
    def warnings(self) -> list[str]:
        """Sentences of the other problems."""
        return [problem.text for problem in self.problems if problem.severity == "warning"]

    def summary(self) -> dict[str, Any]:
        """The report without its shards, as JSON values."""
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
            "repeated_keys": sum(shard.repeated_keys for shard in self.shards),
            "split_keys": sum(shard.split_keys for shard in self.shards),
            "skipped_members": sum(shard.skipped_members for shard in self.shards),
            "members": self.members,
            "faults": dict(Counter(shard.fault.partition(":")[0] for shard in self.shards if shard.fault)),
            "missing": self.missing,
            "gaps": self.gaps,
            "repeated_shards": self.repeated,
            "unread": self.unread,
            "unfinished": self.unfinished,
            "between_shards": self.overlap.to_json(),
            "shorter_side": SIDES.to_json(SIDES.total(shard.sides for shard in self.shards)),
            "width_over_height": ASPECTS.to_json(ASPECTS.total(shard.aspects for shard in self.shards)),
            "caption_length": CAPTIONS.to_json(CAPTIONS.total(shard.captions for shard in self.shards)),
            "problems": [{"severity": problem.severity, "text": problem.text} for problem in self.problems],
        }

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {**self.summary(), "shards": [shard.to_json() for shard in self.shards]}


def report_text(reports: Sequence[DatasetReport]) -> str:
    """The reports as a JSON list, in which each shard is one line: sets of 40,000 shards stay readable."""
    return "[" + ",".join(_report_text(report) for report in reports) + "\n]\n"


def _report_text(report: DatasetReport) -> str:
    head = json.dumps(report.summary(), indent=2, allow_nan=False).removesuffix("\n}")
    rows = ",\n".join(json.dumps(shard.to_json(), allow_nan=False) for shard in report.shards)
    return f'\n{head},\n  "shards": [\n{rows}\n  ]\n}}'


def _shards(shards: Sequence[str], several: str, one: str) -> str:
    return f"{len(shards):,} shards {several}" if len(shards) > 1 else f"1 shard {one}"


def _first(shards: Sequence[str]) -> str:
    return ", ".join(shards[:3]) + (", ..." if len(shards) > 3 else "")


def _sum(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    return dict(total)
