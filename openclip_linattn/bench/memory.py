"""The most memory that a run holds at once, beyond what was there before it."""

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

Result = TypeVar("Result")

METHODS = {
    "cpu": "tensors that a run holds at once beyond inputs and parameters, as torch.profiler records the allocator, "
    "inside custom operators too; what libraries allocate for themselves is not seen",
    "cuda": "tensors that a run holds at once beyond inputs and parameters: torch.cuda.max_memory_allocated, above "
    "what was allocated before the run",
}
_CAPACITY_MESSAGES = ("out of memory", "can't allocate memory", "DefaultCPUAllocator")


def with_peak(run: Callable[[], Result], device: torch.device) -> tuple[Result, int]:
    """The result of a run and the most bytes of tensors that it held at once, results included.

    A dispatch mode would miss what is allocated inside a custom operator; the allocator sees everything.
    """
    return _cuda_peak(run, device) if device.type == "cuda" else _cpu_peak(run)


def out_of_memory(error: RuntimeError) -> bool:
    """True for the errors with which PyTorch refuses an allocation, on a GPU or on a CPU."""
    return isinstance(error, torch.OutOfMemoryError) or any(m in str(error) for m in _CAPACITY_MESSAGES)


def _cuda_peak(run: Callable[[], Result], device: torch.device) -> tuple[Result, int]:
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = run()
    torch.cuda.synchronize(device)
    return result, torch.cuda.max_memory_allocated(device) - before


def _cpu_peak(run: Callable[[], Result]) -> tuple[Result, int]:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler reports every start and stop otherwise
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = run()
    inner: Any = recorded.profiler
    events = [event for event in inner.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return result, peak
