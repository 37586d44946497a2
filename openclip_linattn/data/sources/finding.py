"""Turns a source (what `--train-data` takes) into the list of its shards, exactly as OpenCLIP does.

OpenCLIP splits at `::`, replaces `${NAME}` by the environment's WDS_NAME and expands braces. What it would
fail on later, or in silence, is refused here with the right form. Folders and list files are ours.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

from openclip_linattn.data.reading import local_path, scheme_of
from openclip_linattn.data.sources.expansion import MAX_SHARDS, expand_part, substitute, too_long
from openclip_linattn.data.sources.folders import (
    by_number,
    folder_gaps,
    folder_shards,
    is_folder,
    present,
    tars,
)
from openclip_linattn.data.sources.parts import Part, split
from openclip_linattn.data.sources.patterns import brace_pattern
from openclip_linattn.errors import UserError

_LONGEST_HINT = 2000  # characters of a pattern that a sentence shows


def expand(source: str, *, allow_missing: bool = False) -> list[str]:
    """Shards of `source`, in order: a pattern, a URL, a `pipe:` command, a folder of tars, or several with `::`.

    A file that ends in .txt or .list stands for the sources on its lines (but `#` comments); relative paths in it
    begin at the working directory, as everywhere. Local shards exist; with `allow_missing` those that do not are
    left out. Raises UserError, with the right form, for a source that OpenCLIP could not expand, open or read as
    it was meant.
    """
    expanded = _expand_parts(source)
    urls = _urls(expanded)
    absent = missing_shards(urls)
    if not absent:
        return urls
    if len(absent) == len(urls) or not allow_missing:
        raise UserError(_missing(source, expanded, absent))
    gone = set(absent)
    return [url for url in urls if url not in gone]


def as_pattern(source: str) -> str:
    """`source` in the form that OpenCLIP expands, with and without weights: brace patterns joined by `::`.

    A folder becomes the pattern of its tars, and so do the single shards that a list file names one after the
    other. Variables are replaced, because OpenCLIP does not replace them where it weights sources.
    """
    patterns: list[str] = []
    for single, group in groupby(split(source), key=_is_single):
        texts = [part.text for part in group]
        patterns += [brace_pattern(texts)] if single else map(_pattern, texts)
    return "::".join(patterns)


def find_missing(source: str) -> list[str]:
    """The local shards of `source` that do not exist."""
    return missing_shards(_urls(_expand_parts(source)))


def find_gaps(source: str) -> list[str]:
    """Shards that the folders in `source` seem to lack, by path: gaps in the numbers of their tars, and tars
    of which only the `_stats.json` is there. A pattern or a command says itself what it wants.
    """
    gaps: set[str] = set()
    for part in split(source):
        if is_folder(part.text):
            gaps |= folder_gaps(local_path(part.text))
    return sorted(gaps, key=by_number)


def missing_shards(urls: Iterable[str]) -> list[str]:
    """The local ones among `urls` that do not exist, found with one listing per folder."""
    by_folder: defaultdict[Path, list[str]] = defaultdict(list)
    for url in urls:
        if scheme_of(url) == "local":
            by_folder[local_path(url).parent].append(url)
    absent: list[str] = []
    for folder, members in by_folder.items():
        there = present(folder, {local_path(url).name for url in members})
        absent.extend(url for url in members if local_path(url).name not in there)
    return absent


def _expand_parts(source: str) -> list[tuple[Part, list[str]]]:
    if not source.strip():
        raise UserError("The source of shards is empty: give a pattern such as data/{00000..00099}.tar.")
    expanded = []
    for part in split(source):
        try:
            expanded.append((part, expand_part(part.text)))
        except UserError as error:
            raise part.error(error) from error
    if sum(len(urls) for _, urls in expanded) > MAX_SHARDS:
        raise UserError(too_long(source))
    return expanded


def _urls(expanded: Sequence[tuple[Part, list[str]]]) -> list[str]:
    return [url for _, urls in expanded for url in urls]


def _is_single(part: Part) -> bool:
    """Whether the part is a line that names one shard, and so can be put into one pattern with its neighbors."""
    return part.place is not None and not re.search(r"[{}$\\]", part.text) and not is_folder(part.text)


def _pattern(part: str) -> str:
    return brace_pattern(folder_shards(local_path(part))) if is_folder(part) else substitute(part)


def _missing(source: str, expanded: Sequence[tuple[Part, list[str]]], absent: Sequence[str]) -> str:
    urls = _urls(expanded)
    first = local_path(absent[0])
    part = next(part for part, members in expanded if absent[0] in members)
    if part.place is not None:
        return (
            f"{part.place}: there is no {first} ({len(absent):,} of {len(urls):,} shards of {source} are missing): "
            "fetch what is missing, or take it out of the list."
        )
    if not first.parent.is_dir():
        return f"The folder {first.parent} of {source} does not exist."
    if len(absent) < len(urls):
        return _some_missing(source, urls, absent)
    found = tars(first.parent)
    hint = f": its shards are {brace_pattern(found)}" if found else ", and has no other .tar files."
    return f"{first.parent} has no file {first.name}{hint}"


def _some_missing(source: str, urls: Sequence[str], absent: Sequence[str]) -> str:
    several = ", ..." if len(absent) > 3 else ""
    names = ", ".join(local_path(url).name for url in absent[:3]) + several
    gone = set(absent)
    rest = [url for url in urls if url not in gone]
    pattern = brace_pattern(rest)
    there = f": {pattern}" if len(pattern) <= _LONGEST_HINT else "."
    return (
        f"{len(absent):,} of {len(urls):,} shards of {source} are missing ({names}): fetch them, or name "
        f"the {len(rest):,} that are there{there}"
    )
