"""Triton kernels of the bidirectional operators, one module per kind, below autograd.

Importing this package needs neither Triton nor a GPU; the modules of the kinds need Triton.
"""

import functools

import torch
from torch import Tensor

WIDEST = 128
"""The widest head, of q and k or of v, whose D x Dv state one program keeps in registers."""

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def supported(q: Tensor, v: Tensor) -> bool:
    """Whether the kernels take these inputs: dtype, head widths, Triton (3.4 or later) and the card if it is one.

    Shapes: q (B, H, N, D), v (B, H, N, Dv), both bfloat16, float16 or float32, widths from 1 to 128; on an NVIDIA
    card of compute capability 8.0 (A100) or later, or on a CPU for Triton's interpreter.
    """
    fits = q.dtype in _DTYPES and q.dtype == v.dtype and all(1 <= x.shape[-1] <= WIDEST for x in (q, v))
    # A compiler looks once and for all, and warns of caches.
    compiling = torch.compiler.is_compiling()
    has_triton = _find_triton if compiling else _has_triton
    takes_kernels = _is_capable if compiling else _takes_kernels
    return fits and has_triton() and (not q.is_cuda or takes_kernels(q.device))


def _find_triton() -> bool:
    try:
        import triton
    except ImportError:
        return False
    return tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 4)


def _is_capable(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


_has_triton = functools.cache(_find_triton)
_takes_kernels = functools.cache(_is_capable)
