"""Checks shards as OpenCLIP will read them: what is usable, what is lost and why, what stops training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from openclip_linattn.data.checks.dataset_report import DatasetReport
from openclip_linattn.data.checks.shard_report import DIED, ShardReport, check_shard
from openclip_linattn.data.checks.verdicts import VerdictStore
from openclip_linattn.data.identity import identity
from openclip_linattn.data.reading import READABLE, scheme_of
from openclip_linattn.data.shard_pool import DeadProcess, map_unordered
from openclip_linattn.data.sources import expand, find_gaps, find_missing
from openclip_linattn.errors import UserError

__all__ = ["SILENCE", "DatasetReport", "check", "choose", "read_shards", "survey"]

SILENCE = 60.0
MAX_SILENT = 3

Read = tuple[str | None, ShardReport]
Watch = Callable[[ShardReport, bool], None]
Reader = Callable[[Sequence[str]], Iterable[ShardReport]]


def unwatched(report: ShardReport, kept: bool) -> None:
    """Look at no report."""


def check(
    source: str,
    *,
    sample_shards: int | None = None,
    sample_limit: int | None = None,
    workers: int | None = None,
    allow_missing: bool = False,
    silence: float = SILENCE,
    store: VerdictStore | None = None,
    watch: Watch = unwatched,
) -> DatasetReport:
    """Check the shards of `source`, decoding every sample; `watch` sees each shard's report as it comes, and whether
    it was kept from an earlier check.

    With `sample_shards` only that many are read (the first, the last, the others evenly between), and with
    `sample_limit` that many samples of each. `workers` processes share the work (None: this one does it). A
    `pipe:` command may be silent for `silence` seconds; after some that were, no further shard is read. With a
    `store`, what it holds is not read again, and each new report is kept at once. Raises UserError where the
    source itself is wrong, or shards are missing (unless `allow_missing`, which leaves them out).
    """
    if workers is not None and workers < 1:
        raise UserError(f"The number of workers must be at least 1, not {workers}.")
    read = partial(read_shards, workers=workers, sample_limit=sample_limit, silence=silence, store=store)
    return survey(
        source, read, sample_shards=sample_shards, allow_missing=allow_missing, store=store, watch=watch
    )


def survey(
    source: str,
    read: Reader,
    *,
    sample_shards: int | None = None,
    allow_missing: bool = False,
    store: VerdictStore | None = None,
    watch: Watch = unwatched,
) -> DatasetReport:
    """Check `source` as `check` does; `read` is handed the shards that `store` does not hold."""
    listed = expand(source, allow_missing=allow_missing)
    urls = list(dict.fromkeys(listed))
    chosen = choose(urls, sample_shards)
    readable = [url for url in chosen if scheme_of(url) in READABLE]
    found: dict[str, ShardReport] = {}
    for report in store.known(readable) if store is not None else ():
        found[report.url] = report
        watch(report, True)
    for report in read([url for url in readable if url not in found]):
        found[report.url] = report
        watch(report, False)
    return DatasetReport(
        source,
        len(urls),
        [found[url] for url in readable if url in found],
        missing=find_missing(source) if allow_missing else [],
        unread=len(chosen) - len(readable),
        gaps=find_gaps(source),
        repeated=[url for url, times in Counter(listed).items() if times > 1],
        unfinished=[url for url in readable if url not in found],
    )


def choose(urls: Sequence[str], count: int | None) -> list[str]:
    """The first, the last and evenly spaced others of `urls`, `count` in all and in their order."""
    if count is None or count >= len(urls):
        return list(urls)
    if count < 1:
        raise UserError(f"The number of shards to check must be at least 1, not {count}.")
    steps = max(1, count - 1)
    return [urls[place] for place in sorted({round(i * (len(urls) - 1) / steps) for i in range(count)})]


def read_shards(
    urls: Sequence[str],
    *,
    workers: int | None,
    sample_limit: int | None = None,
    silence: float = SILENCE,
    store: VerdictStore | None = None,
) -> Iterator[ShardReport]:
    """Read the shards, keep each report in `store`, and yield it: in the order in which they are done.

    Reading ends early where the first command, or three in succession, wrote nothing for `silence` seconds, and
    where one process after the other dies.
    """
    task = partial(_read, limit=sample_limit, silence=silence)
    silent, read_one = 0, False
    for url, result in map_unordered(task, urls, workers) if workers else _in_turn(task, urls):
        if isinstance(result, DeadProcess):
            yield ShardReport(url, fault=f"{DIED} {result}")
            continue
        identity_, report = result
        if store is not None:
            store.add(identity_, report)
        yield report
        silent = silent + 1 if report.timed_out else 0
        read_one |= not report.timed_out
        if silent >= (MAX_SILENT if read_one else 1):
            return


def _read(url: str, *, limit: int | None, silence: float) -> Read:
    # A shard that changes while it is read has to be read again: its identity is that of before.
    now = identity(url)
    return now, check_shard(url, limit=limit, silence=silence)


def _in_turn(task: Callable[[str], Read], urls: Sequence[str]) -> Iterator[tuple[str, Read]]:
    return ((url, task(url)) for url in urls)
