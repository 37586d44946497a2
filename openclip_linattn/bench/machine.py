"""The machine that a benchmark runs on: its device, how much memory is free, and what else a reader must know."""

import os
import platform
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from openclip_linattn.bench.passes import dtype_name
from openclip_linattn.errors import UserError
from openclip_linattn.ops.kernels import choose, override
from openclip_linattn.ops.tf32 import tf32_allowed

PEERS = ("triton", "flash-linear-attention", "linear-attention-transformer")


def find_device(name: str) -> torch.device:
    """The device of a name (auto, cpu, cuda, cuda:1, ...), made current; raises UserError where it is missing."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"--device must be auto, cpu, cuda or cuda:1, got {name!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"--device must be auto, cpu, cuda or cuda:1, got {name!r}")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if not torch.cuda.is_available() or (device.index or 0) >= count:
            raise UserError(f"--device {name}: PyTorch finds {count} CUDA devices here; use --device cpu")
        device = device if ":" in name else torch.device("cuda", torch.cuda.current_device())
        torch.cuda.set_device(device)
    return device


@contextmanager
def cpu_threads(count: int) -> Iterator[None]:
    """PyTorch computes with that many CPU threads inside; raises UserError for fewer than one."""
    if count < 1:
        raise UserError(f"--threads must be at least 1, got {count}")
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def device_name(device: torch.device) -> str:
    """The card's name, or the processor's with its number of cores."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{processor()}, {os.cpu_count()} cores"


def file_stem(benchmark: str, device: torch.device) -> str:
    """What result files are called before their suffix: the benchmark, the device and the version of torch."""
    slug = re.sub(r"[^a-z0-9]+", "-", device_name(device).lower()).strip("-")
    return f"{benchmark}-{slug}-torch{torch.__version__.split('+')[0]}"


def free_memory(device: torch.device) -> int | None:
    """Bytes that can still be allocated on the device, None where the system does not tell."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    limits = [limit for limit in (_available_to_system(), _available_to_group()) if limit is not None]
    return min(limits, default=None)


def environment(device: torch.device, dtype: torch.dtype, head_width: int) -> dict[str, Any]:
    """What is needed to repeat a benchmark and to compare it with another."""
    command = [Path(sys.argv[0]).name, *sys.argv[1:]]
    return {
        "command": shlex.join(command),
        "device": device_name(device),
        "device_type": device.type,
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "free_memory_bytes": free_memory(device),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "tf32_allowed": tf32_allowed(),
        "dtype": dtype_name(dtype),
        "kernel": running_kernel(dtype, head_width, device),
        "OPENCLIP_LINATTN_KERNEL": os.environ.get("OPENCLIP_LINATTN_KERNEL"),
        "packages": {name: _installed(name) for name in ("openclip-linattn", *PEERS)},
    }


def running_kernel(dtype: torch.dtype, head_width: int, device: torch.device) -> str:
    """Which implementation computes the operators of this package: reference, torch or triton."""
    if (asked := override()) is not None:
        return asked
    x = torch.empty(1, 1, 1, head_width, dtype=dtype, device=device)
    return choose(x, x)


def processor() -> str:
    """The name of the processor."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


def _available_to_system() -> int | None:
    try:
        text = Path("/proc/meminfo").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"^MemAvailable:\s*(\d+) kB$", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def _available_to_group() -> int | None:
    """What the limit of a container leaves, where there is one."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit = (folder / "memory.max").read_text(encoding="utf-8").strip()
        used = (folder / "memory.current").read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return None if limit == "max" else max(0, int(limit) - int(used))


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
