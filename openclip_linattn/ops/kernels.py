"""Which implementation of an operator runs: its N x N formula, plain torch by blocks, or a fused Triton kernel.

Triton runs on NVIDIA cards by itself and never on a CPU; plain torch runs everywhere else. The environment
variable OPENCLIP_LINATTN_KERNEL = reference | torch | triton overrides the choice.
"""

import functools
import os
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

from torch import Tensor

from openclip_linattn.errors import UserError
from openclip_linattn.ops.graphs import needs_known_operations
from openclip_linattn.ops.inputs import full_precision, read_tokens, write_output
from openclip_linattn.ops.triton_kernels import supported

VARIABLE = "OPENCLIP_LINATTN_KERNEL"
CHOICES = ("reference", "torch", "triton")
# Read by Triton when it is imported; its interpreter runs kernels on CPU tensors.
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def override() -> str | None:
    """The implementation that the environment asks for, or None. Raises UserError for an unknown one."""
    choice = os.environ.get(VARIABLE)
    if choice and choice not in CHOICES:
        raise UserError(f"{VARIABLE} must be one of {', '.join(CHOICES)}, got {choice!r}")
    return choice or None


def choose(q: Tensor, v: Tensor) -> str:
    """The implementation, "torch" or "triton", that computes an operator for these inputs.

    Shapes: q (B, H, N, D), v (B, H, N, Dv). Raises UserError where Triton is asked for and cannot run.
    """
    return "triton" if _use_triton(q, v) else "torch"


@functools.cache
def implementation(operator: str, kernel: str) -> ModuleType:
    """The module of `torch_kernels` or `triton_kernels` that computes an operator."""
    return import_module(f"openclip_linattn.ops.{kernel}_kernels.{operator}")


def fits(*tensors: Tensor) -> bool:
    """Whether the operators of `library` take these q, k, v: one dtype, and a graph that may be opaque.

    See `graphs.needs_known_operations`.
    """
    return len({x.dtype for x in tensors}) == 1 and not needs_known_operations()


def selectable(fast: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make OPENCLIP_LINATTN_KERNEL=reference compute the N x N formula of the same name instead.

    The formula runs at least in float32, whatever the dtype of the inputs.
    """

    @functools.wraps(fast)
    def operator(
        q: Tensor, k: Tensor, v: Tensor, *, key_padding_mask: Tensor | None = None, **options: Any
    ) -> Tensor:
        if override() != "reference":
            return fast(q, k, v, key_padding_mask=key_padding_mask, **options)
        from openclip_linattn.ops import reference

        tokens = read_tokens(q, k, v, key_padding_mask)
        formula = getattr(reference, fast.__name__)
        with full_precision(v):
            o = formula(tokens.q, tokens.k, tokens.v, key_padding_mask=key_padding_mask, **options)
        return write_output(o, tokens)

    return operator


def _use_triton(q: Tensor, v: Tensor) -> bool:
    asked = override()
    if asked is None:
        return q.is_cuda and supported(q, v)
    if asked == "triton" and not ((q.is_cuda or _INTERPRETED) and supported(q, v)):
        raise UserError(
            f"{VARIABLE}=triton, but no Triton kernel takes {q.dtype} queries on {q.device.type} with heads of "
            f"width {q.shape[-1]} and values of width {v.shape[-1]}; unset it to let the operator choose"
        )
    return asked == "triton"
