"""The shortest brace pattern that stands for a list of shards, gaps in the numbering included."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

_NUMBERED = re.compile(r"^(.*?)(\d+)(\D*)$", re.DOTALL)


def brace_pattern(paths: Sequence[str]) -> str:
    """Pattern that expands to `paths` in the same order, with ranges, choices across gaps, and `::`."""
    split = [_split(path) for path in paths]
    parts = []
    for (head, tail), group in groupby(split, key=lambda item: (item[0], item[2])):
        parts.append(head + _numbers([number for _, number, _ in group]) + tail)
    return "::".join(parts)


def _split(path: str) -> tuple[str, str, str]:
    match = _NUMBERED.match(path)
    head, number, tail = match.groups() if match else (path, "", "")
    return _escape(head), number, _escape(tail)


def _escape(text: str) -> str:
    return re.sub(r"([{}\\])", r"\\\1", text)


def _numbers(numbers: Sequence[str]) -> str:
    runs: list[list[str]] = []
    for number in numbers:
        if runs and _follows(runs[-1][-1], number):
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [run[0] if len(run) == 1 else f"{{{run[0]}..{run[-1]}}}" for run in runs]
    return texts[0] if len(texts) == 1 else "{" + ",".join(texts) + "}"


def _follows(before: str, after: str) -> bool:
    """Whether a range of two ends steps from one to the other: zero-padded numbers keep their width."""
    if not before or not after or int(after) != int(before) + 1:
        return False
    padded = before.startswith("0") and len(before) > 1
    return len(after) == len(before) if padded else not (after.startswith("0") and len(after) > 1)
