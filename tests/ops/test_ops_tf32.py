"""The switch that lets float32 products round on NVIDIA GPUs is read and set whichever way a program sets it."""

import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from openclip_linattn.ops import small_systems

# PyTorch's switches are global and refuse to be mixed: each way has a process of its own.
WAYS = {
    "": False,
    "torch.set_float32_matmul_precision('high')": True,
    "torch.set_float32_matmul_precision('medium')": True,
    "torch.backends.cuda.matmul.allow_tf32 = True": True,
    "torch.backends.cuda.matmul.allow_tf32 = True; torch.backends.cuda.matmul.allow_tf32 = False": False,
    "torch.backends.cuda.matmul.fp32_precision = 'tf32'": True,
    "torch.backends.cuda.matmul.fp32_precision = 'ieee'": False,
    "torch.backends.fp32_precision = 'tf32'": True,
}
PROGRAM = """
import torch
from openclip_linattn.ops.tf32 import tf32_allowed, without_tf32
matmul = torch.backends.cuda.matmul
old_switches = lambda: (matmul.allow_tf32, torch.get_float32_matmul_precision())
{way}
before = {read}
assert tf32_allowed() is {expected}
with without_tf32(torch.device("cpu")):
    assert tf32_allowed() is {expected}
try:
    with without_tf32(torch.device("cuda")):
        assert tf32_allowed() is False
        raise ArithmeticError
except ArithmeticError:
    pass
assert tf32_allowed() is {expected}
assert {read} == before
"""


@pytest.mark.parametrize("way", WAYS)
def test_every_switch_is_read_and_left_as_it_was(way):
    if "fp32_precision" in way:
        pytest.importorskip("torch", minversion="2.9")
        read = "matmul.fp32_precision"
    else:
        read = "old_switches()"
    program = PROGRAM.format(way=way, expected=WAYS[way], read=read)
    subprocess.run([sys.executable, "-c", program], check=True)


class Products(TorchDispatchMode):
    """Records the products and solves that run while `exact` is not set."""

    exact = False

    def __init__(self):
        super().__init__()
        self.rounding = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not self.exact and any(name in func.__name__ for name in ("mm", "lu_factor", "lu_solve")):
            self.rounding.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_the_small_systems_of_the_neumann_series_never_round(monkeypatch):
    seen = Products()

    @contextmanager
    def without_tf32(device):
        seen.exact = True
        yield
        seen.exact = False

    monkeypatch.setattr(small_systems, "without_tf32", without_tf32)
    gram, summed = torch.eye(5).expand(1, 2, 5, 5), torch.ones(1, 2, 5, 3)
    with seen:
        _, saved = small_systems.solve_forward(gram, gram, gram / 2, summed, 7, torch.full((1, 2, 1, 1), 0.9))
        small_systems.solve_backward(torch.ones(1, 2, 5, 3), saved)
        assert not seen.rounding
        gram @ summed
    assert seen.rounding == ["bmm.default"]
