"""Lets webdataset, and OpenCLIP with it, read remote shards and commands through streams that resume, or give up.

webdataset's own http reader is curl in a pipe: where the connection drops, the rest of the shard is lost with no
more than a warning. It has no reader for s3, and waits for ever for a command that hangs.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

from openclip_linattn.data.pipes import PipeStream
from openclip_linattn.data.remote.opening import open_remote

# What opens each scheme, and the package that it needs; where that is not there, webdataset keeps what it has.
_NEEDS = {"http": "requests", "https": "requests", "s3": "s3fs", "gs": "gcsfs"}
SILENCE = (
    300.0  # seconds that a command may write nothing; the machine may be busy with other things than reading
)
LINGER = 5.0  # seconds that a command may still write when its shard has been read
MAX_FAILURES = 32  # in succession, of one process


def register_readers() -> None:
    """Make webdataset open s3, gs, http, https and pipe shards by streams of ours; twice is the same as once.

    OpenCLIP goes on to the next shard where one fails, round and round. A process that could open none of so many
    in succession therefore ends with status 1. Schemes that the environment hands to AIStore (USE_AIS_FOR) stay
    with it. To be called in every process that makes data loaders; workers that are forked inherit it.
    """
    from webdataset.gopen import gopen_schemes

    taken = os.environ.get("USE_AIS_FOR", "").split(":")
    gopen_schemes["pipe"] = _open_command
    for scheme, package in _NEEDS.items():
        if scheme not in taken and find_spec(package) is not None:
            gopen_schemes[scheme] = _open


class _Attempts:
    """Opens shards, and counts those that failed in succession."""

    def __init__(self) -> None:
        self.failures = 0

    def open(self, url: str, opener: Callable[[], io.BufferedReader]) -> io.BufferedReader:
        """The opened shard, of which the first bytes have come; raises SystemExit where too many have failed."""
        try:
            stream = opener()
            stream.peek(1)
        except OSError as error:
            self.failures += 1
            if self.failures < MAX_FAILURES:
                raise
            raise SystemExit(
                f"error: {self.failures} shards in succession could not be opened, and training would wait for ever; "
                f"the last was {url}: {error}"
            ) from error
        self.failures = 0
        return stream


_attempts = _Attempts()


def _open(url: str, mode: str = "rb", _bufsize: int = 8192, **_options: Any) -> Any:
    if mode != "rb":
        raise ValueError(f"{url}: remote shards are read here, not written")
    return _attempts.open(url, lambda: open_remote(url))


def _open_command(url: str, mode: str = "rb", bufsize: int = 8192, **options: Any) -> Any:
    if mode != "rb":
        from webdataset.gopen import gopen_pipe

        return gopen_pipe(url, mode, bufsize, **options)
    return _attempts.open(url, lambda: io.BufferedReader(_Output(url.removeprefix("pipe:")), 1 << 16))


class _Output(io.RawIOBase):
    """The output of a command; reading its end raises OSError where the command has failed."""

    def __init__(self, command: str) -> None:
        super().__init__()
        self._command = PipeStream(command, silence=SILENCE)
        self._ended = False

    def readable(self) -> bool:
        """True: it can only be read."""
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Fill `buffer` as far as bytes come at once; 0 at the end."""
        if self._ended:
            return 0
        data = self._command.read(len(buffer))
        if not data:
            self._ended = True
            self._command.close()
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """End the command, whose status does not matter any more, as soon as it has nothing more to write."""
        if not self.closed:
            self._command.silence = LINGER
            with suppress(OSError):
                self._command.close()
        super().close()
