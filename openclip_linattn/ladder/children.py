"""The training processes of a ladder, and the folder that they keep for themselves."""

import fcntl
import os
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from openclip_linattn.errors import UserError


class Children:
    """The training processes under way, ended together when the ladder is interrupted."""

    def __init__(self, inherited: Sequence[int] = ()) -> None:
        self._inherited = inherited
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self.closed = False

    def start(
        self, command: Sequence[str], log: Path, environment: Mapping[str, str]
    ) -> "subprocess.Popen[bytes]":
        """Starts a command that writes into `log`, with `environment` added to the present one."""
        log.parent.mkdir(parents=True, exist_ok=True)
        with self._lock, log.open("ab") as output:
            if self.closed:
                raise RuntimeError("the ladder was interrupted")
            child = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                pass_fds=self._inherited,
            )
            self._running.add(child)
        return child

    def ended(self, child: "subprocess.Popen[bytes]") -> None:
        """Forgets a process that has ended."""
        with self._lock:
            self._running.discard(child)

    def terminate(self) -> None:
        """Ends all processes, and lets none be started any more."""
        with self._lock:
            self.closed = True
            for child in self._running:
                child.terminate()


@contextmanager
def locked(folders: set[Path]) -> Iterator[list[int]]:
    """Locks folders of runs for this ladder and its children; yields the locks' file descriptors.

    A child inherits them, so that a folder is in use as long as one that outlived its ladder trains on in it. Raises
    UserError where a folder is in use.
    """
    files = []
    try:
        for folder in sorted(folders):
            folder.mkdir(parents=True, exist_ok=True)
            files.append((folder / ".lock").open("a"))
            try:
                fcntl.flock(files[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UserError(
                    f"another ladder trains in {folder}, or a run that it left behind; wait for it, or end it"
                ) from error
            except OSError:
                pass  # a file system without locks
        yield [file.fileno() for file in files]
    finally:
        for file in files:
            file.close()
