"""What was found in one shard, as plain numbers."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from openclip_linattn.data.decoding import UNCHECKED, judge
from openclip_linattn.data.pipes import TIMED_OUT
from openclip_linattn.data.reading import (
    NOT_REGULAR,
    RawSample,
    ShardLog,
    local_path,
    read_samples,
    scheme_of,
)

EXAMPLES = 3


@dataclass
class ShardReport:
    """Counts of samples in one shard, as OpenCLIP reads it.

    `lost` counts by reason; `members` counts the samples that have each suffix; `repeated_keys` the samples
    whose key came up before in the same shard; `examples` holds a few keys for each reason. `fault` is a
    clause about the file itself ("is empty (0 bytes)"); `complete` is false where only the first samples were
    read.
    """

    url: str
    samples: int = 0
    usable: int = 0
    empty_captions: int = 0
    recoverable: int = 0
    repeated_keys: int = 0
    skipped_members: int = 0
    lost: dict[str, int] = field(default_factory=dict)
    members: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)
    fault: str | None = None
    complete: bool = True

    @property
    def name(self) -> str:
        """File name of a local shard, the whole command or URL of another."""
        return local_path(self.url).name if scheme_of(self.url) == "local" else self.url

    @property
    def local(self) -> Path | None:
        """Path of a local shard."""
        return local_path(self.url) if scheme_of(self.url) == "local" else None

    @property
    def timed_out(self) -> bool:
        """Whether the shard's command was ended because it stayed silent."""
        return self.fault is not None and TIMED_OUT in self.fault

    @property
    def blocks(self) -> bool:
        """Whether reading the shard would wait for ever: one such shard stops a whole run."""
        return self.timed_out or (self.fault is not None and NOT_REGULAR in self.fault)

    @property
    def undecoded(self) -> list[str]:
        """Suffixes that the training decodes and the check does not."""
        return sorted(suffix for suffix in self.members if suffix.rpartition(".")[2] in UNCHECKED)

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ShardReport:
        """The report that `to_json` wrote; raises TypeError for anything else."""
        return cls(**value)


def check_shard(url: str, *, limit: int | None = None, silence: float = 60.0) -> ShardReport:
    """Read one shard, decode its samples (the first `limit`) and count what OpenCLIP would train on.

    A `pipe:` command may be silent for `silence` seconds.
    """
    report = ShardReport(url)
    log = ShardLog()
    samples = read_samples(url, log, silence=silence)
    with warnings.catch_warnings():
        # Pillow warns about odd files that it and OpenCLIP read all the same.
        warnings.simplefilter("ignore")
        report.complete = _count(report, samples, limit)
    samples.close()
    report.fault = log.fault
    report.skipped_members = len(log.skipped)
    return report


def _count(report: ShardReport, samples: Iterable[RawSample], limit: int | None) -> bool:
    lost: Counter[str] = Counter()
    members: Counter[str] = Counter()
    keys: set[str] = set()
    complete = True
    for sample in samples:
        if limit is not None and report.samples >= limit:
            complete = False
            break
        report.samples += 1
        members.update(sample.members.keys())
        report.repeated_keys += sample.key in keys
        keys.add(sample.key)
        verdict = judge(sample)
        report.usable += verdict.usable
        report.empty_captions += verdict.usable and verdict.empty_caption
        report.recoverable += verdict.recoverable
        if verdict.reason is not None:
            reason = verdict.reason.value
            lost[reason] += 1
            examples = report.examples.setdefault(reason, [])
            if len(examples) < EXAMPLES:
                examples.append(sample.key)
    report.lost, report.members = dict(lost), dict(members)
    return complete
