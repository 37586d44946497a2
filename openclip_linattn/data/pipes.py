"""Reads the output of a shell command, as webdataset's `pipe:` shards need, without ever waiting for long."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import tempfile
from contextlib import suppress

# webdataset accepts a command that was ended because nobody read on (128 + SIGPIPE).
_ACCEPTED = (0, 128 + signal.SIGPIPE, -signal.SIGPIPE)
_GRACE = 5.0

TIMED_OUT = "the command wrote nothing for"


class PipeStream:
    """The standard output of a shell command, for reading; `silence` is the longest wait for a byte, in s.

    `read` raises OSError when the command stays silent for too long, `close` when it has failed. The command
    reads nothing from our standard input, and is ended with all its children when the stream is closed early.
    """

    def __init__(self, command: str, *, silence: float) -> None:
        self.silence = silence
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the stream
        self._process = subprocess.Popen(
            command,
            shell=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            bufsize=0,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._output = self._process.stdout
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._output, selectors.EVENT_READ)
        self._ended = False
        self._silent = False
        self.bytes_read = 0

    def read(self, size: int = -1, /) -> bytes:
        """At most `size` bytes, as they come; none at the end."""
        self._silent = True  # until it has written; also where a signal ends the wait
        if not self._selector.select(self.silence):
            raise OSError(f"{TIMED_OUT} {self.silence:g} s")
        self._silent = False
        data = os.read(self._output.fileno(), size if size > 0 else 1 << 16)
        self._ended = not data
        self.bytes_read += len(data)
        return data

    def close(self) -> None:
        """End the command; raises OSError with its last words where it ended by itself and failed."""
        if self._output.closed:
            return
        self._drain()
        self._selector.close()
        self._output.close()
        status = self._wait()
        self._errors.seek(0)
        words = self._errors.read()[-2000:].decode(errors="replace").strip().splitlines()
        self._errors.close()
        if self._ended and status not in _ACCEPTED:
            said = f": {words[-1]}" if words else ""
            raise OSError(f"the command failed with exit status {status}{said}")
        if self._ended and not self.bytes_read:
            raise OSError("the command wrote nothing to its standard output")

    def _drain(self) -> None:
        """Read what is left of the padding after a tar, to learn how the command ended."""
        with suppress(OSError):
            for _ in range(64):
                if self._ended or self._silent or not self.read(1 << 16):
                    break

    def _wait(self) -> int:
        if not self._ended:
            self._kill()
        try:
            return self._process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            self._kill()
            return self._process.wait()

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
