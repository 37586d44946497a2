"""The first pass: reads an input shard, judges every sample and writes the shard's plan."""

from __future__ import annotations

import json
import warnings
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from openclip_linattn.data.clean.filters import Finding, assess, image_of, image_size, lacks
from openclip_linattn.data.clean.plan import (
    FIRST_REASON,
    KEPT,
    RECOVERED,
    ShardPlan,
    ShardSummary,
    load_plan,
)
from openclip_linattn.data.clean.settings import CAPTION, IMAGE, Settings
from openclip_linattn.data.clean.workers import Unfinished
from openclip_linattn.data.identity import identity
from openclip_linattn.data.reading import NOT_REGULAR, RawSample, ShardLog, read_samples
from openclip_linattn.errors import UserError

MAX_FIELDS = 40
_BLOCK = 512  # bytes: a tar is made of such blocks


@dataclass(frozen=True)
class PlanTask:
    """One input shard, where its plan goes, and by which settings its samples are judged."""

    url: str
    path: Path
    settings: Settings

    @property
    def name(self) -> str:
        """The shard's url."""
        return self.url


def plan_shard(task: PlanTask) -> ShardPlan:
    """The shard's plan: the one at its path where the shard is still the same, else a new one, written there.

    A file that is cut short or damaged is planned as far as it goes. Raises Unfinished where reading failed for
    another cause, which may pass: what the rest holds is not known then.
    """
    with suppress(UserError):
        found = load_plan(task.path)
        if not changed(task.url, found.summary.identity):
            return found
    plan = _make_plan(task.url, task.settings)
    plan.save(task.path)
    return plan


def changed(url: str, known: str | None) -> bool:
    """Whether the shard is another one than it was; False where that cannot be told."""
    now = identity(url)
    return None not in (now, known) and now != known


def failed(log: ShardLog) -> bool:
    """Whether reading ended for a cause outside the shard's own bytes."""
    return log.fault is not None and (log.fault.startswith("cannot be") or NOT_REGULAR in log.fault)


def fingerprint(sample: RawSample) -> int:
    """CRC-32 of the sample's key, suffixes and contents."""
    value = 0
    for name, data in (("", sample.key.encode(errors="surrogateescape")), *sample.members.items()):
        head = f"{name}\0{len(data)}\0".encode(errors="surrogateescape")
        value = zlib.crc32(data, zlib.crc32(head, value))
    return value


def _make_plan(url: str, settings: Settings) -> ShardPlan:
    before = identity(url)
    log = ShardLog()
    samples = read_samples(url, log)
    with warnings.catch_warnings():
        # Pillow warns about odd files that it and OpenCLIP read all the same.
        warnings.simplefilter("ignore")
        plan = _judge(ShardSummary(url, before), samples, settings)
    if failed(log):
        raise Unfinished(f"{url} {log.fault}")
    if changed(url, before):
        raise Unfinished(f"{url} changed while it was read")
    plan.summary.fault = log.fault
    return plan


def _judge(summary: ShardSummary, samples: Iterable[RawSample], settings: Settings) -> ShardPlan:
    needed = [name for name, _ in settings.fields()]
    reasons: dict[str, int] = {}
    names: set[str] = set()
    lacking: Counter[str] = Counter()
    rows: list[tuple[int, int, int, int]] = []
    for sample in samples:
        finding = assess(sample, settings)
        rows.append((_code(finding, reasons), fingerprint(sample), *_if_kept(sample, finding, settings)))
        if finding.usable:
            summary.usable += 1
            lacking.update(name for name in needed if lacks(finding.fields, name))
            names.update(finding.fields)
    summary.lacking = dict(lacking)
    codes, prints, sizes, hashes = zip(*rows, strict=True) if rows else ((), (), (), ())
    return ShardPlan(
        summary,
        list(reasons),
        f"duplicate {settings.deduplicate}",
        sorted(names)[:MAX_FIELDS],
        np.array(codes, np.uint8),
        np.array(prints, np.uint32),
        np.array(sizes, np.uint32),
        np.array(hashes if settings.deduplicate else (), np.uint64),
        np.zeros(len(rows), np.bool_),
    )


def _code(finding: Finding, reasons: dict[str, int]) -> int:
    if finding.reason is None:
        return RECOVERED if finding.recovered else KEPT
    return reasons.setdefault(finding.reason, FIRST_REASON + len(reasons))


def _if_kept(sample: RawSample, finding: Finding, settings: Settings) -> tuple[int, int]:
    """Bytes in a tar, and the hash for deduplication; zeros where the sample is dropped or has none."""
    if finding.reason is not None:
        return 0, 0
    hashed = _hash(sample, finding.fields, settings.deduplicate) if settings.deduplicate else 0
    return _tar_bytes(sample, settings.resize), hashed


def _tar_bytes(sample: RawSample, resize: int | None) -> int:
    image = image_of(sample)
    contents = [sample.members["txt"], sample.members.get("json", b"")]
    if resize is None or min(image_size(image)) <= resize:
        contents.append(image)
    return sum(_BLOCK + -(-len(data) // _BLOCK) * _BLOCK for data in contents)


def _hash(sample: RawSample, fields: Mapping[str, Any], of: str) -> int:
    if of == IMAGE:
        data = image_of(sample)
    elif of == CAPTION:
        data = sample.members["txt"].strip()
    elif lacks(fields, of):
        return 0
    else:
        data = json.dumps(fields[of], sort_keys=True).encode()
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "big") or 1
