"""Interleaved timing: in every round each candidate runs once, and the order is rotated."""

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Run = Callable[[], Any]

METHODS = {
    "cpu": "time.perf_counter",
    "cuda": "CUDA events on the device; a buffer far beyond L2 is overwritten before every run, which also hides "
    "the time to launch it",
}
_FLUSH_BYTES = 2 << 30  # about half a millisecond on an H200: longer than any operator takes to launch


class CpuClock:
    """Seconds of one run by the host's clock."""

    def __call__(self, run: Run) -> float:
        """Runs once and returns the seconds."""
        start = time.perf_counter()
        result = run()  # freed after the clock is read
        seconds = time.perf_counter() - start
        del result
        return seconds


@dataclass
class CudaClock:
    """Seconds of one run on the device, from cold caches, without the time that the host takes to launch it.

    A tower in training is launched ahead of the device too, so its operators never wait for the host.
    """

    device: torch.device
    _flush: Tensor = field(init=False)

    def __post_init__(self) -> None:
        total = torch.cuda.get_device_properties(self.device).total_memory
        self._flush = torch.empty(min(_FLUSH_BYTES, total // 16), dtype=torch.uint8, device=self.device)

    def __call__(self, run: Run) -> float:
        """Runs once and returns the seconds."""
        start, end = _event(), _event()
        torch.cuda.synchronize(self.device)
        self._flush.zero_()
        start.record()
        result = run()
        end.record()
        torch.cuda.synchronize(self.device)
        del result
        return float(start.elapsed_time(end)) / 1e3


def _event() -> Any:
    create: Any = torch.cuda.Event
    return create(enable_timing=True)


Clock = Callable[[Run], float]


def clock_of(device: torch.device) -> Clock:
    """The clock of a device."""
    return CudaClock(device) if device.type == "cuda" else CpuClock()


def interleave(
    runs: Mapping[str, Run],
    clock: Clock,
    *,
    rounds: int,
    seconds: float,
    expected: Mapping[str, float] | None = None,
) -> dict[str, list[float]]:
    """Seconds of every run in every round that it took part in.

    Each candidate may spend an equal share of `seconds`: a slow one leaves after its share, the others go on to
    `rounds`. A candidate whose `expected` seconds are beyond its share does not run at all.
    """
    names = list(runs)
    share = seconds / max(1, len(names))
    spent = dict.fromkeys(names, 0.0)
    last = dict(expected or {})
    times: dict[str, list[float]] = {name: [] for name in names}
    with _no_collection():
        for number in range(rounds):
            shift = number % max(1, len(names))
            for name in names[shift:] + names[:shift]:
                if spent[name] + last.get(name, 0.0) > share:
                    continue
                began = time.perf_counter()
                times[name].append(clock(runs[name]))
                last[name] = time.perf_counter() - began
                spent[name] += last[name]
    return times


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection inside, which would fall on whoever runs at that moment."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
