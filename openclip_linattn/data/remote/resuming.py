"""A stream that goes on from the byte it had when the connection fails, whatever the protocol."""

from __future__ import annotations

import io
import random
import time
from collections.abc import Callable
from typing import Any, Protocol

TRIES = 6
FIRST_WAIT = 1.0  # seconds, doubled with each try
LONGEST_WAIT = 60.0
PROGRESS = 16 << 20  # bytes after which earlier failures no longer count

# The generators that shuffle and augment must not notice that a connection failed.
_random = random.SystemRandom()


class TransientError(Exception):
    """A failure that another try may mend; `wait` is what the server asked for, in s, where it did."""

    def __init__(self, reason: str, wait: float | None = None) -> None:
        super().__init__(reason)
        self.wait = wait


class RefusedError(Exception):
    """A failure that no other try will mend."""


class Body(Protocol):
    """The rest of an object, as one connection brings it."""

    def read(self, size: int, /) -> bytes:
        """At most `size` bytes, none at the object's end only; raises TransientError and RefusedError."""

    def close(self) -> None:
        """End the connection."""


class ResumingStream(io.RawIOBase):
    """An object from its first byte to its last; `connect(start)` opens the rest of it from byte `start` on.

    A failure that may pass is tried again, with growing waits, at most `TRIES` times within `PROGRESS` bytes.
    The constructor and `read` raise OSError, with what happened and at which byte, where that does not help.
    """

    def __init__(self, connect: Callable[[int], Body]) -> None:
        super().__init__()
        self._connect = connect
        self._body: Body | None = None
        self._position = 0
        self._failures = 0
        self._failed_at = 0
        self._fetch(0)

    def readable(self) -> bool:
        """True: it can only be read."""
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Fill `buffer` as far as bytes come at once; 0 at the end."""
        data = self._fetch(len(buffer))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def close(self) -> None:
        """End the connection."""
        if not self.closed:
            self._disconnect()
        super().close()

    def _fetch(self, size: int) -> bytes:
        while True:
            try:
                if self._body is None:
                    self._body = self._connect(self._position)
                return self._body.read(size) if size else b""
            except TransientError as failure:
                self._disconnect()
                self._back_off(failure)
            except RefusedError as refusal:
                self._disconnect()
                raise OSError(f"{refusal}{self._where()}") from refusal

    def _back_off(self, failure: TransientError) -> None:
        if self._position - self._failed_at >= PROGRESS:
            self._failures, self._failed_at = 0, self._position
        self._failures += 1
        if self._failures >= TRIES:
            raise OSError(f"{failure}{self._where()} after {TRIES} tries") from failure
        wait = failure.wait
        if wait is None:
            # Thousands of readers that fail at one time must not come back at one time.
            wait = FIRST_WAIT * 2 ** (self._failures - 1) * _random.uniform(0.5, 1)
        time.sleep(min(wait, LONGEST_WAIT))

    def _disconnect(self) -> None:
        body, self._body = self._body, None
        if body is not None:
            body.close()

    def _where(self) -> str:
        return f" at byte {self._position:,}" if self._position else ""
