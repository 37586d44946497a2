"""The Triton kernels run on the card where there is one, else on CPU tensors in Triton's interpreter."""

from importlib import import_module

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def pytest_itemcollected(item):
    # PyTorch warns where a thread of autograd is the first to multiply on the card.
    item.add_marker(pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning"))


@pytest.fixture(scope="session")
def device():
    return DEVICE


@pytest.fixture(scope="session")
def kernel_module():
    """A module of `openclip_linattn.ops.triton_kernels` by its name."""
    pytest.importorskip("triton")
    return lambda name: import_module(f"openclip_linattn.ops.triton_kernels.{name}")


@pytest.fixture(params=["one-program", "chunks"])
def programs(request, monkeypatch, kernel_module):
    """Each head in one program, or 128 tokens of it."""
    if request.param == "chunks":
        chunks = kernel_module("chunks")
        monkeypatch.setattr(chunks, "LIMITS", chunks.Limits(programs=99, shortest=64, longest=128))


@pytest.fixture(scope="session")
def tolerance():
    """The relative error, by norm, that one rounding of an input may cause, and sums over tokens in float32."""
    # The interpreter cuts numbers off where the card rounds them to bfloat16: up to twice the error, all one way.
    bfloat16 = 4e-3 if DEVICE == "cuda" else 1.2e-2
    # The card's quotients and reciprocal roots are off by up to two units in the last place.
    float32 = 3e-6 if DEVICE == "cuda" else 1e-6
    return {torch.float32: float32, torch.float16: 5e-4, torch.bfloat16: bfloat16}


@pytest.fixture(autouse=True)
def _poisoned_buffers(monkeypatch):
    """Whatever a kernel does not write comes out as NaN."""
    new_empty = torch.Tensor.new_empty

    def poisoned(self, *size, **options):
        buffer = new_empty(self, *size, **options)
        return buffer.fill_(torch.nan) if buffer.is_floating_point() else buffer

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
