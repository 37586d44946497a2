"""Runs the two passes: what is left to do of each is shared among processes, and failures are gathered."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress

from openclip_linattn.data.clean.folder import Folder
from openclip_linattn.data.clean.judging import PlanTask, plan_shard
from openclip_linattn.data.clean.sealing import Sealed, read_sealed, seal
from openclip_linattn.data.clean.settings import Settings
from openclip_linattn.data.clean.workers import Unfinished, share
from openclip_linattn.data.clean.writing import Record, cut, plan_runs, read_record, write_run
from openclip_linattn.data.layout import check_part_sizes
from openclip_linattn.errors import UserError

Stage = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
MAX_NAMED = 3
MAX_TRIED = 3
_RUNS_PER_WORKER = 8  # short enough that all workers end at about the same time
_RUN_SHARDS = 8  # input shards of a run: each but the first is read once, and progress shows often enough
_TAR_END = 10_240  # bytes that close a tar, at most


def first_pass(folder: Folder, urls: Sequence[str], settings: Settings, workers: int, stage: Stage) -> Sealed:
    """Judge all input shards that are not judged yet, and drop duplicates.

    Raises UserError where a filter needs a field that the samples do not have, or no sample is kept; Unfinished
    where shards could not be read, after all the others were judged.
    """
    if folder.sealed.exists():
        sealed = read_sealed(folder.sealed)
    else:
        tasks = [PlanTask(url, folder.plan(number), settings) for number, url in enumerate(urls)]
        with stage("Judging", len(tasks)) as advance:
            _check_fields(folder, tasks)
            failures = share(_plan, tasks, workers, lambda _: advance(1))
        _raise(failures)
        sealed = seal(
            folder.sealed, [task.path for task in tasks], deduplicate=settings.deduplicate is not None
        )
    if not sealed.kept:
        folder.abandon()
        reasons = {reason for shard in sealed.shards for reason in shard.dropped}
        why = f" ({', '.join(sorted(reasons))})" if reasons else ""
        raise UserError(f"None of the {sealed.samples:,} samples can be kept{why}: nothing was written.")
    return sealed


def second_pass(
    folder: Folder, sealed: Sealed, settings: Settings, workers: int, stage: Stage
) -> list[Record]:
    """Write all output shards that are not written yet; returns the records of all, in order.

    Raises Unfinished where input shards could not be read or have changed, after all the others were written, or
    the disk has too little room.
    """
    check_part_sizes(sealed.kept, settings.samples_per_shard)
    bounds = cut(sealed.kept, settings.samples_per_shard)
    numbers = range(len(bounds) - 1)
    records = {number: found for number in numbers if (found := read_record(folder, number, sealed.digest))}
    pending = [number for number in numbers if number not in records]
    _check_room(folder, sealed, records, len(pending))
    longest = longest_run(len(pending), len(numbers), sealed, workers)
    runs = list(plan_runs(folder, sealed, settings.resize, bounds, pending, longest))
    with stage("Writing", len(numbers)) as advance:
        advance(len(records))

        def take(written: dict[int, Record]) -> None:
            records.update(written)
            advance(len(written))

        failures = share(write_run, runs, workers, take)
    _raise(failures)
    return [records[number] for number in numbers]


def longest_run(pending: int, outputs: int, sealed: Sealed, workers: int) -> int:
    """Output shards of the longest run."""
    outputs_of_shard = max(1, outputs / len(sealed.shards))
    return min(-(-pending // (workers * _RUNS_PER_WORKER)), math.ceil(_RUN_SHARDS * outputs_of_shard))


def _plan(task: PlanTask) -> None:
    plan_shard(task)  # what it returns is large, and stands in the file


def _check_fields(folder: Folder, tasks: Sequence[PlanTask]) -> None:
    """Raise UserError where no usable sample of the first shard that has some carries the field of a filter.

    Only so many shards are tried: what cannot be read, or has no usable sample, may be the whole input.
    """
    if len(os.listdir(tasks[0].path.parent)) > MAX_TRIED:  # noqa: PTH208 - the names alone
        return  # the pass has begun: its work is not to be given up for a shard that could not be read then
    needed = list(tasks[0].settings.fields())
    for task in tasks[:MAX_TRIED] if needed else ():
        with suppress(Unfinished):
            plan = plan_shard(task)
            if not plan.summary.usable:
                continue
            for name, flag in needed:
                if plan.summary.lacking.get(name) == plan.summary.usable:
                    folder.abandon()
                    seen = f"fields seen: {', '.join(plan.fields)}" if plan.fields else "there is no json"
                    raise UserError(
                        f"{flag} needs the field {name} in the json, which none of the {plan.summary.usable:,} usable "
                        f"samples in {task.url} has; {seen}."
                    )
            return


def _check_room(folder: Folder, sealed: Sealed, written: dict[int, Record], pending: int) -> None:
    kept = sum(shard.kept_bytes for shard in sealed.shards)
    needed = kept - sum(record.bytes for record in written.values()) + pending * _TAR_END
    free = shutil.disk_usage(folder.out).free
    if needed > free:
        raise Unfinished(
            f"The shards to write take about {needed / 1e9:,.3g} GB, and {folder.out} has {free / 1e9:,.3g} GB of "
            "room: free some, and run the same command again to go on."
        )


def _raise(failures: Sequence[str]) -> None:
    if not failures:
        return
    more = f"; and {len(failures) - MAX_NAMED:,} more" if len(failures) > MAX_NAMED else ""
    raise Unfinished(
        f"{len(failures):,} shard{'s' if len(failures) > 1 else ''} could not be done: "
        f"{'; '.join(sorted(failures)[:MAX_NAMED])}{more}. The others are done and stay: run the same command again to "
        "go on."
    )
