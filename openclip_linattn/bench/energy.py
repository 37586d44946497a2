"""Energy of one run, read from the card's own counter; never a time multiplied by a constant."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from openclip_linattn.bench.timing import Run

METHOD = (
    "NVML's energy counter of the whole board, idle draw included: the run is repeated, and the joules between the "
    "first and the last step of the counter are divided by the runs between them"
)
WINDOW = 0.5
"""Seconds for which a run is repeated where there is time; the counter steps ten times or more in one second."""
GAPLESS = 0.01
"""Seconds of runs that are launched one after the other before the counter is read, so that the card is not idle."""
PATIENCE = 4
"""Times the window after which two steps of the counter are not waited for any longer."""


@dataclass
class EnergyMeter:
    """Joules per run, from a counter of millijoules that rises in steps and a clock in seconds."""

    millijoules: Callable[[], int]
    synchronize: Callable[[], None]
    now: Callable[[], float] = time.perf_counter

    def __call__(self, run: Run, expected: float, window: float = WINDOW) -> float | None:
        """Joules of one run, which takes `expected` seconds and is repeated for `window` seconds.

        None where the counter stepped fewer than twice.
        """
        together = max(1, int(GAPLESS / expected))
        start = self.now()
        previous = self.millijoules()
        steps: list[tuple[int, int]] = []
        runs = 0
        while (elapsed := self.now() - start) < window or (len(steps) < 2 and elapsed < PATIENCE * window):
            for _ in range(together):
                run()
            self.synchronize()
            runs += together
            value = self.millijoules()
            if value != previous:
                steps.append((runs, value))
                previous = value
        if len(steps) < 2:
            return None
        (first_runs, first), (last_runs, last) = steps[0], steps[-1]
        return (last - first) / 1e3 / (last_runs - first_runs)


def energy_meter(device: torch.device) -> EnergyMeter | None:
    """A meter of the device, None where there is no NVML (`pip install 'openclip-linattn[bench]'`) or no counter."""
    if device.type != "cuda" or find_spec("pynvml") is None:
        return None
    nvml: Any = import_module("pynvml")
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except nvml.NVMLError:
        return None
    return EnergyMeter(
        lambda: int(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)),
        lambda: torch.cuda.synchronize(device),
    )
