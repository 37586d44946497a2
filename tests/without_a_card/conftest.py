"""A pretended card: see `pretended`."""

import importlib.util
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

from openclip_linattn.ops import triton_kernels

_spec = importlib.util.spec_from_file_location("pretended", Path(__file__).with_name("pretended.py"))
pretended = importlib.util.module_from_spec(_spec)
sys.modules["pretended"] = pretended
_spec.loader.exec_module(pretended)


@pytest.fixture
def card(monkeypatch):
    """The card's device, and everything that PyTorch and Triton say of it."""
    if torch.cuda.is_available():
        pytest.skip("there is a card")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_, **__: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    triton_kernels._takes_kernels.cache_clear()
    overwriting = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(
        True
    )  # as moving to a real card does by itself
    _unwrap_launches(monkeypatch)
    # With several threads autograd would give the card's work to a thread of the card.
    with pretended.PretendedCard(), torch.autograd.set_multithreading_enabled(False):
        yield pretended.CARD
    torch.__future__.set_overwrite_module_params_on_conversion(overwriting)
    triton_kernels._takes_kernels.cache_clear()


def _unwrap_launches(monkeypatch):
    """Triton's interpreter gets the memory behind the tensors, all of which must be on one device."""
    try:
        from triton.runtime import interpreter
    except ImportError:  # then nothing is launched: there is no Triton for macOS
        return
    run = interpreter.InterpretedFunction.run

    def unwrapped(self, *args, **kwargs):
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        assert len({isinstance(x, pretended.OnCard) for x in tensors}) == 1, (
            "tensors of the card and of the CPU"
        )
        args, kwargs = tree_map(pretended._inner, (args, kwargs))
        return run(self, *args, **kwargs)

    monkeypatch.setattr(interpreter.InterpretedFunction, "run", unwrapped)
