"""Which inputs the Triton kernels take; elsewhere plain torch computes the same."""

import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from openclip_linattn.ops import triton_kernels


def inputs(d=64, dv=64, dtype=torch.bfloat16, v_dtype=None, device="cpu"):
    return (
        torch.empty(1, 1, 1, d, dtype=dtype, device=device),
        torch.empty(1, 1, 1, dv, dtype=v_dtype or dtype, device=device),
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, True),
        ({"d": 1, "dv": 128}, True),
        ({"dtype": torch.float32}, True),
        ({"dtype": torch.float64}, False),
        ({"v_dtype": torch.float32}, False),
        ({"d": 129}, False),
        ({"dv": 129}, False),
    ],
)
def test_dtypes_and_widths(given, expected):
    pytest.importorskip("triton")
    assert triton_kernels.supported(*inputs(**given)) is expected


@pytest.mark.parametrize(("capability", "expected"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_cards(capability, expected, monkeypatch):
    pytest.importorskip("triton")
    triton_kernels._takes_kernels.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with FakeTensorMode():
        assert triton_kernels.supported(*inputs(device="cuda")) is expected
    triton_kernels._takes_kernels.cache_clear()


def test_a_compiler_meets_no_caches_of_which_it_would_warn(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for cached in ("_has_triton", "_takes_kernels"):
        monkeypatch.setattr(triton_kernels, cached, lambda *_: pytest.fail("a cache"))
    with FakeTensorMode():
        assert triton_kernels.supported(*inputs(device="cuda")) is True


@pytest.mark.parametrize("version", [None, "3.3.1"])
def test_without_a_triton_that_compiles_the_kernels(version):
    code = f"""
import sys, types, torch
sys.modules["triton"] = None if {version!r} is None else types.SimpleNamespace(__version__={version!r})
from openclip_linattn.ops import triton_kernels
x = torch.empty(1, 1, 1, 64, dtype=torch.bfloat16)
assert triton_kernels.supported(x, x) is False
"""
    subprocess.run([sys.executable, "-c", code], check=True)
