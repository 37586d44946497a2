"""One process group at a time works in a run's folder.

The lock is a file beside the folder, for a folder without run.json is no run of ours.
"""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from openclip_linattn.errors import UserError


@contextmanager
def only_process(folder: Path) -> Iterator[None]:
    """Holds the folder of a run for this process; raises UserError where another holds it.

    A second `--resume latest`, for training or evaluation, would take what the first is writing for leftovers, and mix
    its log and record with those of the first. The system gives the lock back however the process ends, and forked
    data-loader workers do not share it. On a file system without locks nothing is held.
    """
    path = folder.with_name(f".{folder.name}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    except OSError as error:
        raise UserError(
            f"{path} cannot be written ({error.strerror or error}): give --logs a folder that can be written"
        ) from error
    with file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            raise UserError(
                f"another process is at work on the run in {folder}: wait for its end, or evaluate one of its "
                f"checkpoints by --resume PATH and another --name. If there is none, on any machine, delete {path}"
            ) from error
        except OSError:  # a file system without locks
            pass
        yield
