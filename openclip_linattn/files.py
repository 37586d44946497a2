"""Files appear whole or not at all: a temporary name beside the target, then a rename."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from openclip_linattn.errors import UserError


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path` and rename it to `path` when the block ends without an error.

    The content is on the disk before it has the name, so that a power cut too leaves the old file or the new one.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        if path.exists():  # a file that is rewritten keeps its permissions
            temporary.chmod(path.stat().st_mode & 0o777)
        sync(temporary)
        temporary.replace(path)
        with suppress(OSError):  # FUSE, for one, may refuse for folders
            sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until the content of a file, or the names in a folder, are on the disk; raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` as UTF-8, atomically."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write `value` to `path` as indented JSON, atomically; NaN and infinity raise ValueError."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Return the content of a JSON file; a file that cannot be read or parsed raises UserError naming it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}): repair or delete it.") from error


def cache_folder() -> Path:
    """The user's cache folder of this package; for a user without a home, as in a container, a temporary one."""
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        home = Path(tempfile.gettempdir()) / f"cache-{os.getuid()}"
    return home / "openclip_linattn"
