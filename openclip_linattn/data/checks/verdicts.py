"""Keeps each shard's report the moment it is there, so that an interrupted check goes on where it stopped.

A store is a folder of JSON lines, one shard a line. Every process appends to a file of its own, so that the tasks of
a cluster share a store (on a file system that all of them see) without waiting for each other.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

from PIL import __version__ as pillow_version

from openclip_linattn.data.checks.shard_report import ShardReport
from openclip_linattn.data.identity import identity
from openclip_linattn.data.reading import local_path, scheme_of
from openclip_linattn.errors import UserError
from openclip_linattn.files import atomic_path, cache_folder

VERSION = 1
FOLDER = ".openclip_linattn_check"
_PREFIX = "verdicts-"
_MERGED = f"{_PREFIX}all.jsonl"
_LOOKUPS = 32  # at once: a remote shard's identity is one request


class VerdictStore:
    """Reports of shards by url and identity, in a folder; only reports that would come out the same are kept."""

    def __init__(self, folder: Path) -> None:
        """Open the store, making its folder; raises UserError where it cannot be written."""
        self.folder = folder
        self._path = folder / f"{_PREFIX}{uuid4().hex}.jsonl"
        unlocked = self._path.with_suffix(".new")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = unlocked.open("a", encoding="utf-8")
            # The lock tells others that the file is still written, so it is there before the file has its name.
            self._locks = _lock(self._file)
            unlocked.rename(self._path)
        except OSError as error:
            raise self._unwritable(error) from error

    def known(self, urls: Sequence[str]) -> Iterator[ShardReport]:
        """Yield the reports of those of `urls` that were kept and have not changed since."""
        entries = self._entries()
        kept = {url: entry for url in urls if (entry := entries.get(_name(url))) is not None}
        with ThreadPoolExecutor(_LOOKUPS) as pool:
            for (url, entry), now in zip(kept.items(), pool.map(identity, kept), strict=True):
                report = _report(entry, url) if entry["identity"] == now else None
                if report is not None:
                    yield report

    def news(self, urls: Sequence[str], offsets: dict[Path, int]) -> Iterator[ShardReport]:
        """Yield the reports of `urls` that came since `offsets`, which are moved on; at first {} is everything."""
        names = {_name(url): url for url in urls}
        for path in self._files():
            for entry in _parse(_new_lines(path, offsets)):
                url = names.get(entry["url"])
                report = _report(entry, url) if url is not None else None
                if report is not None:
                    yield report

    def add(self, identity_: str | None, report: ShardReport) -> None:
        """Keep a report, on the disk before this returns; `identity_` is that of before the shard was read.

        A report that is not settled is left out. Raises UserError where the disk is full.
        """
        if not report.settled:
            return
        try:
            self._file.write(_line(_name(report.url), identity_, report.to_json()))
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._unwritable(error) from error

    def close(self, finished: bool) -> None:
        """Close the store; after a check that `finished`, all that ended processes left becomes one file.

        Then what has no identity, such as the output of a command, is dropped: it may change unseen.
        """
        if finished and self._locks:
            with suppress(OSError), _locked(self.folder / "lock"):
                self._merge()
        with suppress(OSError):  # what could not be written was said when it was added
            self._file.close()
        if self._path.exists() and not self._path.stat().st_size:
            self._path.unlink(missing_ok=True)

    def forget(self) -> None:
        """Drop what was kept before this store was opened."""
        for path in self._files():
            if path != self._path:
                path.unlink(missing_ok=True)

    def _unwritable(self, error: OSError) -> UserError:
        reason = error.strerror or error
        return UserError(f"{self.folder} cannot keep the check's results ({reason}): give --state FOLDER.")

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob(f"{_PREFIX}*.jsonl"), key=_age)

    def _entries(self) -> dict[str, dict[str, Any]]:
        return _read(self._files())

    def _merge(self) -> None:
        paths = [path for path in self._files() if path == self._path or _ended(path)]
        lines = [
            _line(name, entry["identity"], entry["report"])
            for name, entry in _read(paths).items()
            if entry["identity"] is not None
        ]
        merged = self.folder / _MERGED
        with atomic_path(merged) as temporary, temporary.open("w", encoding="utf-8") as file:
            file.writelines(lines)
        for path in paths:
            if path != merged:
                path.unlink(missing_ok=True)


def open_store(urls: Sequence[str], folder: Path | None) -> VerdictStore:
    """The store in `folder`, else beside the first local shard, else in the user's cache folder."""
    if folder is not None:
        return VerdictStore(folder)
    local = next((local_path(url).absolute() for url in urls if scheme_of(url) == "local"), None)
    if local is not None:
        with suppress(UserError):
            return VerdictStore(local.parent / FOLDER)
    place = str(local.parent if local is not None else urls[0].rpartition("/")[0])
    name = hashlib.sha256(place.encode(errors="surrogatepass")).hexdigest()[:16]
    return VerdictStore(cache_folder() / f"check-{name}")


def _name(url: str) -> str:
    return str(local_path(url).absolute()) if scheme_of(url) == "local" else url


def _line(name: str, identity_: str | None, report: dict[str, Any]) -> str:
    entry = {"url": name, "identity": identity_, "version": VERSION, "pillow": pillow_version}
    return json.dumps({**entry, "report": report}, separators=(",", ":"), allow_nan=False) + "\n"


def _read(paths: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """Entries by name, the latest of each."""
    entries: dict[str, dict[str, Any]] = {}
    for path in paths:
        with suppress(FileNotFoundError), path.open("rb") as file:
            entries.update((entry["url"], entry) for entry in _parse(file))
    return entries


def _parse(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The entries of this version; a line that a killed process cut is passed over."""
    for line in lines:
        with suppress(ValueError, TypeError, KeyError):
            entry = json.loads(line)
            if (entry["version"], entry["pillow"]) == (VERSION, pillow_version):
                yield {key: entry[key] for key in ("url", "identity", "report")}


def _report(entry: dict[str, Any], url: str) -> ShardReport | None:
    with suppress(TypeError, KeyError, ValueError):
        return ShardReport.from_json({**entry["report"], "url": url})
    return None


def _new_lines(path: Path, offsets: dict[Path, int]) -> list[bytes]:
    with suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(offsets.get(path, 0))
        whole = file.read().rpartition(b"\n")[0]
        offsets[path] = offsets.get(path, 0) + len(whole)
        return whole.splitlines()
    return []


def _age(path: Path) -> float:
    with suppress(FileNotFoundError):
        return path.stat().st_mtime
    return 0.0


def _ended(path: Path) -> bool:
    """Whether no process writes the file any more."""
    with suppress(OSError), path.open("r+", encoding="utf-8") as file:
        return _lock(file)
    return False


def _lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One merger at a time; raises OSError where another is at it."""
    with path.open("w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
