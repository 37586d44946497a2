"""Remembers the shards' reports, so that a set that has not changed is not read again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from PIL import __version__ as pillow_version

from openclip_linattn.data.checks.shard_report import ShardReport
from openclip_linattn.data.reading import local_path, scheme_of
from openclip_linattn.files import cache_folder, write_json

VERSION = 1
NAME = ".openclip_linattn_check.json"
KEPT = 8


def set_digest(urls: Sequence[str]) -> str | None:
    """SHA-256 over every shard's path, size and time of change; None where a shard is no local file."""
    digest = hashlib.sha256()
    for url in urls:
        if scheme_of(url) != "local":
            return None
        path = local_path(url).absolute()
        try:
            status = path.stat()
        except OSError:
            return None
        digest.update(f"{path}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


class ReportCache:
    """A small file of reports by digest, beside the first shard or else in the user's cache folder."""

    def __init__(self, urls: Sequence[str]) -> None:
        folder = local_path(urls[0]).absolute().parent
        name = hashlib.sha256(str(folder).encode()).hexdigest()[:16]
        self.paths = (folder / NAME, cache_folder() / f"{name}.json")

    def get(self, key: str) -> list[ShardReport] | None:
        """The reports kept under `key`, or None."""
        for path in self.paths:
            with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
                return [ShardReport.from_json(value) for value in _entries(path)[key]]
        return None

    def put(self, key: str, reports: Sequence[ShardReport]) -> None:
        """Keep the reports under `key`; where no file can be written nothing is kept."""
        for path in self.paths:
            with suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                entries = {}
                with suppress(OSError, ValueError, KeyError, TypeError):
                    entries = _entries(path)
                entries.pop(key, None)
                entries[key] = [report.to_json() for report in reports]
                kept = dict(list(entries.items())[-KEPT:])
                write_json(path, {"version": VERSION, "pillow": pillow_version, "reports": kept})
                return


def _entries(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text(encoding="utf-8"))
    if content["version"] != VERSION or content["pillow"] != pillow_version:
        raise ValueError("written by another version, which may have read the images otherwise")
    entries = content["reports"]
    if not isinstance(entries, dict):
        raise TypeError("the reports are no table")
    return entries
