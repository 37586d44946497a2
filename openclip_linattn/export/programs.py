"""Towers as torch.export's programs, and those as files that load without this package."""

import io
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram

from openclip_linattn.errors import UserError
from openclip_linattn.export.towers import Tower, first_line

Features = Callable[[Tensor], Tensor]
DESCRIPTION = "export.json"
"""The file that says how to use the others, and the name under which each of them carries the same text."""


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
            program = torch.export.export(
                tower.features, (example,), dynamic_shapes=({0: Dim("batch", min=1)},), strict=False
            )
    except Exception as error:  # what a foreign tower does to the exporter
        raise UserError(f"the {tower.part} tower cannot be exported: {first_line(error)}") from error
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
    for module in program.graph_module.modules():
        for node in getattr(module, "graph", torch.fx.Graph()).nodes:
            node.meta.pop("stack_trace", None)  # names the files of this machine
    return program


def write_torch(program: ExportedProgram, _tower: Tower, path: Path, description: str) -> None:
    """Write the program as a .pt2 file, with the description; raises OSError where the disk does not take it."""
    # In memory first: on a full disk PyTorch's own writer ends the process.
    buffer = io.BytesIO()
    torch.export.save(program, buffer, extra_files={DESCRIPTION: description})
    path.write_bytes(buffer.getbuffer())


def read_torch(path: Path) -> Features:
    """The function in a .pt2 file."""
    module: Features = torch.export.load(path).module()
    return module
