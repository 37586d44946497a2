"""Runs a set of clip_benchmark by name with a loaded model."""

import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from openclip_linattn.errors import UserError
from openclip_linattn.zeroshot.benchmarks.metrics import Encoded, benchmark_result, encode_benchmark
from openclip_linattn.zeroshot.benchmarks.sets import Benchmarks, BenchmarkSet, open_benchmark_set
from openclip_linattn.zeroshot.checkpoints import CheckpointError
from openclip_linattn.zeroshot.encoders.embeddings import Classifiers
from openclip_linattn.zeroshot.processes import ALONE, Processes, in_turn
from openclip_linattn.zeroshot.watching import Watch, unwatched

T = TypeVar("T")


class BenchmarkError(UserError):
    """A set of clip_benchmark that could not be evaluated, while others may."""


def run_benchmark(
    classifiers: Classifiers,
    name: str,
    wanted: Benchmarks,
    *,
    processes: Processes = ALONE,
    watch: Watch = unwatched,
) -> dict[str, Any]:
    """Return the result of the task of the set `name` (`benchmark_result`), its items dealt to the processes.

    Nothing is written, so that two checkpoints of one file name cannot overwrite each other's results, and
    nothing is downloaded (`open_benchmark_set`). Raises CheckpointError for features that are not finite, as these
    concern every set, and BenchmarkError for whatever else is wrong.
    """
    opened: list[BenchmarkSet] = []

    def open_once() -> None:
        if not opened:
            opened.append(open_benchmark_set(name, wanted, classifiers.loaded.transform, processes))

    def part() -> list[Encoded]:
        open_once()
        with watch(name, opened[0].n or 0) as advance:
            return encode_benchmark(classifiers, opened[0], processes=processes, advance=advance)

    processes.by_first(lambda: _told(name, open_once))  # some builders unpack what they find
    found = in_turn(processes.collect(lambda: _told(name, part)))
    return _told(name, lambda: benchmark_result(classifiers, opened[0], found, batch_size=wanted.batch_size))


def _told(name: str, work: Callable[[], T]) -> T:
    """Return what `work` returns; raises what `run_benchmark` raises."""
    try:
        return work()
    except CheckpointError:
        raise
    except (Exception, SystemExit) as error:  # its builders raise many kinds, or exit
        reason = _reason(name, error)
        # The error of a worker keeps the iterator over the data in a cycle, which would be collected after
        # its queues and then wait five seconds for each worker that it cannot reach.
        traceback.clear_frames(error.__traceback__)
    raise BenchmarkError(reason)


def data_state(root: str, split: str) -> list[tuple[str, int, int]]:
    """Return name, size and time of what lies in a local root and its folder of the split; deeper is not looked."""
    folders = [folder for folder in (Path(root), Path(root) / split) if folder.is_dir()]
    paths = sorted(path for folder in folders for path in folder.iterdir())
    states = [(path.name, path.stat()) for path in paths if path.exists()]
    return [(name, state.st_size, state.st_mtime_ns) for name, state in states]


def mean_top1(results: Sequence[dict[str, Any]]) -> float | None:
    """Return the mean of top-1 over the sets that have one, each counting the same; None where none has."""
    values = [result["top1"] for result in results if "top1" in result]
    return sum(values) / len(values) if values else None


def _reason(name: str, error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, UserError):
        return f"{name}: {error}"
    # Of a worker's traceback the last line tells.
    told = lines[:1] if len(lines) < 2 else [lines[0], lines[-1]]
    return f"{name}: {type(error).__name__}: {' ... '.join(each[:300] for each in told)}".rstrip(": ")
