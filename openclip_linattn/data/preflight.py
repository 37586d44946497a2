"""Looks at the shards in the seconds before training, and refuses what would hang or train on nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from openclip_linattn.data.cache import ReportCache, set_digest
from openclip_linattn.data.check import DatasetReport, check, choose
from openclip_linattn.data.sizes import openclip_count, sample_count, shard_counts, write_sizes
from openclip_linattn.data.sources import as_pattern, expand
from openclip_linattn.errors import UserError

__all__ = ["PreflightResult", "preflight", "sample_count"]

MAX_SHARDS = 16  # larger sets are checked on so many shards
MAX_SAMPLES = 4096  # decoded in all, which takes seconds
MIN_SAMPLES_PER_SHARD = 64
SILENCE = 20.0  # seconds that a pipe: command may take to its next byte


@dataclass(frozen=True)
class PreflightResult:
    """What is known of a set before training on it.

    `pattern` is the source in OpenCLIP's form; `num_samples` the samples of an epoch before rounding; `held`
    the usable samples of the whole set where they are known. `usable_share` is that of the checked samples,
    None where none were checked. `digest` names the very files (local ones only). `warnings` are sentences.
    """

    source: str
    pattern: str
    shards: int
    num_samples: int | None
    held: int | None
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
    accum: int


def preflight(
    source: str,
    *,
    world_size: int,
    workers: int,
    resampled: bool,
    num_samples: int | None = None,
    batch_size: int | None = None,
    accum: int = 1,
    cache: bool = True,
) -> PreflightResult:
    """Check that OpenCLIP can train on `source` with these loaders, within seconds.

    The arguments are OpenCLIP's: `workers` per process, `resampled` (--dataset-resampled), `num_samples`
    (--train-num-samples), `batch_size` per process (None: unknown) and `accum` (--accum-freq). Up to 16
    shards and 4,096 samples are decoded; with `cache` the same files are not read again. A set that was read
    whole gets its sizes.json where `num_samples` is not given and there is none. Raises UserError, one
    sentence a line, where training would hang or fail.
    """
    loaders = Loaders(world_size, workers, resampled, batch_size, accum)
    urls = expand(source)
    if num_samples is not None and num_samples < 1:
        raise UserError(f"--train-num-samples must be at least 1, not {num_samples}.")
    _check_shard_number(source, len(urls), loaders)
    digest = set_digest(urls)
    report = _report(source, urls, digest if cache else None)
    if report.errors:
        raise UserError("\n".join(report.errors))
    notes: list[str] = []
    if num_samples is None:
        notes += _provide_count(urls, report)
        num_samples = _count_for_openclip(source, urls, report)
    counts = _usable_counts(urls, report)
    _check_worker_shares(source, [counts.get(url) for url in urls], loaders)
    _check_steps(num_samples, loaders)
    held = sum(counts[url] for url in urls) if all(url in counts for url in urls) else None
    if held is not None and not resampled and num_samples > held:
        notes.append(f"An epoch of {num_samples:,} samples repeats some of the {held:,} usable ones.")
    return PreflightResult(
        source=source,
        pattern=as_pattern(source),
        shards=len(urls),
        num_samples=num_samples,
        held=held,
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
        return DatasetReport(source, len(urls), known)
    report = check(source, sample_shards=MAX_SHARDS, sample_limit=limit, silence=SILENCE)
    if cache and digest:
        cache.put(digest, report.shards)
    return report


def _provide_count(urls: Sequence[str], report: DatasetReport) -> list[str]:
    """Write sizes.json where OpenCLIP would find no count and all samples were read."""
    local = [shard.local for shard in report.shards]
    folders = {path.parent for path in local if path is not None}
    if None in local or len(folders) != 1 or not report.complete or openclip_count(urls) is not None:
        return []
    return write_sizes(report)


def _count_for_openclip(source: str, urls: Sequence[str], report: DatasetReport) -> int:
    count = openclip_count(urls)
    if count:
        return count
    known = shard_counts(urls)
    if report.complete:
        held: int | None = report.usable
    else:
        held = sum(known[url] for url in urls) if all(url in known for url in urls) else None
    number = "N, the samples of an epoch" if held is None else str(held)
    raise UserError(
        f"OpenCLIP cannot tell how many samples {source} has: give --train-num-samples {number}, or run "
        "`openclip-linattn data check` on the folder, which writes the sizes.json that OpenCLIP reads."
    )


def _usable_counts(urls: Sequence[str], report: DatasetReport) -> dict[str, int]:
    """Usable samples of each shard: counted where it was read whole, else what the files beside it tell."""
    counts = shard_counts(urls)
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


def _check_steps(num_samples: int, loaders: Loaders) -> None:
    """Refuse an epoch that is shorter than one accumulated step, which OpenCLIP would drop in silence."""
    if loaders.batch_size is None or loaders.accum <= 1:
        return
    workers = max(1, loaders.workers)
    batches = -(-num_samples // (loaders.batch_size * loaders.world_size))
    batches = -(-batches // workers) * workers
    if batches < loaders.accum:
        raise UserError(
            f"An epoch of {num_samples:,} samples has {batches} batches, fewer than --accum-freq "
            f"{loaders.accum}, so no step would be made: lower --accum-freq or --batch-size."
        )
