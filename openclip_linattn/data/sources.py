"""Turns a source (what `--train-data` takes) into the list of its shards, exactly as OpenCLIP does.

OpenCLIP splits at `::`, replaces `${NAME}` by the environment's WDS_NAME and expands braces. What it would
fail on later, or in silence, is refused here with the right form.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path

from braceexpand import braceexpand

from openclip_linattn.data.patterns import brace_pattern
from openclip_linattn.data.pipe_forms import check_pipe, check_scheme, check_split_pipe
from openclip_linattn.data.reading import local_path, scheme_of
from openclip_linattn.errors import UserError

MAX_SHARDS = 1_000_000
_VARIABLE = re.compile(r"\$\{(\w+)\}")
_NUMBER_RANGE = re.compile(r"\{\s*(\d+)\s*\.{2,}\s*(\d+)\s*\}")
_BRACES = re.compile(r"\{[^{}]*\}")
_NUMBERS = re.compile(r"\{(-?\d+)\.\.(-?\d+)")
_RANGE = re.compile(r"\{\s*([0-9A-Za-z]+)\s*(?:\.{2,}|…|-|:)\s*([0-9A-Za-z]+)\s*\}")


def expand(source: str, *, allow_missing: bool = False) -> list[str]:
    """Shards of `source`, in order: a pattern, several joined by `::`, `pipe:` commands, or a folder of tars.

    Local shards exist; with `allow_missing` those that do not are left out. Raises UserError, with the right
    form, for a source that OpenCLIP could not expand, open or read as it was meant.
    """
    urls = _expand_all(source)
    absent = missing_shards(urls)
    if not absent:
        return urls
    if len(absent) == len(urls) or not allow_missing:
        raise UserError(_missing(source, urls, absent))
    gone = set(absent)
    return [url for url in urls if url not in gone]


def as_pattern(source: str) -> str:
    """`source` in the form that OpenCLIP expands: a folder becomes the brace pattern of the tars in it."""
    return "::".join(
        brace_pattern(_folder_shards(Path(component))) if _is_folder(component) else component
        for component in source.split("::")
    )


def find_missing(source: str) -> list[str]:
    """The local shards of `source` that do not exist."""
    return missing_shards(_expand_all(source))


def find_gaps(source: str) -> list[str]:
    """Shards that the folders in `source` seem to lack, by path: gaps in the numbers of their tars, and tars
    of which only the `_stats.json` is there. A pattern or a command says itself what it wants.
    """
    gaps: set[str] = set()
    for component in source.split("::"):
        if _is_folder(component):
            gaps |= _folder_gaps(Path(component))
    return sorted(gaps, key=_by_number)


def _folder_gaps(folder: Path) -> set[str]:
    stems = {Path(path).stem for path in _tars(folder)}
    wanted = {path.name.removesuffix("_stats.json") for path in folder.glob("*_stats.json")}
    numbers = sorted(int(stem) for stem in stems if stem.isdecimal())
    if len(numbers) == len(stems) and numbers and numbers[-1] - numbers[0] < MAX_SHARDS:
        # Padded or not: the width of the shortest name is that of every number it can hold.
        width = min(map(len, stems))
        wanted |= {f"{number:0{width}d}" for number in range(numbers[0], numbers[-1] + 1)}
    return {str(folder / f"{stem}.tar") for stem in wanted - stems}


def missing_shards(urls: Iterable[str]) -> list[str]:
    """The local ones among `urls` that do not exist, found with one listing per folder."""
    by_folder: defaultdict[Path, list[str]] = defaultdict(list)
    for url in urls:
        if scheme_of(url) == "local":
            by_folder[local_path(url).parent].append(url)
    absent: list[str] = []
    for folder, members in by_folder.items():
        names = set(os.listdir(folder)) if folder.is_dir() else set()  # noqa: PTH208 - names only: one call
        absent.extend(url for url in members if local_path(url).name not in names)
    return absent


def _expand_all(source: str) -> list[str]:
    if not source.strip():
        raise UserError("The source of shards is empty: give a pattern such as data/{00000..00099}.tar.")
    components = source.split("::")
    check_split_pipe(components)
    urls = [url for component in components for url in _expand_component(component, source)]
    if len(urls) > MAX_SHARDS:
        raise UserError(_too_long(source))
    return urls


def _expand_component(component: str, source: str) -> list[str]:
    if not component.strip():
        raise UserError(
            f"{source!r} has an empty part between `::`: give a pattern on each side, or one only."
        )
    if component != component.strip():
        raise UserError(
            f"The part {component!r} of the source begins or ends with a blank, which OpenCLIP takes as part "
            f"of the name: write {component.strip()!r}."
        )
    if _is_folder(component):
        return _folder_shards(Path(component))
    component = _substitute(component)
    if component.startswith("pipe:"):
        check_pipe(component)
    _check_length(component)
    try:
        urls = list(islice(braceexpand(component), MAX_SHARDS + 1))
    except ValueError as error:
        raise UserError(
            f"{component} has unbalanced braces: a range is written as {{00000..00099}}."
        ) from error
    _check_braces(component, urls[0])
    check_scheme(component)
    _check_wildcards(component)
    return urls


def _check_length(component: str) -> None:
    # braceexpand would first put every number of a range into memory.
    for first, last in _NUMBERS.findall(component):
        if abs(int(last) - int(first)) >= MAX_SHARDS:
            raise UserError(_too_long(component))


def _too_long(source: str) -> str:
    return f"{source} expands to more than {MAX_SHARDS:,} shards: check its ranges."


def _substitute(component: str) -> str:
    def value(match: re.Match[str]) -> str:
        name = "WDS_" + match.group(1)
        if name not in os.environ:
            raise UserError(
                f"{component} uses ${{{match.group(1)}}}, which OpenCLIP takes from the environment variable "
                f"{name}: set it, or write the path out."
            )
        return os.environ[name]

    for _ in range(10):  # webdataset's own limit for values that hold variables
        replaced = _VARIABLE.sub(value, component)
        if replaced == component:
            break
        component = replaced
    return component


def _check_braces(component: str, url: str) -> None:
    # Braces of the shell, awk or jq may stand in a command, so there only a range of numbers is suspicious.
    patterns = (_NUMBER_RANGE,) if component.startswith("pipe:") else (_RANGE, _BRACES)
    match = next(filter(None, (pattern.search(url) for pattern in patterns)), None)
    if match is None:
        return
    if match.re is not _BRACES:
        hint = f"write {{{match.group(1)}..{match.group(2)}}}"
    else:
        hint = "a range is written as {00000..00099}, a choice as {train,extra}"
    raise UserError(f"{match.group(0)} in {component} does not expand: {hint}, without blanks.")


def _check_wildcards(component: str) -> None:
    path = local_path(component)
    if scheme_of(component) != "local" or not re.search(r"[*?\[]", path.name) or path.exists():
        return
    found = sorted(str(match) for match in path.parent.glob(path.name)) if path.parent.is_dir() else []
    hint = f"write {brace_pattern(found)}" if found else "a range is written as {00000..00099}"
    raise UserError(f"OpenCLIP does not expand wildcards as in {component}: {hint}.")


def _is_folder(component: str) -> bool:
    return scheme_of(component) == "local" and bool(component) and local_path(component).is_dir()


def _folder_shards(folder: Path) -> list[str]:
    found = _tars(folder)
    if not found:
        below = sorted({path.parent.name for path in folder.glob("*/*.tar")})
        hint = f": did you mean {folder / below[0]}?" if below else "."
        raise UserError(f"The folder {folder} has no .tar files{hint}")
    return found


def _tars(folder: Path) -> list[str]:
    return sorted((str(path) for path in folder.glob("*.tar") if path.is_file()), key=_by_number)


def _by_number(path: str) -> tuple[int, str]:
    """0.tar, 1.tar, ..., 10.tar rather than 0, 1, 10, 2."""
    stem = Path(path).stem
    return (int(stem) if stem.isdecimal() else -1, path)


def _missing(source: str, urls: Sequence[str], absent: Sequence[str]) -> str:
    first = local_path(absent[0])
    several = ", ..." if len(absent) > 3 else ""
    names = ", ".join(local_path(url).name for url in absent[:3]) + several
    if not first.parent.is_dir():
        return f"The folder {first.parent} of {source} does not exist."
    if len(absent) < len(urls):
        gone = set(absent)
        rest = [url for url in urls if url not in gone]
        return (
            f"{len(absent):,} of {len(urls):,} shards of {source} are missing ({names}): fetch them, or name "
            f"the {len(rest):,} that are there: {brace_pattern(rest)}"
        )
    found = _tars(first.parent)
    hint = f": its shards are {brace_pattern(found)}" if found else ", and has no other .tar files."
    return f"{first.parent} has no file {first.name}{hint}"
