"""Reads what wandb keeps on disk: the folder of an offline (or online) run, and exported histories.

A folder `wandb/[offline-]run-DATE_TIME-ID` holds files/output.log, which is OpenCLIP's log from wandb's start on, and,
by version and mode, files/config.yaml and files/wandb-summary.json (the last values only). Its exact history is in
run-ID.wandb, which wandb alone can open: `wandb sync` it, and export the history. An exported history lies in the
run's folder as wandb-history.csv, .json or .jsonl: one row a step, with _step (or Step) and train/loss, and, where they
were exported, _timestamp, train/lr, epoch and val/...; the table of one chart, as wandb's pages give it, is enough.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from openclip_scaling.reading.history import Evaluation, History, Step, metrics_of, number_of
from openclip_scaling.reading.logs import Log, read_log, read_params

RUN_NAME = re.compile(r"^(?:offline-)?run-\d{8}_\d{6}-(?P<id>.+)$")
EXPORTS = ("wandb-history.csv", "wandb-history.jsonl", "wandb-history.json")
_CHART = re.compile(r"^(?P<run>.+) - (?P<tag>(?:train|val)/.+|_\w+|epoch|step)$")


def wandb_params(folders: Iterable[Path], notices: list[str]) -> dict[str, str]:
    """The run's arguments: from the params.txt that OpenCLIP saves with wandb, or from wandb's config.yaml."""
    found: dict[str, str] = {}
    for folder in folders:
        for path in sorted((folder / "files").rglob("params.txt")):
            found.update(read_params(path))
        found.update({key: value for key, value in _config(folder, notices).items() if key not in found})
    return found


def _config(folder: Path, notices: list[str]) -> dict[str, str]:
    path = folder / "files" / "config.yaml"
    if not path.is_file():
        return {}
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8", errors="replace"))
    except yaml.YAMLError:
        content = None
    if not isinstance(content, dict):
        notices.append(f"config.yaml of {folder.name} is no YAML mapping and is not used")
        return {}
    return {
        str(key): str(value["value"])
        for key, value in content.items()
        if isinstance(value, dict) and "value" in value
    }


def read_output(folder: Path) -> Log | None:
    """The console that wandb kept, which holds the lines of out.log; None where there is none."""
    path = folder / "files" / "output.log"
    return read_log(path) if path.is_file() else None


def read_summary(folder: Path, notices: list[str]) -> History:
    """The last values that wandb kept, as a history of one step."""
    path = folder / "files" / "wandb-summary.json"
    if not path.is_file():
        if any(folder.glob("*.wandb")):
            notices.append(
                f"{folder.name} keeps its history in a .wandb file, which only wandb can open: `wandb sync` it and "
                "export the history as wandb-history.csv into the run's folder"
            )
        return History()
    try:
        row = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        row = None
    if not isinstance(row, dict):
        notices.append(f"{path.name} is not a JSON object and is not used")
        return History()
    notices.append(f"of {folder.name} only the last values are known, from {path.name}")
    return history_of([row], summary=True)


def read_export(folder: Path, notices: list[str]) -> History:
    """The exported history in a run's folder; empty where there is none."""
    path = next((folder / name for name in EXPORTS if (folder / name).is_file()), None)
    if path is None:
        return History()
    try:
        rows = _rows(path)
    except (ValueError, csv.Error) as error:
        notices.append(f"{path.name} cannot be read and is not used: {str(error).rstrip('.')}")
        return History()
    history = history_of(rows)
    if not history.steps and not history.evaluations:
        notices.append(
            f"{path.name} has no row with _step and train/loss, nor one with epoch and val/..., and is not used"
        )
    return history


def _rows(path: Path) -> list[Mapping[str, Any]]:
    with path.open(encoding="utf-8", errors="replace", newline="") as stream:
        if path.suffix == ".csv":
            return [_plain(row) for row in csv.DictReader(stream)]
        if path.suffix == ".jsonl":
            content: Any = [json.loads(line) for line in stream if line.strip()]
        else:
            content = json.load(stream)
    if not isinstance(content, list) or not all(isinstance(row, dict) for row in content):
        raise ValueError("it is not a list of objects")
    return content


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row without the names of runs that wandb's pages put before those of the scalars."""
    plain: dict[str, Any] = {}
    runs = set()
    for name, value in row.items():
        if not name:
            continue  # cells behind the last head, and the index that pandas writes
        chart = _CHART.match(name)
        if name == "Step":
            plain["_step"] = value
        elif chart is None:
            plain[name] = value
        elif not chart["tag"].endswith(("__MIN", "__MAX")):
            runs.add(chart["run"])
            plain[chart["tag"]] = value
    if len(runs) > 1:
        raise ValueError(f"it holds {len(runs)} runs; export each into its own run folder")
    return plain


def history_of(rows: Iterable[Mapping[str, Any]], *, summary: bool = False) -> History:
    """Steps and evaluations of rows in wandb's names; in a summary they may be of different times."""
    history = History()
    for row in rows:
        logged, loss = _count(row, "_step"), number_of(row.get("train/loss"))
        step = _count(row, "step", "_step")
        if step is not None and loss is not None:
            history.steps.append(Step(step, _time(row), loss, number_of(row.get("train/lr"))))
        metrics, epoch = metrics_of(row), _count(row, "epoch", "val/epoch")
        if metrics and epoch is not None:
            ended = not summary or (step is not None and logged == step + 1)
            history.evaluations.append(Evaluation(epoch, metrics, logged if ended else None))
    return history


def _count(row: Mapping[str, Any], *names: str) -> int | None:
    values = (number_of(row.get(name)) for name in names)
    return next((int(value) for value in values if value is not None and math.isfinite(value)), None)


def _time(row: Mapping[str, Any]) -> float:
    values = (number_of(row.get(name)) for name in ("_timestamp", "_runtime"))
    return next((value for value in values if value is not None), math.nan)
