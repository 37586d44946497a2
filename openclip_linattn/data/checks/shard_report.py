"""What was found in one shard, as plain numbers."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from openclip_linattn.data.checks.histograms import ASPECTS, CAPTIONS, SIDES
from openclip_linattn.data.checks.shard_keys import ContentDigest, KeyTracker, ShardKeys
from openclip_linattn.data.decoding import UNCHECKED, Verdict, judge
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
DIED = "was not read: the process that read it ended"


@dataclass
class ShardReport:
    """Counts of samples in one shard, as OpenCLIP reads it.

    `lost` counts by reason; `members` counts the samples that have each suffix; `repeated_keys` the samples that
    were written twice, and `split_keys` the keys whose members were pulled apart (see KeyTracker); `examples`
    holds a few keys for each reason, and `bomb_pixels` the size of the largest image bomb. `sides`, `aspects`
    and `captions` are histograms of the usable samples, `digest` one of the content (see ContentDigest). `fault`
    is a clause about the file itself ("is empty (0 bytes)"); `complete` is false where only the first samples
    were read. `label` is a name that tells the shard from another of its set with the same file name; it is not
    part of the report.
    """

    url: str
    samples: int = 0
    usable: int = 0
    empty_captions: int = 0
    recoverable: int = 0
    repeated_keys: int = 0
    split_keys: int = 0
    skipped_members: int = 0
    bomb_pixels: int = 0
    lost: dict[str, int] = field(default_factory=dict)
    members: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)
    sides: list[int] = field(default_factory=SIDES.zeros)
    aspects: list[int] = field(default_factory=ASPECTS.zeros)
    captions: list[int] = field(default_factory=CAPTIONS.zeros)
    keys: ShardKeys = field(default_factory=ShardKeys)
    digest: str | None = None
    fault: str | None = None
    complete: bool = True
    label: str | None = field(default=None, compare=False)

    @property
    def name(self) -> str:
        """The label, or else the file name of a local shard, the whole command or URL of another."""
        if self.label is not None:
            return self.label
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
    def died(self) -> bool:
        """Whether the process that read the shard was ended from outside."""
        return self.fault is not None and self.fault.startswith(DIED)

    @property
    def settled(self) -> bool:
        """Whether reading the unchanged shard again would find the same: it was read whole, and could be read."""
        unread = self.blocks or self.died or (self.fault or "").startswith("cannot be")
        return self.complete and not unread

    @property
    def undecoded(self) -> list[str]:
        """Suffixes that the training decodes and the check does not."""
        return sorted(suffix for suffix in self.members if suffix.rpartition(".")[2] in UNCHECKED)

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        value = asdict(self)
        del value["label"]
        return value

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ShardReport:
        """The report that `to_json` wrote; raises TypeError or KeyError for anything else, older forms too."""
        if set(value) != {entry.name for entry in fields(cls)} - {"label"}:
            raise TypeError("the report has other fields")
        return cls(**{**value, "keys": ShardKeys(**value["keys"])})


def check_shard(url: str, *, limit: int | None = None, silence: float = 60.0) -> ShardReport:
    """Read one shard, decode its samples (the first `limit`) and count what OpenCLIP would train on.

    A `pipe:` command may be silent for `silence` seconds.
    """
    log = ShardLog()
    samples = read_samples(url, log, silence=silence)
    tally = _Tally(ShardReport(url))
    with warnings.catch_warnings():
        # Pillow warns about odd files that it and OpenCLIP read all the same.
        warnings.simplefilter("ignore")
        complete = tally.take(samples, limit)
    samples.close()
    return tally.close(log, complete)


class _Tally:
    """Adds samples to a report."""

    def __init__(self, report: ShardReport) -> None:
        self.report = report
        self.lost: Counter[str] = Counter()
        self.members: Counter[str] = Counter()
        self.keys = KeyTracker()
        self.content = ContentDigest()

    def take(self, samples: Iterable[RawSample], limit: int | None) -> bool:
        """Count the samples, at most `limit`; return whether these were all."""
        for sample in samples:
            if limit is not None and self.report.samples >= limit:
                return False
            verdict = judge(sample)
            self.report.samples += 1
            self.members.update(sample.members.keys())
            self.keys.add(sample.key, sample.members)
            self.content.add(sample.key, verdict.caption, verdict.size)
            if verdict.reason is None:
                self._use(verdict)
            else:
                self._lose(sample.key, verdict, verdict.reason.value)
        return True

    def _use(self, verdict: Verdict) -> None:
        assert verdict.size is not None
        assert verdict.caption is not None
        width, height = verdict.size
        self.report.usable += 1
        self.report.empty_captions += verdict.empty_caption
        self.report.sides[SIDES.place(min(width, height))] += 1
        self.report.aspects[ASPECTS.place(width / max(height, 1))] += 1
        self.report.captions[CAPTIONS.place(len(verdict.caption.strip()))] += 1

    def _lose(self, key: str, verdict: Verdict, reason: str) -> None:
        self.lost[reason] += 1
        self.report.recoverable += verdict.recoverable
        self.report.bomb_pixels = max(self.report.bomb_pixels, verdict.pixels)
        examples = self.report.examples.setdefault(reason, [])
        if len(examples) < EXAMPLES:
            examples.append(key)

    def close(self, log: ShardLog, complete: bool) -> ShardReport:
        """The report of all that was taken."""
        report = self.report
        report.lost, report.members = dict(self.lost), dict(self.members)
        report.repeated_keys, report.split_keys = self.keys.repeated, self.keys.split
        report.keys = self.keys.summary(complete)
        report.digest = self.content.hex() if complete and report.samples else None
        report.fault, report.skipped_members = log.fault, len(log.skipped)
        report.complete = complete
        return report
