"""The epoch that a checkpoint closes."""

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
    if number is not None or not zipfile.is_zipfile(path):
        return number
    import torch

    try:
        content: Any = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception:  # a zip of something else, which states no epoch
        return None
    epoch = content.get("epoch") if isinstance(content, dict) else None
    return epoch if isinstance(epoch, int) else None
