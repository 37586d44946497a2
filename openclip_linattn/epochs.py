"""Checkpoint files: the epoch that one closes, and whether it is whole."""

import re
import zipfile
from pathlib import Path
from typing import Any


def numbered_epoch(path: Path) -> int | None:
    """N of epoch_N.pt, else None."""
    found = re.fullmatch(r"epoch_([0-9]+)\.pt", path.name)
    return int(found[1]) if found else None


def recorded_epoch(path: Path) -> int | None:
    """N of epoch_N.pt, else the epoch written in the checkpoint, else None."""
    number = numbered_epoch(path)
    return stated_epoch(path) if number is None else number


def stated_epoch(path: Path) -> int | None:
    """The epoch written in a checkpoint; None where it states none, or is no checkpoint."""
    if not zipfile.is_zipfile(path):
        return None
    try:
        content = _mapped(path)
    except Exception:  # a zip of something else, which states no epoch
        return None
    return _epoch(content)


def damage(path: Path) -> str | None:
    """Why a file cannot be loaded as a checkpoint, as a clause; None where it is whole.

    The archive's table, every member's place in the file and all that is not a tensor are read, which takes
    milliseconds for gigabytes; the tensors' bytes are not, so one that has changed is not found.
    """
    try:
        with path.open("rb") as file:
            if not zipfile.is_zipfile(file):
                return "it is cut off, or no file of torch.save"
    except OSError as error:
        return f"it cannot be read: {error.strerror or error}"
    try:
        _mapped(path)
    except Exception as error:
        return f"torch cannot load it: {str(error).split('. ')[0] or type(error).__name__}"
    return None


def training_damage(path: Path) -> str | None:
    """Why a run cannot go on from a checkpoint, as a clause; None where it can, as far as `damage` sees."""
    found = damage(path)
    if found is not None:
        return found
    content = _mapped(path)
    if _epoch(content) is None:
        return "it states no epoch"
    missing = [key for key in ("state_dict", "optimizer") if not isinstance(content.get(key), dict)]
    return f"it has no {missing[0]}" if missing else None


def _mapped(path: Path) -> Any:
    """The content of a checkpoint, its tensors left in the file until they are used."""
    import torch

    return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


def _epoch(content: Any) -> int | None:
    epoch = content.get("epoch") if isinstance(content, dict) else None
    return epoch if isinstance(epoch, int) else None
