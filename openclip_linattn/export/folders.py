"""Folders that appear whole or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from openclip_linattn.errors import UserError
from openclip_linattn.files import sync


def check_new(folder: Path) -> None:
    """Raise UserError unless a folder of this name can be made; an empty one may be there."""
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise UserError(f"{folder} exists already; give another --out, or remove it")
    if not folder.parent.is_dir():
        raise UserError(f"the folder {folder.parent} does not exist; make it, or give another --out")


@contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """Yield a new folder beside `folder` that takes its name, on the disk, when the block ends without an error.

    Raises UserError where it cannot be made or written.
    """
    folder = folder.resolve()
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir()
        yield temporary
        for path in (*temporary.iterdir(), temporary):
            sync(path)
        temporary.replace(folder)
        with suppress(OSError):  # FUSE, for one, may refuse for folders
            sync(folder.parent)
    except OSError as error:
        raise UserError(
            f"{folder} cannot be written: {error.strerror or error}; give another --out"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
