"""Published results: a CSV table and its column map become the table that `collect` makes of run folders."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from openclip_scaling.errors import UserError
from openclip_scaling.reading.column_map import NUMBERS, TEXTS, Source, named_columns, read_column_map
from openclip_scaling.reading.run_rows import training_flop
from openclip_scaling.reading.runs import (
    CHECKPOINT_COLUMNS,
    CURVE_COLUMNS,
    RUN_COLUMNS,
    Collection,
    Notice,
    frame_of,
    read_csv,
)

_TRUTHS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_PROGRESS = ("epoch", "step", "samples_seen", "train_flop")


def read_study(table: Path, columns: Path) -> Collection:
    """The rows of a CSV as checkpoints, in our columns and units; what was left out or assumed in the notices.

    Raises UserError where a file cannot be read, or the map names a column that the table does not have.
    """
    sources = read_column_map(columns)
    texts = [source.column for target, source in sources.items() if target in TEXTS and source.column]
    raw = read_csv(table, texts)
    _check(sources, raw, table, columns)
    notices: list[str] = []
    frame = pd.DataFrame({target: _values(raw, target, source, notices) for target, source in sources.items()
                          if not named_columns(target)}, index=raw.index)  # fmt: skip
    if "run" not in frame:
        notices.append("no column is mapped to run; every row is taken as a run of its own")
        frame["run"] = [f"row {number}" for number in range(1, len(frame) + 1)]
    spread = {target: source for target, source in sources.items() if named_columns(target)}
    frame = _without_nameless(frame, raw, spread, notices)
    if frame.empty:
        raise UserError(f"{table} has no row that can be used ({'; '.join(notices)}).")
    rows = _spread(raw, frame, spread, notices) if spread else _without_repeats(frame, notices)
    _add_compute(rows, notices)
    checkpoints = frame_of(rows.to_dict("records"), CHECKPOINT_COLUMNS)
    _note_missing(checkpoints, [str(name) for name in rows.columns], notices)
    return Collection(
        checkpoints=checkpoints,
        runs=_runs(checkpoints, table),
        curves=frame_of([], CURVE_COLUMNS),
        notices=[Notice(table.name, text) for text in notices],
    )


def _check(sources: Mapping[str, Source], raw: pd.DataFrame, table: Path, columns: Path) -> None:
    if raw.empty:
        raise UserError(f"{table} has no rows.")
    with table.open(encoding="utf-8", errors="replace", newline="") as stream:
        heads = [head.strip("\ufeff \t") for head in next(csv.reader(stream))]
    for target, source in sources.items():
        for name in [*named_columns(target), *([source.column] if source.column is not None else [])]:
            if name not in raw.columns:
                raise UserError(
                    f"{table} has no column {name!r}, which {columns} names for {target}; "
                    f"its columns: {', '.join(map(str, raw.columns))}."
                )
            if heads.count(name) > 1:
                raise UserError(
                    f"{table} has {heads.count(name)} columns called {name!r}; rename all but one."
                )


def _values(raw: pd.DataFrame, target: str, source: Source, notices: list[str]) -> Any:
    """The values of one of our columns: numbers where it is one of numbers or has a factor, else as they are."""
    if source.column is None:
        return source.value
    given = raw[source.column]
    if target == "diverged":
        truths = given.str.strip().str.lower().map(_TRUTHS).astype(object)
        _note_bad(truths.isna() & given.notna(), given, "neither true nor false", notices)
        return truths
    numbers = pd.to_numeric(given, errors="coerce")
    if target in TEXTS or (source.factor is None and target not in NUMBERS and not numbers.notna().any()):
        return given
    _note_bad(numbers.isna() & given.notna(), given, "no numbers", notices)
    return numbers if source.factor is None else numbers * source.factor


def _note_bad(bad: pd.Series[bool], given: pd.Series[Any], what: str, notices: list[str]) -> None:
    if bad.any():
        notices.append(
            f"{int(bad.sum())} values of {given.name!r} are {what} and are left empty, the first in row "
            f"{int(np.flatnonzero(bad)[0]) + 1}: {str(given[bad].iloc[0])[:40]!r}"
        )


def _without_nameless(
    frame: pd.DataFrame, raw: pd.DataFrame, spread: Iterable[str], notices: list[str]
) -> pd.DataFrame:
    """The rows that have a run, and a value for every column that stands in the name of a metric."""
    named = {name: raw[name].isna() for target in spread for name in named_columns(target)}
    for name, missing in {"run": frame["run"].isna(), **named}.items():
        if missing.any():
            notices.append(f"{int(missing.sum())} rows have no {name} and are left out")
            frame = frame[~missing.loc[frame.index]]
    return frame.assign(run=frame["run"].astype(str))


def _without_repeats(frame: pd.DataFrame, notices: list[str]) -> pd.DataFrame:
    repeated = frame.duplicated()
    if repeated.any():
        notices.append(
            f"{int(repeated.sum())} rows equal another one in every mapped column and are left out"
        )
    frame = frame[~repeated]
    place = ["run", *(name for name in _PROGRESS if name in frame)]
    again = frame.duplicated(place)
    if again.any():
        notices.append(
            f"{int(again.sum())} rows have the {', '.join(place)} of another row with other values, and are kept; "
            f"the first is of run {frame['run'][again].iloc[0]!r}"
        )
    return frame.copy()


def _spread(
    raw: pd.DataFrame, frame: pd.DataFrame, spread: Mapping[str, Source], notices: list[str]
) -> pd.DataFrame:
    """Rows that differ in their metrics alone become one row with a column for each metric."""
    places = frame.groupby(list(frame.columns), sort=False, dropna=False).ngroup().to_numpy()
    rows = frame.iloc[np.unique(places, return_index=True)[1]].reset_index(drop=True)
    repeated, columns = 0, dict[str, list[Any]]()
    for target, source in spread.items():
        values = _values(raw, target, source, notices)
        values = pd.Series(values, index=raw.index)[frame.index]
        names = [_filled(target, row) for row in raw.loc[frame.index].to_dict("records")]
        cells: dict[tuple[int, str], Any] = dict(
            zip(zip(places.tolist(), names, strict=True), values, strict=True)
        )
        repeated += len(names) - len(cells)
        for name in dict.fromkeys(names):
            if name in rows or name in columns:
                raise UserError(f"Two entries of the map give the column {name!r}; change one of them.")
            columns[name] = [cells.get((place, name), np.nan) for place in range(len(rows))]
    if repeated:
        notices.append(f"{repeated} results are there more than once; the last one is used")
    return pd.concat([rows, pd.DataFrame(columns)], axis=1)


def _filled(target: str, row: Mapping[Any, Any]) -> str:
    for name in named_columns(target):
        target = target.replace(f"{{{name}}}", str(row[name]))
    return target


def _add_compute(rows: pd.DataFrame, notices: list[str]) -> None:
    if "train_flop" not in rows and {"gmac_per_pair", "samples_seen"} <= set(rows.columns):
        pairs = zip(rows["gmac_per_pair"], rows["samples_seen"], strict=True)
        rows["train_flop"] = [training_flop(gmac, samples) for gmac, samples in pairs]
        notices.append("train_flop is counted as 3 x 2 x gmac_per_pair x 1e9 x samples_seen")


def _note_missing(checkpoints: pd.DataFrame, mapped: Sequence[str], notices: list[str]) -> None:
    for name in mapped:
        missing = int(checkpoints[name].isna().sum())
        if missing:
            notices.append(f"{missing} of {len(checkpoints)} rows have no {name}")


def _runs(checkpoints: pd.DataFrame, table: Path) -> pd.DataFrame:
    """The last row of every run: that with the most samples, where they are known."""
    order = checkpoints.sort_values("samples_seen", kind="stable", na_position="first")
    last = order.groupby("run", sort=False).tail(1).sort_index()
    return frame_of(last.assign(folder=str(table)).to_dict("records"), RUN_COLUMNS)
