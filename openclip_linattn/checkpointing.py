"""Checkpoints appear whole or not at all, whatever ends the process that writes them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from openclip_linattn.errors import UserError
from openclip_linattn.files import atomic_path


@contextmanager
def atomic_saving() -> Iterator[None]:
    """Makes torch.save write a file beside the one that it is given, and rename it when it is on disk.

    Targets that are no paths are left to torch. Where the file cannot be written, for want of space say, torch.save
    raises UserError and what the path held before stays.
    """
    stock = torch.save

    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(f, (str, os.PathLike)):
            stock(obj, f, *args, **kwargs)
            return
        path = Path(f)
        try:
            with atomic_path(path) as temporary, temporary.open("wb") as file:
                stock(obj, file, *args, **kwargs)
        except (OSError, RuntimeError) as error:
            reason = _system_error(error)
            if reason is None:
                raise
            raise UserError(
                f"the checkpoint {path} could not be written ({reason.strerror or reason}); those before it are "
                "whole: make room, and go on with --resume latest"
            ) from error

    torch.save = save
    try:
        yield
    finally:
        torch.save = stock


def partial_checkpoints(folder: Path) -> list[Path]:
    """The temporary files in a folder of checkpoints: being written now, or left by a process that was killed."""
    return sorted(folder.glob(".*.pt.*.tmp"))


def _system_error(error: BaseException | None) -> OSError | None:
    """The system's own error behind one of torch.save, which hides it where it closes its archive."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error
