"""Signals that end a run: SLURM's before preemption or the time limit, and Ctrl-C.

A signal ends the process from a thread of its own, for the main thread may be waiting in C code for a process that is
gone. OpenCLIP saves at the ends of epochs only, so nothing is gained by letting a step finish: only a checkpoint
that is being written is waited for.
"""

import multiprocessing
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
# SLURM, torchrun and a terminal each pass a signal on, so that it arrives two or three times.
ECHO_SECONDS = 5.0
POLL_SECONDS = 0.05
# A worker or another process may have had the signal first, and fail this process before its own arrives.
LINGER_SECONDS = 1.0


@contextmanager
def ended_by_signals(close: Callable[[signal.Signals], None], busy: Callable[[], bool]) -> Iterator[None]:
    """Ends the process with status 128 + the signal's number where one of SIGNALS arrives within the block.

    Before that it waits while `busy()`, which a second signal cuts short if it is not an echo of the first; calls
    `close(signal)`; and ends the children (data-loader workers). Outside the main thread, where no signals can be
    handled, the block runs as it is.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    watch = _Watch(close, busy)
    try:
        yield
    except Exception:
        watch.linger()
        raise
    finally:
        watch.stop()


def end_children() -> None:
    """Kills this process's children of multiprocessing, data-loader workers among them."""
    for child in multiprocessing.active_children():
        if child.pid is not None:  # by its number: joblib's workers are among them, and have no kill()
            with suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)


class _Watch:
    """The thread, the pipe that the interpreter writes signal numbers to at once, and the handlers before."""

    def __init__(self, close: Callable[[signal.Signals], None], busy: Callable[[], bool]) -> None:
        self._close, self._busy = close, busy
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._arrived = threading.Event()
        self._thread = threading.Thread(target=self._run, name="signals", daemon=True)
        self._thread.start()
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        # Numbers reach the pipe only of signals that have a handler in Python.
        self._before = {each: signal.signal(each, _noted) for each in SIGNALS}
        _watches.append(self)

    def linger(self) -> None:
        """Gives a signal that is on its way the time to arrive, and where one has, does not return."""
        end = time.monotonic() + LINGER_SECONDS
        while self._arrived.is_set() or time.monotonic() < end:
            with suppress(Exception):  # PyTorch raises here for every worker that the signal has ended
                time.sleep(POLL_SECONDS)

    def stop(self) -> None:
        """Goes back to the handlers before; where a signal has arrived this waits for the end of the process."""
        self.restore()
        os.write(self._write, b"\0")
        self._thread.join()
        os.close(self._read)
        os.close(self._write)

    def restore(self) -> None:
        """Goes back to the handlers before."""
        _watches.remove(self)
        signal.set_wakeup_fd(self._wakeup)
        for each, handler in self._before.items():
            signal.signal(each, handler)

    def _run(self) -> None:
        number = None
        while number is None:
            number = self._next(timeout=None)
        if number == 0:
            return
        self._arrived.set()
        try:
            self._wait_until_idle()
            self._end(signal.Signals(number))
        finally:
            os._exit(128 + number)

    def _end(self, number: signal.Signals) -> None:
        try:
            self._close(number)
        except Exception as error:
            print(f"error: {error}", file=sys.stderr)  # noqa: T201 - the last word of the process
        finally:
            end_children()
        sys.stdout.flush()
        sys.stderr.flush()

    def _wait_until_idle(self) -> None:
        first = time.monotonic()
        while self._busy():
            if self._next(POLL_SECONDS) and time.monotonic() - first > ECHO_SECONDS:
                return

    def _next(self, timeout: float | None) -> int | None:
        """The next number of SIGNALS, or 0 where the block has ended; None after `timeout` s or PyTorch's SIGCHLD."""
        ready, _, _ = select.select([self._read], [], [], timeout)
        number = os.read(self._read, 1)[0] if ready else None
        return number if number == 0 or number in SIGNALS else None


_watches: list[_Watch] = []


def _noted(_number: int, _frame: object) -> None:
    """Does nothing: the thread knows already."""


_forking = threading.local()


def _before_a_fork() -> None:
    """Holds signals back until the child has handlers of its own."""
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS) if _watches else None


def _after_a_fork() -> None:
    if _forking.mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _in_the_child() -> None:
    """A forked child, such as a data-loader worker, must not tell its parent of signals of its own.

    SLURM sends SIGUSR1 to all processes of a step; its workers wait for the parent to end them.
    """
    for watch in tuple(_watches):
        watch.restore()
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    _after_a_fork()


os.register_at_fork(before=_before_a_fork, after_in_parent=_after_a_fork, after_in_child=_in_the_child)
