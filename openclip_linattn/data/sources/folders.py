"""Folders of shards: the tars in them, and those that seem to be missing."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from openclip_linattn.data.reading import local_path, scheme_of
from openclip_linattn.errors import UserError

_MAX_NUMBERS = 1_000_000  # a wider span of names is no numbering


def is_folder(part: str) -> bool:
    """Whether a part of a source is a local folder; a name that ends in .tar is not asked for."""
    if not part or part.endswith(".tar") or scheme_of(part) != "local":
        return False
    return os.path.isdir(local_path(part))  # noqa: PTH112 - False also for a name that is too long


def folder_shards(folder: Path) -> list[str]:
    """The tars in `folder`, by number; raises UserError where it has none or is closed to us."""
    found = tars(folder)
    if not found:
        _listing(folder)  # a glob would be silent about a closed one
        below = sorted({path.parent.name for path in folder.glob("*/*.tar")})
        hint = f": did you mean {folder / below[0]}?" if below else "."
        raise UserError(f"The folder {folder} has no .tar files{hint}")
    return found


def present(folder: Path, names: Iterable[str]) -> set[str]:
    """Those of `names` that stand in `folder`, found with one listing; raises UserError where it is closed to us."""
    try:
        return _listing(folder).intersection(names)
    except UserError:
        if os.path.exists(f"{folder}/."):  # noqa: PTH110 - its files may be read, though not listed
            return {name for name in names if (folder / name).exists()}
        raise


def _listing(folder: Path) -> set[str]:
    try:
        return set(os.listdir(folder))  # noqa: PTH208 - names only: one call
    except (FileNotFoundError, NotADirectoryError):
        return set()
    except OSError as error:
        raise UserError(f"The folder {folder} cannot be read: {error.strerror or error}.") from error


def tars(folder: Path) -> list[str]:
    """The tars in `folder`, by number; none where there is no such folder."""
    return sorted((str(path) for path in folder.glob("*.tar") if path.is_file()), key=by_number)


def folder_gaps(folder: Path) -> set[str]:
    """Shards that `folder` seems to lack: gaps in the numbers of its tars, and tars with only a `_stats.json`."""
    stems = {Path(path).stem for path in tars(folder)}
    wanted = {path.name.removesuffix("_stats.json") for path in folder.glob("*_stats.json")}
    numbers = sorted(int(stem) for stem in stems if stem.isdecimal())
    if len(numbers) == len(stems) and numbers and numbers[-1] - numbers[0] < _MAX_NUMBERS:
        # Padded or not: the width of the shortest name is that of every number it can hold.
        width = min(map(len, stems))
        wanted |= {f"{number:0{width}d}" for number in range(numbers[0], numbers[-1] + 1)}
    return {str(folder / f"{stem}.tar") for stem in wanted - stems}


def by_number(path: str) -> tuple[int, str]:
    """Key for 0.tar, 1.tar, ..., 10.tar rather than 0, 1, 10, 2."""
    stem = Path(path).stem
    return (int(stem) if stem.isdecimal() else -1, path)
