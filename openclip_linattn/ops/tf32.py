"""The switch by which PyTorch may round the factors of float32 products on NVIDIA GPUs to TF32, 11 bits."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_MATMUL: Any = torch.backends.cuda.matmul


def tf32_allowed() -> bool:
    """Whether the products of float32 matrices may round, whichever of PyTorch's switches says so."""
    # Since PyTorch 2.9; reading the older switches raises in a program that uses this one.
    if hasattr(_MATMUL, "fp32_precision"):
        return bool(_MATMUL.fp32_precision == "tf32")
    return torch.get_float32_matmul_precision() != "highest"


@contextmanager
def without_tf32(device: torch.device) -> Iterator[None]:
    """On an NVIDIA GPU the products of float32 matrices inside are exact to float32. Not for compiled graphs."""
    if device.type != "cuda" or not tf32_allowed():
        yield
        return
    name = "fp32_precision" if hasattr(_MATMUL, "fp32_precision") else "allow_tf32"
    before = getattr(_MATMUL, name)
    setattr(_MATMUL, name, "ieee" if name == "fp32_precision" else False)
    try:
        yield
    finally:
        setattr(_MATMUL, name, before)
