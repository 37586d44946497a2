"""The two passes that are measured, and the number types."""

import torch

from openclip_linattn.errors import UserError

FORWARD = "forward"
TRAINING = "forward+backward"
PASSES = (FORWARD, TRAINING)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def check_passes(passes: tuple[str, ...]) -> None:
    """Raise UserError unless every pass is one of PASSES."""
    for name in passes:
        if name not in PASSES:
            raise UserError(f"pass must be {FORWARD} or {TRAINING}, got {name!r}")


def dtype_of(name: str) -> torch.dtype:
    """The number type of that name; raises UserError for an unknown one."""
    if name not in DTYPES:
        raise UserError(f"dtype must be one of {', '.join(DTYPES)}, got {name!r}")
    return DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a number type, the inverse of `dtype_of`."""
    return next(name for name, known in DTYPES.items() if known == dtype)
