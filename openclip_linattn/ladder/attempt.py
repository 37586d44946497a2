"""Follows a training process to its end."""

import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from openclip_linattn.ladder.failures import Failure, divergence, failure_of
from openclip_linattn.ladder.runs import Run

POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Begin:
    """Where an attempt's own lines begin in a run's out.log and in what its processes print, in bytes."""

    logged: int
    printed: int

    @classmethod
    def of(cls, run: Run) -> "Begin":
        """The ends of both files now."""
        return cls(_size(run.folder / "out.log"), _size(run.console_log))


def followed(
    run: Run, child: "subprocess.Popen[bytes]", begin: Begin, update: Callable[[int], None]
) -> Failure | None:
    """Waits for a training process, calling `update` with the samples seen; returns why it failed, None if it did not.

    A run that diverges is ended.
    """
    while child.poll() is None:
        update(run.samples_seen())
        failure = divergence(run, begin.logged)
        if failure is not None:
            child.terminate()
            child.wait()
            return failure
        time.sleep(POLL_SECONDS)
    return failure_of(run, child.returncode, begin.printed)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
