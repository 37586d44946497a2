"""Sample counts without reading shards: sizes.json, which OpenCLIP reads, and img2dataset's `_stats.json`."""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from openclip_linattn.data.checks.dataset_report import DatasetReport
from openclip_linattn.data.reading import local_path, scheme_of
from openclip_linattn.data.sources import expand
from openclip_linattn.errors import UserError
from openclip_linattn.files import read_json, write_json

SIZES = "sizes.json"
LENGTH = "__len__"


def read_sizes(folder: Path) -> dict[str, int]:
    """Content of the folder's sizes.json, {shard name: samples}; empty where there is none.

    Raises UserError where it is not such a table.
    """
    path = folder / SIZES
    if not path.exists():
        return {}
    value = read_json(path)
    if not isinstance(value, dict) or not all(_is_count(count) for count in value.values()):
        raise UserError(f'{path} must hold sample counts by shard, such as {{"00000.tar": 1000}}.')
    return {name: int(count) for name, count in value.items()}


def shard_counts(urls: Sequence[str]) -> dict[str, int]:
    """Samples of each local shard whose sizes.json or `_stats.json` (its successes) tells them."""
    counts: dict[str, int] = {}
    tables: dict[Path, dict[str, int]] = {}
    for url in urls:
        if scheme_of(url) != "local":
            continue
        path = local_path(url)
        if path.parent not in tables:
            tables[path.parent] = read_sizes(path.parent)
        count = tables[path.parent].get(path.name)
        if count is None:
            count = _successes(path.with_name(f"{path.stem}_stats.json"))
        if count is not None:
            counts[url] = count
    return counts


def sample_count(source: str) -> int | None:
    """Samples of the whole source by sizes.json or `_stats.json`, or None where a shard has neither.

    Nothing but these small files is read. Raises UserError for a wrong source or file.
    """
    urls = expand(source)
    counts = shard_counts(urls)
    return sum(counts[url] for url in urls) if len(counts) == len(set(urls)) else None


def openclip_count(urls: Sequence[str]) -> int | None:
    """The number that OpenCLIP takes without --train-num-samples; None where it finds none.

    It looks into the folder of the first shard only, for every shard's name, and fails on a name that is not
    there: this raises UserError then.
    """
    # A pipe: command is no path, and OpenCLIP takes it for one all the same.
    folder = Path(os.path.dirname(urls[0]))  # noqa: PTH120
    sizes = read_sizes(folder)
    if sizes:
        names = [os.path.basename(url) for url in urls]  # noqa: PTH119
        absent = [name for name in names if name not in sizes]
        if absent:
            raise UserError(
                f"{folder / SIZES} has no entry for {len(absent):,} of {len(urls):,} shards (the first is "
                f"{absent[0]}): run `openclip-linattn data check` on them, or give --train-num-samples."
            )
        return sum(sizes[name] for name in names)
    length = folder / LENGTH
    if not length.exists():
        return None
    try:
        return int(ast.literal_eval(length.read_text(encoding="utf-8").strip()))
    except (ValueError, SyntaxError, TypeError) as error:
        raise UserError(f"{length} must hold one number, the samples of the set.") from error


def write_sizes(report: DatasetReport) -> list[str]:
    """Write the usable samples of the checked local shards into the sizes.json of their folders.

    Shards that could not be read get no entry; those of other shards that still exist are kept. Returns a
    sentence for each folder that could not be written.
    """
    by_folder: dict[Path, dict[str, int]] = {}
    for shard in report.shards:
        if shard.local is not None and shard.settled:
            by_folder.setdefault(shard.local.parent, {})[shard.local.name] = shard.usable
    unwritten = [_write_table(folder, counts) for folder, counts in by_folder.items()]
    return [
        f"{problem}: give --train-num-samples {report.usable} for training."
        for problem in unwritten
        if problem is not None
    ]


def _write_table(folder: Path, counts: Mapping[str, int]) -> str | None:
    try:
        write_json(folder / SIZES, _merged(folder, counts))
    except OSError as error:
        return f"{folder / SIZES} could not be written ({error.strerror or error})"
    return None


def _merged(folder: Path, counts: Mapping[str, int]) -> dict[str, int]:
    try:
        old = read_sizes(folder)
    except UserError:
        old = {}  # a broken table is what this call repairs
    kept = {name: count for name, count in old.items() if (folder / name).exists()}
    return dict(sorted({**kept, **counts}.items()))


def _is_count(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    return (isinstance(value, int) and value >= 0) or (isinstance(value, str) and value.isdecimal())


def _successes(path: Path) -> int | None:
    try:
        stats = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    count = stats.get("successes") if isinstance(stats, dict) else None
    return int(count) if _is_count(count) and count is not None else None
