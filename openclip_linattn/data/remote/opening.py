"""Opens a remote shard by its scheme."""

from __future__ import annotations

import io
from urllib.parse import urlsplit

from openclip_linattn.data.remote.http import HttpObject
from openclip_linattn.data.remote.resuming import RefusedError, ResumingStream, TransientError
from openclip_linattn.data.remote.stores import StoreObject

_BUFFER = 1 << 16
_PATIENCE = 20.0  # seconds for a question that has another answer


def open_remote(url: str, *, silence: float = 60.0) -> io.BufferedReader:
    """Open an http, https, s3 or gs URL for reading from its first byte to its last.

    Dropped connections, short answers and the statuses of busy servers are tried again from the byte reached, with
    growing waits or the server's own Retry-After; a connection silent for `silence` s counts as dropped. Opening
    and reading raise OSError with one clause ("404 Not Found", "the connection dropped at byte 4,096 after 6
    tries"), also where the object changed meanwhile. Clients of object stores take credentials and endpoints from
    the environment, as their own tools do.
    """
    return io.BufferedReader(ResumingStream(_remote(url, silence).connect), _BUFFER)


def remote_version(url: str) -> str | None:
    """What changes whenever the object does (its ETag, say); None where it cannot be told or reached."""
    try:
        return _remote(url, _PATIENCE).version()
    except (TransientError, RefusedError):
        return None


def _remote(url: str, silence: float) -> HttpObject | StoreObject:
    kind = HttpObject if urlsplit(url).scheme in ("http", "https") else StoreObject
    return kind(url, silence)
