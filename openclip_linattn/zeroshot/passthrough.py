"""Runs clip_benchmark's sets by name with a loaded model; a set that fails does not stop the others."""

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openclip_linattn.errors import UserError
from openclip_linattn.zeroshot.benchmark_sets import Benchmarks, open_benchmark_set
from openclip_linattn.zeroshot.benchmark_tasks import score_benchmark
from openclip_linattn.zeroshot.checkpoints import CheckpointError
from openclip_linattn.zeroshot.embeddings import Classifiers
from openclip_linattn.zeroshot.models import LoadedModel
from openclip_linattn.zeroshot.rows import Row
from openclip_linattn.zeroshot.watching import Watch, unwatched


@dataclass(frozen=True)
class BenchmarkResults:
    """A row for each set that could be evaluated, and for each other set a sentence that says why not."""

    rows: Sequence[Row]
    failures: Mapping[str, str]

    @property
    def averaged(self) -> list[str]:
        """The sets that the mean is over: those with a top-1 accuracy."""
        return [row["dataset"] for row in self.rows if "top1" in row]

    @property
    def mean_top1(self) -> float | None:
        """The mean of top-1 over these sets, each counting the same; None where there is none."""
        values = [row["top1"] for row in self.rows if "top1" in row]
        return sum(values) / len(values) if values else None


def run_benchmarks(loaded: LoadedModel, wanted: Benchmarks, *, watch: Watch = unwatched) -> BenchmarkResults:
    """Evaluate a model on sets of clip_benchmark.

    A row has dataset, data (its root), split and language, and the result of its task (`score_benchmark`).
    Nothing is written, so that two checkpoints of one file name cannot overwrite each other's results, and
    nothing is downloaded (`open_benchmark_set`). Raises UserError where no set is named or the root is
    wrong, and CheckpointError for features that are not finite, as these concern every set.
    """
    names = wanted.names
    classifiers = Classifiers(loaded, watch=watch)
    roots = {name: wanted.folder(name) for name in names}
    rows: list[Row] = []
    failures: dict[str, str] = {}
    for name in names:
        header = {"dataset": name, "data": roots[name], "split": wanted.split, "language": wanted.language}
        try:
            rows.append({**header, **_run(classifiers, name, wanted, watch)})
        except CheckpointError:
            raise
        except (Exception, SystemExit) as error:  # its builders raise many kinds, or exit
            failures[name] = _reason(name, error)
            # The error of a worker keeps the iterator over the data in a cycle, which would be collected after
            # its queues and then wait five seconds for each worker that it cannot reach.
            traceback.clear_frames(error.__traceback__)
    return BenchmarkResults(rows, failures)


def _run(classifiers: Classifiers, name: str, wanted: Benchmarks, watch: Watch) -> dict[str, Any]:
    data = open_benchmark_set(name, wanted, classifiers.loaded.transform)
    with watch(name, data.n or 0) as advance:
        return score_benchmark(classifiers, data, batch_size=wanted.batch_size, advance=advance)


def _reason(name: str, error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, UserError):
        return f"{name}: {error}"
    # Of a worker's traceback the last line tells.
    told = lines[:1] if len(lines) < 2 else [lines[0], lines[-1]]
    return f"{name}: {type(error).__name__}: {' ... '.join(each[:300] for each in told)}".rstrip(": ")
