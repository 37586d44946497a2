"""The second pass: reads the kept samples again and writes them into output shards of even sizes."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np

from openclip_linattn.data.clean.folder import Folder
from openclip_linattn.data.clean.judging import changed, failed, fingerprint
from openclip_linattn.data.clean.plan import ShardSummary, load_plan
from openclip_linattn.data.clean.repair import repair
from openclip_linattn.data.clean.sealing import Sealed
from openclip_linattn.data.clean.workers import Unfinished
from openclip_linattn.data.layout import shard_stats, write_tar
from openclip_linattn.data.reading import RawSample, ShardLog, read_samples
from openclip_linattn.errors import UserError
from openclip_linattn.files import read_json, write_json


@dataclass
class Record:
    """What was written into one output shard, under the plan with this digest; `bytes` is the tar's size."""

    digest: str
    samples: int = 0
    bytes: int = 0
    resized: int = 0
    json_made: int = 0
    left_out: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """Neighboring output shards, which are written one after the other so that the input is read on.

    `outputs` are (number, samples); `shards` are (plan, summary) of the input shards that hold their samples,
    of which the first `skip` kept ones belong to earlier outputs.
    """

    folder: Folder
    digest: str
    resize: int | None
    outputs: list[tuple[int, int]]
    shards: list[tuple[Path, ShardSummary]]
    skip: int

    @property
    def name(self) -> str:
        """The output shards."""
        first, last = (self.folder.tar(self.outputs[place][0]).name for place in (0, -1))
        return first if first == last else f"{first} to {last}"


def cut(kept: int, per_shard: int) -> list[int]:
    """Where the output shards begin among the kept samples, and the end; their sizes differ by at most 1."""
    shards = -(-kept // per_shard)
    return [kept * number // shards for number in range(shards + 1)] if shards else [0]


def read_record(folder: Folder, number: int, digest: str) -> Record | None:
    """The record of an output shard that was completely written by this plan, None where there is none."""
    try:
        record = Record(**read_json(folder.done(number)))
        whole = folder.tar(number).stat().st_size == record.bytes and folder.stats(number).exists()
    except (UserError, TypeError, OSError):
        return None
    return record if whole and record.digest == digest else None


def plan_runs(
    folder: Folder,
    sealed: Sealed,
    resize: int | None,
    bounds: Sequence[int],
    pending: Sequence[int],
    longest: int,
) -> Iterator[Run]:
    """Put the pending output shards into runs of neighbors, `longest` at most."""
    starts = np.concatenate([[0], np.cumsum([shard.kept for shard in sealed.shards])])
    for outputs in _neighbors(pending, longest):
        first, last = bounds[outputs[0]], bounds[outputs[-1] + 1]
        begin = int(np.searchsorted(starts, first, side="right")) - 1
        end = int(np.searchsorted(starts, last, side="left"))
        shards = [(folder.plan(number), sealed.shards[number]) for number in range(begin, end)]
        sizes = [(number, bounds[number + 1] - bounds[number]) for number in outputs]
        yield Run(folder, sealed.digest, resize, sizes, shards, first - int(starts[begin]))


def write_run(run: Run) -> dict[int, Record]:
    """Write the output shards of a run, and return their records by number; each counts as soon as it is whole.

    Raises Unfinished where an input shard has changed or could not be read.
    """
    with warnings.catch_warnings(), closing(_kept_samples(run)) as samples:
        warnings.simplefilter("ignore")  # Pillow's, as in the first pass
        ahead = _one_ahead(samples)
        return {number: _write_output(run, number, islice(ahead, size)) for number, size in run.outputs}


def _neighbors(numbers: Sequence[int], longest: int) -> Iterator[list[int]]:
    group: list[int] = []
    for number in numbers:
        if group and (number != group[-1] + 1 or len(group) == longest):
            yield group
            group = []
        group.append(number)
    if group:
        yield group


def _write_output(run: Run, number: int, samples: Iterator[RawSample]) -> Record:
    record = Record(run.digest)
    left_out: Counter[str] = Counter()

    def members() -> Iterator[tuple[str, bytes]]:
        for place, sample in enumerate(samples):
            repaired = repair(sample, f"{number:05d}{place:04d}", run.resize)
            yield from repaired.members
            record.samples += 1
            record.resized += repaired.resized
            record.json_made += repaired.json_made
            left_out.update(repaired.left_out)

    tar = run.folder.tar(number)
    write_tar(tar, members())
    write_json(run.folder.stats(number), shard_stats(record.samples))
    record.bytes, record.left_out = tar.stat().st_size, dict(sorted(left_out.items()))
    write_json(run.folder.done(number), asdict(record))
    return record


def _one_ahead(samples: Iterator[RawSample]) -> Iterator[RawSample]:
    """Yield each sample when the next one was read: the end of a shard is checked before its last is written."""
    last = next(samples, None)
    while last is not None:
        following = next(samples, None)
        yield last
        last = following


def _kept_samples(run: Run) -> Generator[RawSample]:
    skip = run.skip
    for plan, summary in run.shards:
        if summary.kept:
            yield from _kept_of_shard(plan, summary, skip)
        skip = 0


def _kept_of_shard(path: Path, summary: ShardSummary, skip: int) -> Generator[RawSample]:
    """The shard's kept samples after the first `skip`, each of them the very one that was judged."""
    url = summary.url
    if changed(url, summary.identity):
        raise _other(url)
    plan = load_plan(path)
    kept = plan.kept
    kept[np.flatnonzero(kept)[:skip]] = False
    log = ShardLog()
    read = 0
    with closing(read_samples(url, log)) as samples:
        for sample in samples:
            same = read < len(kept) and plan.prints[read] == fingerprint(sample)
            if not same:
                break
            if kept[read]:
                yield sample
            read += 1
        else:
            same = read == len(kept)
    # A shard that broke off may have given half a sample, which is no change.
    if failed(log):
        raise Unfinished(f"{url} {log.fault}")
    if not same:
        raise _other(url)


def _other(url: str) -> Unfinished:
    return Unfinished(
        f"{url} has changed since its samples were judged (put it back, or delete the new folder)"
    )
