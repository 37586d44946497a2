"""Keeps code of others from using the network: what it would fetch is refused, and named."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

_COMMANDS = {"subprocess.Popen", "os.system"}
_CONNECTIONS = {"socket.connect", "socket.getaddrinfo"}
_watched: set[int] = set()


class NetworkRefused(RuntimeError):  # noqa: N818 - says what happened
    """Code under `no_network` wanted to run a command or to open a connection."""


@contextmanager
def no_network() -> Iterator[None]:
    """Refuse connections and commands (wget, curl, ...) of this thread: they raise NetworkRefused.

    It is Python's audit hook that sees them, so that it does not matter by which library they come.
    """
    _add_hook()
    thread = threading.get_ident()
    _watched.add(thread)
    try:
        yield
    finally:
        _watched.discard(thread)


@cache
def _add_hook() -> None:
    sys.addaudithook(_refuse)  # once per process: it cannot be taken away again


def _refuse(event: str, args: tuple[Any, ...]) -> None:
    if threading.get_ident() not in _watched:
        return
    if event in _COMMANDS:
        raise NetworkRefused(f"run {_command(event, args)!r}")
    if event in _CONNECTIONS:
        raise NetworkRefused(f"connect to {args[1 if event == 'socket.connect' else 0]!r}")


def _command(event: str, args: tuple[Any, ...]) -> str:
    words = args[0] if event == "os.system" else args[1]
    return words if isinstance(words, str) else str(words[-1] if "-c" in words else " ".join(map(str, words)))
