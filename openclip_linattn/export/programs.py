"""Towers as torch.export's programs, and those as files that load without this package."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram

from openclip_linattn.errors import UserError
from openclip_linattn.export.towers import Tower

Features = Callable[[Tensor], Tensor]


def export_program(tower: Tower) -> ExportedProgram:
    """The tower as a program for any batch of at least 1, in operations of PyTorch alone.

    Raises UserError where torch.export cannot follow it.
    """
    if not hasattr(torch.compiler, "is_exporting"):
        raise UserError(f"export needs PyTorch 2.7 or newer, and this is {torch.__version__}")
    # A batch of 1 would be taken for a constant. The fused path of stock attention is an operation of its own.
    example = tower.batches[-1]
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            return torch.export.export(
                tower.features, (example,), dynamic_shapes=({0: Dim("batch", min=1)},), strict=False
            )
    except Exception as error:  # what a foreign tower does to the exporter
        raise UserError(f"the {tower.part} tower cannot be exported: {first_line(error)}") from error
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


def first_line(error: BaseException) -> str:
    """The first line of what an error says, or its name where it says nothing."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def write_torch(program: ExportedProgram, _tower: Tower, path: Path) -> None:
    """Write the program as a .pt2 file; raises UserError where the disk does not take it."""
    try:
        torch.export.save(program, path)
    except RuntimeError as error:  # of PyTorch's own writer
        raise UserError(f"{path.name} cannot be written: {first_line(error)}") from error


def read_torch(path: Path) -> Features:
    """The function in a .pt2 file."""
    module: Features = torch.export.load(path).module()
    return module
