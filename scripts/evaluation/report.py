"""What every measurement writes: the command, the machine, and rows."""

import os
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

from openclip_linattn.bench.machine import processor
from openclip_linattn.files import write_json


def write_report(folder: Path, name: str, content: dict[str, Any]) -> Path:
    """Write `content` to <folder>/<name>.json below the command and the machine, and return the path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    write_json(path, {"command": command(sys.argv[1:]), "machine": machine(), **content})
    return path


def command(arguments: list[str]) -> str:
    """The command as it can be given elsewhere: of absolute paths the last part stays."""
    shown = [f".../{Path(each).name}" if Path(each).is_absolute() else each for each in arguments]
    return shlex.join(["python", "scripts/measure_evaluation.py", *shown])


def machine() -> dict[str, Any]:
    """Where it was measured."""
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
