"""Who watches the operators: exporters, tracers and function transforms, which must know every operation."""

from collections.abc import Callable

import torch


def needs_known_operations() -> bool:
    """Whether the graph that is being recorded may hold PyTorch's own operations only.

    An exported or traced graph is read by others, and torch.func differentiates and batches only what it has rules
    for.
    """
    return is_exporting() or is_traced() or _is_transformed()


def is_traced() -> bool:
    """Whether torch.jit.trace records, whose graphs cannot be saved with Python functions in them."""
    traced: Callable[[], bool] = torch.jit.is_tracing  # type: ignore[attr-defined]
    return traced()


def is_exporting() -> bool:
    """Whether torch.export or torch.onnx.export records."""
    # Since PyTorch 2.7.
    exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", bool)
    return torch.onnx.is_in_onnx_export() or exporting()


def _is_transformed() -> bool:
    # There is no public question for it. A compiled graph takes transforms apart before it gets here.
    if torch.compiler.is_compiling():
        return False
    transformed: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", bool)
    return transformed()
