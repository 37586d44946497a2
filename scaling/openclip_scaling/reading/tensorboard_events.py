"""Reads the event files that OpenCLIP leaves in `<run>/tensorboard/` (--report-to tensorboard).

There are `train/loss` and `train/lr` by step, and `val/...` by finished epoch. Every process that was resumed wrote
a file of its own. Needs the package tensorboard.
"""

from __future__ import annotations

import importlib
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from openclip_scaling.reading.history import Evaluation, History, Step, metrics_of

_FILES = "events.out.tfevents*"
_LENGTH = struct.Struct("<Q4x")  # of a record's content, with its checksum; that of the content follows it


class _Scalar(NamedTuple):
    """One value of an event file; step is a finished epoch for `val/...`."""

    time: float
    step: int
    tag: str
    value: float


def event_files(folder: Path) -> list[Path]:
    """The event files of a run, oldest first: their names begin with the time."""
    return sorted((folder / "tensorboard").glob(_FILES))


def read_events(folder: Path, notices: list[str]) -> list[History]:
    """A history for each event file of the run; what cannot be read is said in the notices."""
    files = event_files(folder)
    if not files:
        return []
    try:
        module = importlib.import_module("tensorboard.backend.event_processing.event_file_loader")
    except ImportError:
        notices.append(
            "its tensorboard events are not read, because the package tensorboard is not installed "
            "(pip install 'openclip-linattn[tensorboard]')"
        )
        return []
    return [_history(_scalars(path, module.LegacyEventFileLoader, notices)) for path in files]


def _scalars(path: Path, loader: Any, notices: list[str]) -> Iterator[_Scalar]:
    events = 0
    for event in loader(str(path)).Load():
        events += 1
        for value in event.summary.value:
            if value.HasField("simple_value"):
                yield _Scalar(event.wall_time, event.step, value.tag, value.simple_value)
    # The loader stops in silence at a record that is cut or whose checksum is wrong.
    records = _records(path)
    if events < records:
        notices.append(f"{path.name} is damaged or cut: {events} of {records} records can be read")


def _records(path: Path) -> int:
    """Records of an event file by their lengths, with the one that is cut."""
    count, position, size = 0, 0, path.stat().st_size
    with path.open("rb") as stream:
        while position < size:
            stream.seek(position)
            head = stream.read(_LENGTH.size)
            position += _LENGTH.unpack(head)[0] + _LENGTH.size + 4 if len(head) == _LENGTH.size else size
            count += 1
    return count


def _history(scalars: Iterator[_Scalar]) -> History:
    """Steps and evaluations; the steps before an evaluation are those that were logged before it."""
    steps: dict[int, Step] = {}
    rates: dict[int, float] = {}
    metrics: dict[int, dict[str, float]] = {}
    before: dict[int, int] = {}
    for time, step, tag, value in scalars:
        if tag == "train/loss":
            steps[step] = Step(step, time, value)
        elif tag == "train/lr":
            rates[step] = value
        elif tag.startswith("val/"):
            metrics.setdefault(step, {}).update(metrics_of({tag: value}))
            if steps and step not in before:
                before[step] = next(reversed(steps)) + 1
    return History(
        [replace(item, learning_rate=rates.get(item.step)) for item in steps.values()],
        [Evaluation(epoch, metrics[epoch], before.get(epoch)) for epoch in sorted(metrics)],
    )
