"""Keeps result rows, a JSON line for what was asked of a checkpoint, beside the checkpoints."""

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from openclip_linattn.errors import UserError
from openclip_linattn.files import write_text
from openclip_linattn.zeroshot.checkpoints import Checkpoint, CheckpointError

RESULTS_FILE = "zeroshot.jsonl"
Row = dict[str, Any]
RowKey = tuple[str | int | None, ...]


def inputs_digest(
    checkpoint: Checkpoint, precision: str, stamp: object, definition: object
) -> dict[str, Any]:
    """Return what a row depends on: the checkpoint's size and time, and a digest of everything else.

    `stamp` and `definition` are those of its `Question`. A kept row is valid as long as this is equal, so that an
    overwritten epoch_latest.pt, changed images, templates, settings or another precision are evaluated anew. Raises
    CheckpointError where the file is gone, as a run that goes on may delete its older ones.
    """
    try:
        state = checkpoint.path.stat()
    except OSError as error:
        raise CheckpointError(f"{checkpoint.path} is no longer there ({error.strerror})") from error
    settings = sorted(checkpoint.settings.items())
    text = json.dumps([checkpoint.model, settings, precision, stamp, definition], default=str)
    return {
        "checkpoint_size": state.st_size,
        "checkpoint_mtime_ns": state.st_mtime_ns,
        "inputs": hashlib.sha256(text.encode()).hexdigest()[:16],
    }


def row_key(row: Row) -> RowKey:
    """Return what names a row within its results file.

    That is checkpoint, data, label set, an image size that is not that of training, and the training set of a probe.
    The checkpoint counts by its file name there (the file lies beside it), so that a run folder can move.
    """
    size = row["image_size"] if "trained_image_size" in row else None
    training = (str(row["train_data"]),) if "train_data" in row else ()
    return Path(str(row["checkpoint"])).name, str(row["data"]), str(row["label_set"]), size, *training


def by_question(rows: Iterable[Row]) -> list[list[Row]]:
    """Return the rows in groups of one set and label set, and of one training set of a probe."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        key = str(row["data"]), str(row["label_set"]), str(row.get("train_data"))
        groups.setdefault(key, []).append(row)
    return list(groups.values())


def read_rows(folder: Path) -> dict[RowKey, Row]:
    """Return the rows kept in `folder` by key (the later of two); raises UserError for a bad line or file."""
    path = folder / RESULTS_FILE
    if not path.is_file():
        return {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error}); mend it or move it away") from error
    rows = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            rows[row_key(row)] = row
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}: line {number} is not a result row; mend or remove that line") from error
    return rows


def save_rows(folder: Path, rows: Sequence[Row]) -> None:
    """Add `rows` to the results file of `folder`, replacing those of the same key; atomic, raises OSError."""
    with _locked(folder):
        kept = read_rows(folder)
        for row in rows:
            kept.pop(row_key(row), None)
            kept[row_key(row)] = row
        write_text(folder / RESULTS_FILE, "".join(f"{_dumps(row)}\n" for row in kept.values()))


def check_writable(path: Path) -> None:
    """Raise UserError where no file can be written to `path`, before hours are spent on what it is to hold."""
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir():
        raise UserError(f"{path} cannot be written: it is a folder, or the folder around it does not exist")
    if not os.access(folder, os.W_OK):
        raise UserError(f"{path} cannot be written: you may not write into {folder}; name another place")


def write_json(path: Path, rows: Sequence[Row]) -> None:
    """Write all rows to `path` as one JSON list, atomically; raises UserError when it cannot be written."""
    try:
        write_text(path, json.dumps(list(rows), indent=1, allow_nan=False) + "\n")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from error


def _dumps(row: Row) -> str:
    return json.dumps(row, allow_nan=False)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process at a time rewrite the file; two jobs may evaluate checkpoints of one run at once."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems lock no folder
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
