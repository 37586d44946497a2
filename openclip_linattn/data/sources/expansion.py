"""Expands one part of a source as OpenCLIP does, and refuses what it would expand otherwise than was meant."""

from __future__ import annotations

import os
import re
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path
from urllib.parse import urlsplit

from braceexpand import braceexpand

from openclip_linattn.data.reading import local_path, scheme_of
from openclip_linattn.data.sources.folders import folder_shards, is_folder, tars
from openclip_linattn.data.sources.patterns import brace_pattern
from openclip_linattn.data.sources.pipe_forms import check_pipe, check_scheme
from openclip_linattn.errors import UserError

MAX_SHARDS = 1_000_000
_VARIABLE = re.compile(r"\$\{(\w+)\}")
_NUMBER_RANGE = re.compile(r"\{\s*(\d+)\s*\.{2,}\s*(\d+)\s*\}")
_BRACES = re.compile(r"\{[^{}]*\}")
_NUMBERS = re.compile(r"\{(-?\d+)\.\.(-?\d+)")
_RANGE = re.compile(r"\{\s*([0-9A-Za-z]+)\s*(?:\.{2,}|…|-|:)\s*([0-9A-Za-z]+)\s*\}")


def expand_part(part: str) -> list[str]:
    """Shards of a folder, a pattern or a command; raises UserError, with the right form, where it is wrong."""
    if not part.strip():
        raise UserError(
            "The source has an empty part beside a `::`: give a pattern on each side, or one only."
        )
    if part != part.strip():
        raise UserError(
            f"The part {part!r} of the source begins or ends with a blank, which OpenCLIP takes as part "
            f"of the name: write {part.strip()!r}."
        )
    if is_folder(part):
        return folder_shards(local_path(part))
    component = substitute(part)
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
    _check_wildcards(component, urls[0])
    return urls


def _check_length(component: str) -> None:
    # braceexpand would first put every number of a range into memory.
    for first, last in _NUMBERS.findall(component):
        if abs(int(last) - int(first)) >= MAX_SHARDS:
            raise UserError(too_long(component))


def too_long(source: str) -> str:
    """The sentence for a source of more than `MAX_SHARDS`."""
    return f"{source} expands to more than {MAX_SHARDS:,} shards: check its ranges."


def substitute(component: str) -> str:
    """`${NAME}` replaced by the environment's WDS_NAME; raises UserError where there is none."""

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


def _check_wildcards(component: str, url: str) -> None:
    if not _has_wildcard(url):
        return
    path = local_path(url)
    # Beside braces these are the shards of the first choice only.
    found = [tar for tar in tars(path.parent) if url == component and fnmatch(Path(tar).name, path.name)]
    hint = f"write {brace_pattern(found)}" if found else "a range is written as {00000..00099}"
    raise UserError(f"OpenCLIP does not expand wildcards as in {component}: {hint}.")


def _has_wildcard(url: str) -> bool:
    scheme, path = scheme_of(url), local_path(url)
    if scheme == "local":  # of an existing file it is a part of the name
        return bool(re.search(r"[*?\[]", path.name)) and not os.path.exists(path)  # noqa: PTH110
    return scheme != "pipe" and "*" in urlsplit(url).path
