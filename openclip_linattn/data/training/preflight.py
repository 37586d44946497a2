"""Looks at the shards in the seconds before training, and refuses what would hang or train on nothing."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from openclip_linattn.data.checks.check import DatasetReport, choose, read_shards, survey
from openclip_linattn.data.checks.shard_report import ShardReport
from openclip_linattn.data.remote_sizes import remote_counts
from openclip_linattn.data.sizes import openclip_count, sample_count, shard_counts, write_sizes
from openclip_linattn.data.sources import as_pattern, expand
from openclip_linattn.data.training.cache import ReportCache, set_digest
from openclip_linattn.data.training.epoch_notes import epoch_notes
from openclip_linattn.data.training.epoch_shape import Coverage, Reading
from openclip_linattn.errors import UserError

__all__ = ["PreflightResult", "preflight", "sample_count"]

MAX_SHARDS = 16  # larger sets are checked on so many shards
MAX_SAMPLES = 4096  # decoded in all, which takes seconds
MIN_SAMPLES_PER_SHARD = 64
SILENCE = 20.0  # seconds that a pipe: command may take to its next byte, and the first shards to a sample


@dataclass(frozen=True)
class PreflightResult:
    """What is known of a set before training on it.

    `pattern` is the source in OpenCLIP's form; `num_samples` the samples of an epoch before rounding; `held`
    the usable samples of the whole set where they are known, and `coverage` what an epoch sees of them (None also
    without a batch size). `usable_share` is that of the checked samples, None where none
    were checked. `digest` names the very files (local ones only). `warnings` are sentences.
    """

    source: str
    pattern: str
    shards: int
    num_samples: int | None
    held: int | None
    coverage: Coverage | None
    checked_shards: int
    checked_samples: int
    usable_share: float | None
    lost: dict[str, int] = field(default_factory=dict)
    digest: str | None = None
    warnings: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """The record for run.json."""
        return {
            "source": self.source,
            "pattern": self.pattern,
            "shards": self.shards,
            "samples": self.held,
            "num_samples": self.num_samples,
            "epoch": asdict(self.coverage) if self.coverage else None,
            "checked_shards": self.checked_shards,
            "checked_samples": self.checked_samples,
            "usable_share": self.usable_share,
            "lost": self.lost,
            "digest": self.digest,
            "warnings": self.warnings,
        }


@dataclass(frozen=True)
class Loaders:
    """How a run reads: processes, data-loader workers of each, with replacement or not, batch per process."""

    world_size: int
    workers: int
    resampled: bool
    batch_size: int | None

    def coverage(self, held: int | None, shards: int, num_samples: int) -> Coverage | None:
        """What an epoch sees of a set; None where that is not known."""
        if held is None or self.batch_size is None:
            return None
        reading = Reading(held, shards, self.batch_size, self.world_size, self.workers)
        return reading.coverage(num_samples, resampled=self.resampled)


def preflight(
    source: str,
    *,
    world_size: int,
    workers: int,
    resampled: bool,
    num_samples: int | None = None,
    batch_size: int | None = None,
    cache: bool = True,
) -> PreflightResult:
    """Check that OpenCLIP can train on `source` with these loaders, within seconds.

    The arguments are OpenCLIP's: `workers` per process, `resampled` (--dataset-resampled), `num_samples`
    (--train-num-samples) and `batch_size` per process (None: unknown). Up to 16 shards and 4,096 samples are decoded;
    with `cache` the same files are not read again. A set that was read whole gets its sizes.json where `num_samples`
    is not given and there is none. Raises UserError, one sentence a line, where training would hang or fail.
    """
    loaders = Loaders(world_size, workers, resampled, batch_size)
    urls = expand(source)
    if num_samples is not None and num_samples < 1:
        raise UserError(f"--train-num-samples must be at least 1, not {num_samples}.")
    _check_shard_number(source, len(urls), loaders)
    digest = set_digest(urls)
    report = _report(source, urls, digest if cache else None)
    if report.errors:
        raise UserError("\n".join(report.errors))
    counts = _usable_counts(urls, report)
    held = sum(counts[url] for url in urls) if all(url in counts for url in urls) else None
    notes: list[str] = []
    if num_samples is None:
        notes += _provide_count(urls, report)
        num_samples = _count_for_openclip(source, urls, held)
    _check_worker_shares(source, [counts.get(url) for url in urls], loaders)
    coverage = loaders.coverage(held, len(urls), num_samples)
    notes += epoch_notes(num_samples, held, len(urls), coverage, resampled=resampled)
    return PreflightResult(
        source=source,
        pattern=as_pattern(source),
        shards=len(urls),
        num_samples=num_samples,
        held=held,
        coverage=coverage,
        checked_shards=len(report.shards),
        checked_samples=report.samples,
        usable_share=report.usable / report.samples if report.samples else None,
        lost=report.lost,
        digest=digest,
        warnings=[*report.warnings, *notes],
    )


def _check_shard_number(source: str, shards: int, loaders: Loaders) -> None:
    readers = loaders.workers * loaders.world_size
    if loaders.resampled or shards >= readers:
        return
    fewer = shards // loaders.world_size
    remedies = ["split the set into more shards", "sample with replacement (--dataset-resampled)"]
    if fewer:
        remedies.insert(0, f"use --workers {fewer}")
    raise UserError(
        f"{source} has too few shards: {loaders.world_size} processes x {loaders.workers} workers = "
        f"{readers} readers, each of which needs a shard of its own, for {shards} shards ({shards} < {readers}): "
        f"{', or '.join(remedies)}."
    )


def _report(source: str, urls: Sequence[str], digest: str | None) -> DatasetReport:
    chosen = choose(urls, MAX_SHARDS)
    limit = max(MIN_SAMPLES_PER_SHARD, MAX_SAMPLES // len(chosen))
    cache = ReportCache(urls) if digest else None
    known = cache.get(digest) if cache and digest else None
    if known is not None:
        return survey(source, lambda _: known, sample_shards=MAX_SHARDS)
    report = survey(source, partial(_read_in_time, sample_limit=limit), sample_shards=MAX_SHARDS)
    # What could not be read, or was not come to, may be there the next time.
    if cache and digest and not report.unfinished and all(map(_was_read, report.shards)):
        cache.put(digest, report.shards)
    return report


def _was_read(shard: ShardReport) -> bool:
    return shard.settled or not shard.complete


def _read_in_time(urls: Sequence[str], *, sample_limit: int) -> Iterator[ShardReport]:
    """Read the shards in turn; where none brings a sample, as on a server that is down, the first ones are enough."""
    begun, samples = time.monotonic(), 0
    for report in read_shards(urls, workers=None, sample_limit=sample_limit, silence=SILENCE):
        yield report
        samples += report.samples
        if not samples and time.monotonic() - begun > SILENCE:
            return


def _provide_count(urls: Sequence[str], report: DatasetReport) -> list[str]:
    """Write sizes.json where OpenCLIP would find no count and all samples were read."""
    local = [shard.local for shard in report.shards]
    folders = {path.parent for path in local if path is not None}
    if None in local or len(folders) != 1 or not report.complete or openclip_count(urls) is not None:
        return []
    return write_sizes(report)


def _count_for_openclip(source: str, urls: Sequence[str], held: int | None) -> int:
    count = openclip_count(urls)
    if count:
        return count
    number = "N, the samples of an epoch" if held is None else str(held)
    raise UserError(
        f"OpenCLIP cannot tell how many samples {source} has: give --train-num-samples {number}, or run "
        "`openclip-linattn data check` on the folder, which writes the sizes.json that OpenCLIP reads."
    )


def _usable_counts(urls: Sequence[str], report: DatasetReport) -> dict[str, int]:
    """Usable samples of each shard: counted where it was read whole, else what the files beside it tell."""
    counts = {**shard_counts(urls), **remote_counts(urls)}
    counts.update({shard.url: shard.usable for shard in report.shards if shard.complete})
    return counts


def _check_worker_shares(source: str, counts: Sequence[int | None], loaders: Loaders) -> None:
    """Refuse a set of which some worker may get less than a batch: it would go round its shards for ever."""
    if loaders.resampled:
        return
    share = len(counts) // loaders.world_size // max(1, loaders.workers)
    fewest = sorted(math.inf if count is None else count for count in counts)[:share]
    samples = sum(fewest)
    needed = loaders.batch_size or 1
    if samples >= needed:
        return
    shards = "1 shard" if share == 1 else f"{share} shards"
    raise UserError(
        f"A data-loader worker may get {shards} of {source} with only {int(samples):,} usable samples, less "
        f"than one batch of {needed:,}, and would then wait for ever: use fewer --workers, a smaller "
        "--batch-size, fuller shards, or --dataset-resampled."
    )
