"""Compile the kernels that a call launches for compute capability 9.0 (H100, H200), without a GPU.

Imported in a process of its own: there, `install` takes the place of a driver, so that the wrappers in Python
run as they do on a card, up to the launch.
"""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime.jit import JITFunction

ARCHITECTURE = 90
SHARED_LIMIT = 227 * 1024
"""Bytes of shared memory that one program may have on compute capability 9.0."""


class Kernel(NamedTuple):
    name: str
    warps: int
    shared: int
    """Bytes of shared memory."""
    registers: int
    spilled: int
    """Bytes of registers written to memory by a thread."""
    ptx: str


class _Driver:
    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", ARCHITECTURE, 32)


def install() -> list[Kernel]:
    """From now on every launch is compiled instead and appended to the list returned."""
    kernels: list[Kernel] = []
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **options):
        compiled = run(self, *args, grid=grid, warmup=True, **options)
        registers, spilled = _assembled(compiled.asm["ptx"])
        metadata = compiled.metadata
        kernels.append(
            Kernel(
                metadata.name, metadata.num_warps, metadata.shared, registers, spilled, compiled.asm["ptx"]
            )
        )
        return compiled

    triton.runtime.driver.set_active(_Driver())
    JITFunction.run = compile_only
    return kernels


def _assembled(ptx: str) -> tuple[int, int]:
    """Registers and spilled bytes per thread, as the assembler reports them."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [get_ptxas(ARCHITECTURE).path, "-v", f"--gpu-name=sm_{ARCHITECTURE}a", str(source)]
        report = subprocess.run(
            [*command, "-o", str(source.with_suffix(".cubin"))], capture_output=True, text=True, check=True
        ).stderr
    registers = re.search(r"Used (\d+) registers", report)
    spilled = re.search(r"(\d+) bytes spill stores", report)
    assert registers, report
    assert spilled, report
    return int(registers[1]), int(spilled[1])
