"""Opens evaluation sets by the names that clip_benchmark gives them, through its own builder."""

import copy
import io
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clip_benchmark.datasets.builder import (
    build_dataset,
    dataset_collection,
    get_dataset_collate_fn,
    get_dataset_default_task,
)

from openclip_linattn.errors import UserError
from openclip_linattn.zeroshot.benchmarks.dealing import dealt_batches
from openclip_linattn.zeroshot.benchmarks.offline import NetworkRefused, no_network
from openclip_linattn.zeroshot.processes import ALONE, Processes
from openclip_linattn.zeroshot.sets.reading import Transform
from openclip_linattn.zeroshot.sets.shards import check_shard_count, count_samples, find_shards

WDS = "wds/"


@dataclass(frozen=True)
class Benchmarks:
    """Which sets of clip_benchmark to evaluate, and how to read them.

    datasets: names (cifar10, wds/NAME, vtab/NAME, ...), names of its collections (vtab, vtab+, retrieval,
    imagenet_robustness, sugar_crepe) and text files with one name per line; root: the folder of the data, in
    which {dataset} stands for a set's name and {dataset_cleaned} for the name with - for /, or for wds/ sets
    an http(s) address; split and language as in clip_benchmark.
    """

    datasets: Sequence[str]
    root: str
    split: str = "test"
    language: str = "en"
    batch_size: int = 64
    workers: int = 0

    @property
    def names(self) -> list[str]:
        """The names of the single sets, each once; raises UserError where there is none."""
        found = [name for given in self.datasets for name in _expand(given)]
        if not found:
            raise UserError("no set of clip_benchmark was named; give one such as cifar10, wds/NAME or vtab+")
        return list(dict.fromkeys(found))

    def folder(self, name: str) -> str:
        """The root of the set `name`."""
        plain = name.removeprefix(WDS)
        try:
            return self.root.format(dataset=plain, dataset_cleaned=plain.replace("/", "-"))
        except (KeyError, IndexError, ValueError) as error:
            raise UserError(
                f"the root {self.root!r} has another placeholder than {{dataset}} and {{dataset_cleaned}}"
            ) from error


@dataclass(frozen=True)
class BenchmarkSet:
    """A set that clip_benchmark built: its task, its dataset object and its number of items, if that is known.

    `batches` are those of this process.
    """

    name: str
    task: str
    dataset: Any
    n: int | None
    batches: Iterator[Any]


def open_benchmark_set(
    name: str, wanted: Benchmarks, transform: Transform, processes: Processes = ALONE
) -> BenchmarkSet:
    """Build the set `name` from the data at its root, its items dealt to the processes (`dealt_batches`).

    Nothing is downloaded, except that a wds/ set is read from its address where the root is one. Raises
    UserError where the data is not there, and whatever else clip_benchmark raises.
    """
    root = wanted.folder(name)
    shards = _local_shards(name, root, wanted.split)
    task = _task(name, root)
    remote = name.startswith(WDS) and "://" in root
    try:
        # It prints to the standard output, where results go.
        with nullcontext() if remote else no_network(), redirect_stdout(io.StringIO()):
            dataset = build_dataset(
                dataset_name=name,
                root=root,
                transform=copy.deepcopy(transform),  # imagenet-w adds a step to it
                split=wanted.split,
                download=False,
                language=wanted.language,
                task=task,
            )
    except NetworkRefused as error:
        raise UserError(f"{_absent(root)}; clip_benchmark would {error} for it") from error
    except RuntimeError as error:
        if "download=True" in str(error):  # torchvision's advice, which is not at hand here
            raise UserError(_absent(root)) from error
        raise
    count = sum(count_samples(shard) for shard in shards) if shards else None
    if not name.startswith(WDS):
        count = len(dataset) if hasattr(dataset, "__len__") else None
    batches = dealt_batches(
        dataset,
        get_dataset_collate_fn(name),
        batch_size=wanted.batch_size,
        workers=wanted.workers,
        processes=processes,
    )
    return BenchmarkSet(name, task, dataset, count, batches)


def _task(name: str, root: str) -> str:
    """Return clip_benchmark's task of a set; it knows retrieval sets by some names only, not by their own mark."""
    mark = Path(root) / "dataset_type.txt"
    if name.startswith(WDS) and mark.is_file() and mark.read_text(encoding="utf-8").split() == ["retrieval"]:
        return "zeroshot_retrieval"
    return str(get_dataset_default_task(name.removeprefix(WDS)))


def _absent(root: str) -> str:
    return f"the data is not all in {root}: fetch it with clip_benchmark's own command, or name its folder"


def _local_shards(name: str, root: str, split: str) -> list[Path]:
    """Return the tars of a local wds/ set, of which clip_benchmark reads as many as nshards.txt says."""
    if not name.startswith(WDS) or "://" in root:
        return []
    folder = Path(root) / split
    if not (folder / "nshards.txt").is_file():
        raise UserError(
            f"{folder / 'nshards.txt'} does not exist; it holds the number of tars, 0.tar, 1.tar, ..."
        )
    _, shards = find_shards(str(folder))
    check_shard_count(shards)
    return shards


def _expand(given: str) -> list[str]:
    if given in dataset_collection:
        return list(dataset_collection[given])
    if Path(given).is_file():
        try:
            lines = Path(given).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{given} cannot be read as a list of sets: {error}") from error
        return [line.strip() for line in lines if line.strip()]
    return [given]
