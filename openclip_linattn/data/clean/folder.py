"""The folder that is cleaned into: whose it is, what is recorded in it, and one cleaner at a time.

`.clean/settings.json` says what the folder is for, before anything else is written. `.clean/plan/` holds a file
for each input shard, `.clean/sealed.json` their sum, after which the cut into output shards is fixed, and
`.clean/done/` a record for each output shard. `account.json` is written last.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openclip_linattn.data.clean.settings import flag
from openclip_linattn.data.reading import local_path, scheme_of
from openclip_linattn.errors import UserError
from openclip_linattn.files import read_json, write_json

_REMEDY = "give another folder, or delete this one"


@dataclass(frozen=True)
class Folder:
    """Paths in the folder that is cleaned into."""

    out: Path

    @property
    def work(self) -> Path:
        """Where the cleaning keeps its records."""
        return self.out / ".clean"

    @property
    def settings(self) -> Path:
        """What the folder is for."""
        return self.work / "settings.json"

    @property
    def sealed(self) -> Path:
        """The sum of the first pass."""
        return self.work / "sealed.json"

    @property
    def account(self) -> Path:
        """The account, written last."""
        return self.out / "account.json"

    def plan(self, number: int) -> Path:
        """Plan of input shard `number`."""
        return self.work / "plan" / f"{number:06d}.npz"

    def done(self, number: int) -> Path:
        """Record of output shard `number`."""
        return self.work / "done" / f"{number:05d}.json"

    def tar(self, number: int) -> Path:
        """Output shard `number`."""
        return self.out / f"{number:05d}.tar"

    def stats(self, number: int) -> Path:
        """What img2dataset writes beside output shard `number`."""
        return self.out / f"{number:05d}_stats.json"

    def abandon(self) -> None:
        """Remove the records of a cleaning that wrote nothing, so that the folder is free for another.

        The settings go last: ended before that, the folder is still that of the same cleaning.
        """
        self.tidy()
        self.sealed.unlink(missing_ok=True)
        shutil.rmtree(self.work)

    def tidy(self) -> None:
        """Remove what a finished cleaning needs no more."""
        for place in ("plan", "done"):
            shutil.rmtree(self.work / place, ignore_errors=True)


@contextmanager
def claim(out: Path, call: Mapping[str, Any]) -> Iterator[Folder]:
    """Make `out` the folder of `call` ("source", "shards", "settings"), and hold it against other cleaners.

    Raises UserError where it is not empty and not the folder of the same call, lies among the input, or is held.
    """
    folder = Folder(out)
    _check_place(out, call["shards"])
    if not folder.work.is_dir() and out.is_dir() and any(out.iterdir()):
        raise UserError(f"{out} is not empty, and was not cleaned into before: give a new or empty folder.")
    for place in ("plan", "done"):
        (folder.work / place).mkdir(parents=True, exist_ok=True)
    with (folder.work / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"Another cleaning writes into {out}: wait for it, or end it.") from error
        except OSError:
            pass  # a file system without locks
        if folder.settings.exists():
            _check_same(folder, call)
        else:
            write_json(folder.settings, call)
        _sweep(folder)
        yield folder


def _check_place(out: Path, urls: Sequence[str]) -> None:
    there = next(place for place in (out, *out.parents) if place.exists())
    if not there.is_dir():
        raise UserError(f"{there} is a file: give a folder to clean into.")
    resolved = out.resolve()
    inputs = {local_path(url).parent.resolve() for url in urls if scheme_of(url) == "local"}
    for place in inputs & {resolved, *resolved.parents}:
        where = "is" if place == resolved else f"lies in {place},"
        raise UserError(f"{out} {where} a folder of the input: give one outside it.")


def _check_same(folder: Folder, call: Mapping[str, Any]) -> None:
    old = read_json(folder.settings)
    if old.get("version") != call["version"]:
        raise UserError(f"{folder.out} was begun by another version of this command: {_REMEDY}.")
    if old["shards"] != call["shards"]:
        raise UserError(
            f"{folder.out} holds the work on another input ({len(old['shards']):,} shards of {old['source']}; "
            f"here {len(call['shards']):,}): {_REMEDY}."
        )
    there, here = old["settings"], call["settings"]
    differences = [
        f"{flag(name)} {there[name]} there, {here[name]} here" for name in here if there[name] != here[name]
    ]
    if differences:
        raise UserError(
            f"{folder.out} holds work with other flags ({'; '.join(differences)}): {_REMEDY}, or give the same flags."
        )


def _sweep(folder: Folder) -> None:
    """Remove what a killed cleaning left half-written."""
    for place in (folder.out, folder.work, folder.work / "plan", folder.work / "done"):
        with os.scandir(place) as entries:
            names = [entry.name for entry in entries if entry.name[0] == "." and entry.name.endswith(".tmp")]
        for name in names:
            with suppress(FileNotFoundError):
                (place / name).unlink()
