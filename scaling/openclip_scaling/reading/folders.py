"""Finds run folders among and below folders, in one walk that leaves out what OpenCLIP keeps inside a run.

A link to a folder is followed where it leads to a run itself, and no further.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from openclip_scaling.errors import UserError
from openclip_scaling.reading.tensorboard_events import event_files
from openclip_scaling.reading.wandb_files import EXPORTS, RUN_NAME

LOG_NAMES = ("out.log", "out-0", "out-0.log")  # the others are those of --log-local
_RUN_FILES = {*LOG_NAMES, "params.txt", "run.json", *EXPORTS}
_INSIDE = {"checkpoints", "tensorboard", "code"}


@dataclass(frozen=True)
class Place:
    """Where a run lies: its folder, its name, and the folders that wandb kept of it, oldest first.

    A run that only wandb kept has the first of these for its folder.
    """

    folder: Path
    name: str
    wandb: tuple[Path, ...] = ()


@dataclass
class _Found:
    """What one walk finds: run folders, wandb's folders, and what is left out: a folder, and why."""

    runs: dict[Path, None] = field(default_factory=dict)
    wandb: dict[Path, None] = field(default_factory=dict)
    left_out: list[tuple[str, str]] = field(default_factory=list)

    def cannot_read(self, error: OSError) -> None:
        self.left_out.append((str(error.filename), "it cannot be read"))


def find_runs(sources: Iterable[Path]) -> tuple[list[Place], list[tuple[str, str]]]:
    """The runs among and below `sources`, each once, and the folders that are left out, each with the reason.

    Raises UserError where a source holds no run.
    """
    found = _Found()
    for source in sources:
        if not source.is_dir():
            raise UserError(f"{source} is not a folder; give run folders or a folder that holds them.")
        below = _walk(source.resolve())
        if not below.runs and not below.wandb:
            if below.left_out:
                raise UserError(f"No OpenCLIP run in {source}, where {below.left_out[0][0]} cannot be read.")
            raise UserError(
                f"No OpenCLIP run (out.log, params.txt, run.json, tensorboard or wandb) in {source} or below it."
            )
        found.runs.update(dict.fromkeys(sorted(below.runs)))
        found.wandb.update(dict.fromkeys(sorted(below.wandb)))
        found.left_out += below.left_out
    places = _places(found)
    return places, [(printable(folder), reason) for folder, reason in found.left_out]


def _walk(source: Path) -> _Found:
    found = _Found()
    for root, folders, files in os.walk(source, onerror=found.cannot_read):
        path = Path(root)
        if RUN_NAME.match(path.name) and "files" in folders:
            found.wandb[path] = None
            folders.clear()
        elif _is_run(path, [*folders, *files]):
            found.runs[path] = None
            folders[:] = [name for name in folders if name not in _INSIDE]
        links = (path / name for name in folders if (path / name).is_symlink())
        found.runs.update((link.resolve(), None) for link in links if _leads_to_run(link, found))
    return found


def _is_run(folder: Path, names: Sequence[str]) -> bool:
    return not _RUN_FILES.isdisjoint(names) or ("tensorboard" in names and bool(event_files(folder)))


def _leads_to_run(link: Path, found: _Found) -> bool:
    try:
        return _is_run(link, [path.name for path in link.iterdir()])
    except OSError as error:
        found.cannot_read(error)
        return False


def _places(found: _Found) -> list[Place]:
    """Each of wandb's folders belongs to the run that holds it or has its id for a name, or is a run of its own."""
    called: dict[str, list[Path]] = {}
    for folder in found.runs:
        called.setdefault(folder.name, []).append(folder)
    kept: dict[Path, list[Path]] = {folder: [] for folder in found.runs}
    first: dict[tuple[Path, str], Path] = {}
    for folder in sorted(found.wandb, key=_date):
        inside = [parent for parent in folder.parents if parent in found.runs][:1]
        holders = (
            inside or called.get(_id(folder)) or [first.setdefault((folder.parent, _id(folder)), folder)]
        )
        if len(holders) > 1:
            found.left_out.append((str(folder), f"{len(holders)} runs are called {_id(folder)!r}"))
        else:
            kept.setdefault(holders[0], []).append(folder)
    parts = {run: run.parts if run in found.runs else (*run.parts[:-1], _id(run)) for run in kept}
    names = _names(list(parts.values()))
    return [Place(run, name, tuple(kept[run])) for run, name in zip(kept, names, strict=True)]


def _date(folder: Path) -> str:
    return folder.name.removeprefix("offline-")


def _id(folder: Path) -> str:
    match = RUN_NAME.match(folder.name)
    return match["id"] if match else folder.name


def _names(paths: Sequence[tuple[str, ...]]) -> list[str]:
    """The last parts of paths; where two are the same, as many parents as tell them apart."""

    @cache
    def counts(depth: int) -> Counter[tuple[str, ...]]:
        return Counter(parts[-depth:] for parts in paths)

    names = []
    for parts in paths:
        depth = 1
        while counts(depth)[parts[-depth:]] > 1 and depth < len(parts):
            depth += 1
        names.append(printable("/".join(parts[-depth:])))
    return names


def printable(path: Path | str) -> str:
    """A path as text that every file can hold: bytes of its name that are not UTF-8 are replaced."""
    return str(path).encode(errors="surrogateescape").decode(errors="replace")
