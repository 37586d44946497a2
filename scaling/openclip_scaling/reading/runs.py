"""Collects runs into tables: checkpoints with their evaluations, runs, and training-loss curves."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from joblib import Parallel, cpu_count, delayed

from openclip_scaling.errors import UserError
from openclip_scaling.reading.folders import LOG_NAMES, Place, find_runs
from openclip_scaling.reading.run_rows import RunRows, rows_of

# Columns that describe a checkpoint; every other column of the table is a metric.
RUN_COLUMNS = (
    "run", "model", "attention", "text_attention", "image_parameters", "text_parameters", "parameters",
    "gmac_per_pair", "batch", "val_batch", "learning_rate", "lr_schedule", "seed", "diverged",
)  # fmt: skip
CHECKPOINT_COLUMNS = (
    *RUN_COLUMNS, "epoch", "step", "samples_seen", "unique_samples_bound", "train_flop", "hours", "gpu_hours",
    "train_loss", "train_loss_se",
)  # fmt: skip
CURVE_COLUMNS = ("run", "epoch", "step", "samples_seen", "hours", "train_loss", "learning_rate")
# Below this, one process has read the logs before others have started.
_BYTES_FOR_PROCESSES = 32_000_000


@dataclass(frozen=True)
class Notice:
    """Something that was repaired, assumed or left out while reading a run."""

    run: str
    text: str

    def __str__(self) -> str:
        return f"{self.run}: {self.text}"


@dataclass
class Collection:
    """Three tables (one row per checkpoint, per run, per logged step) and the notices; columns as in `collect`."""

    checkpoints: pd.DataFrame
    runs: pd.DataFrame
    curves: pd.DataFrame
    notices: list[Notice] = field(default_factory=list)


def collect(sources: Sequence[Path], advance: Callable[[int, int], None] | None = None) -> Collection:
    """Read every run among and below `sources`; `advance` is told how many of how many runs are read.

    A row of `checkpoints` is a finished epoch, or an evaluation. What is not known is empty. Its columns:

    - run: the folder's name, with as many parents as tell it from others; model: OpenCLIP's name of the model.
    - attention, text_attention: kinds of the image and the text tower.
    - image_parameters, text_parameters, parameters: of the towers, and of the whole model with what belongs to none.
    - gmac_per_pair: 1e9 multiply-adds of one forward pass on one image-text pair.
    - batch: pairs of an optimizer step, over all processes and accumulation steps; val_batch: those of one process,
      with which OpenCLIP computes the validation loss.
    - learning_rate, lr_schedule, seed: OpenCLIP's --lr, --lr-scheduler and --seed.
    - diverged: True where the training loss ends as NaN or above chance.
    - epoch: finished epochs; step: optimizer steps; samples_seen: image-text pairs that the weights have seen;
      unique_samples_bound: how many of these can be different at most.
    - train_flop: FLOP of training, 3 x 2 x MAC x samples_seen.
    - hours: wall-clock hours of all processes of the run, without the pauses between them but with what was trained
      again; gpu_hours: the same times the GPUs of each process group (one for each process), known where the run's
      device is a GPU.
    - train_loss, train_loss_se: training loss (nats), mean of the last tenth of the logged steps, and its standard
      error.
    - val_loss: validation loss (nats); every other column is a metric by OpenCLIP's name, or dataset/labels/metric
      of `openclip-linattn eval`: accuracies and recalls are fractions.

    A row of `runs` is a run: the same columns at its last checkpoint, with world_size (processes), status (of
    run.json) and folder. A row of `curves` is a logged step: run, epoch (from 0), step, samples_seen, hours,
    train_loss of that step (nats) and learning_rate.

    Raises UserError where a source holds no run, or a file of a run cannot be read.
    """
    places, left_out = find_runs(sources)
    found: list[RunRows] = []
    for rows in _read(places):
        found.append(rows)
        if advance is not None:
            advance(len(found), len(places))
    notices = [Notice(folder, f"this folder is left out: {reason}") for folder, reason in left_out]
    notices += [Notice(rows.name, text) for rows in found for text in rows.notices]
    return Collection(
        checkpoints=frame_of([row for rows in found for row in rows.checkpoints], CHECKPOINT_COLUMNS),
        runs=frame_of([rows.row for rows in found], RUN_COLUMNS),
        curves=_curves(found),
        notices=notices,
    )


def _read(places: Sequence[Place]) -> Iterator[RunRows]:
    """The rows of every run, in order; of many bytes of logs by one process on each core."""
    large = sum(map(_log_bytes, places)) > _BYTES_FOR_PROCESSES
    processes = min(cpu_count(), len(places)) if large else 1
    yield from Parallel(n_jobs=processes, return_as="generator")(delayed(rows_of)(place) for place in places)


def _log_bytes(place: Place) -> int:
    total = 0
    for name in LOG_NAMES:
        with contextlib.suppress(OSError):
            total += (place.folder / name).stat().st_size
    return total


def _curves(found: Sequence[RunRows]) -> pd.DataFrame:
    """The logged steps of all runs; those of each run are given up as they are copied."""
    lengths = [len(rows.curve["epoch"]) for rows in found]
    names = np.repeat(np.array([rows.name for rows in found], dtype=object), lengths)
    columns = {name: np.concatenate([rows.curve.pop(name) for rows in found]) for name in CURVE_COLUMNS[1:]}
    return pd.DataFrame({"run": names, **columns}, copy=False)


def joined(first: Collection, second: Collection) -> Collection:
    """Two collections as one. Raises UserError where both have a run of the same name."""
    shared = set(first.runs["run"]) & set(second.runs["run"])
    if shared:
        raise UserError(f"Two runs are called {min(shared)!r}; rename one of them.")

    def both(name: str) -> pd.DataFrame:
        frames = getattr(first, name), getattr(second, name)
        columns = list(dict.fromkeys(str(column) for frame in frames for column in frame.columns))
        return frame_of([row for frame in frames for row in frame.to_dict("records")], columns)

    curves = second.curves if first.curves.empty else first.curves if second.curves.empty else both("curves")
    return Collection(both("checkpoints"), both("runs"), curves, [*first.notices, *second.notices])


def grouped(notices: Sequence[Notice]) -> list[str]:
    """Every notice once, with the runs that it belongs to."""
    where: dict[str, list[str]] = {}
    for notice in notices:
        where.setdefault(notice.text, []).append(notice.run)
    return [f"{_shortened(names)}: {text}" for text, names in where.items()]


def _shortened(names: Sequence[str]) -> str:
    unique = list(dict.fromkeys(names))
    return ", ".join(unique[:6]) + (f" and {len(unique) - 6} more" if len(unique) > 6 else "")


def frame_of(rows: Sequence[Mapping[Any, Any]], first: Sequence[str]) -> pd.DataFrame:
    """A table of rows, with the columns `first` before all others."""
    columns = list(dict.fromkeys([*first, *(key for row in rows for key in row)]))
    frame = pd.DataFrame(rows, columns=pd.Index(columns))
    for name in frame.columns[frame.isna().all()]:
        frame[name] = np.nan  # one sign for what is not known, as in a table that is read from a file
    return frame


def companion(path: Path, part: str) -> Path:
    """Where the other tables of a collection lie: beside table.csv as table.runs.csv and so on."""
    return path.with_name(f"{path.stem}.{part}")


def save(collection: Collection, path: Path) -> list[Path]:
    """Write the checkpoints to `path` (CSV), and beside it the runs, the curves and the notices."""
    if not path.name or path.is_dir():
        raise UserError(f"{path} is a folder; give the name of a CSV file to write.")
    frames = {
        path: collection.checkpoints,
        companion(path, "runs.csv"): collection.runs,
        companion(path, "curves.csv"): collection.curves,
    }
    for target, frame in frames.items():
        with _appearing(target) as temporary:
            frame.to_csv(temporary, index=False)
    notices = companion(path, "notices.json")
    listed = [{"run": notice.run, "text": notice.text} for notice in collection.notices]
    write_atomically(notices, json.dumps(listed, indent=1))
    return [*frames, notices]


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file under a temporary name beside it, then rename. Raises UserError where it cannot."""
    with _appearing(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def _appearing(path: Path) -> Iterator[Path]:
    """A temporary name beside `path`, which becomes `path` once it is written whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        temporary.replace(path)
    except OSError as error:
        raise UserError(f"Cannot write {path}: {error.strerror}.") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def load(path: Path) -> Collection:
    """Read what `save` wrote; any other CSV of results is a collection of checkpoints alone."""
    runs, curves = companion(path, "runs.csv"), companion(path, "curves.csv")
    notices = companion(path, "notices.json")
    return Collection(
        checkpoints=read_csv(path),
        runs=read_csv(runs) if runs.is_file() else pd.DataFrame(),
        curves=read_csv(curves) if curves.is_file() else pd.DataFrame(),
        notices=_load_notices(notices) if notices.is_file() else [],
    )


def _load_notices(path: Path) -> list[Notice]:
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))
        return [Notice(str(item["run"]), str(item["text"])) for item in listed]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path} does not hold the notices that `collect` writes; collect again.") from error


def read_csv(path: Path, texts: Iterable[str] = ("run",)) -> pd.DataFrame:
    """Read a CSV file; the columns `texts` stay text, so that 001 and 1 are two. Raises UserError when it cannot."""
    kinds = dict.fromkeys(texts, str)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)
            # Without index_col, rows that end with a comma would move every value into the next column.
            frame = pd.read_csv(path, dtype=kinds, index_col=False, low_memory=False)
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror}.") from error
    except pd.errors.ParserWarning as error:
        raise UserError(f"{path} is not a CSV table: its rows have more cells than its head.") from error
    except (pd.errors.EmptyDataError, pd.errors.ParserError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not a CSV table: {str(error).strip().rstrip('.')}.") from error
    return frame.rename(columns=lambda name: str(name).strip())
