"""SIGTERM, as from SLURM or `timeout`, ends long work as Ctrl-C does: with its processes."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Terminated(KeyboardInterrupt):
    """The process was told to end by SIGTERM."""


@contextmanager
def terminable() -> Iterator[None]:
    """Within the block SIGTERM raises Terminated."""

    def terminate(*_: object) -> None:
        raise Terminated

    if threading.current_thread() is not threading.main_thread():
        yield  # only there can handlers be set
        return
    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
