"""The operators on tensors of a card, with every implementation."""

from itertools import product

import pytest
import torch
from pretended import OnCard

from openclip_linattn.ops import OPERATORS
from openclip_linattn.ops.packed import unpack

FACTORS = {"infsa": "rho", "lininfsa": "rho", "neumannlinear": "gamma"}
CASES = [
    ("torch", kind, causal, masked, torch.float32)
    for kind, causal, masked in product(OPERATORS, (False, True), (False, True))
    if not (kind == "lininfsa" and causal)
]
CASES += [("torch", kind, False, False, torch.bfloat16) for kind in OPERATORS]
IN_TRITON = ("linear", "normlinear", "infsa", "lininfsa", "neumannlinear")
CASES += [("triton", kind, False, False, torch.float32) for kind in IN_TRITON]
CASES += [("triton", "infsa", True, False, torch.float32)]


@pytest.mark.parametrize(("kernel", "kind", "causal", "masked", "dtype"), CASES)
def test_forward_and_backward(kernel, kind, causal, masked, dtype, monkeypatch, card):
    use(kernel, monkeypatch)
    torch.manual_seed(0)
    inputs = torch.randn(2, 7, 3, 2, 16, dtype=dtype)
    mask = torch.arange(7).expand(2, -1) > 4 if masked else None
    factors = {FACTORS[kind]: torch.tensor([0.5, 0.9])} if kind in FACTORS else {}
    got = gradients(kind, inputs.to(card), mask if mask is None else mask.to(card), causal, factors, card)
    assert all(isinstance(x, OnCard) for x in got)
    expected = gradients(kind, inputs, mask, causal, factors, inputs.device)
    for a, b in zip(got, expected, strict=True):
        # The same operations on the same numbers, in blocks of other sizes.
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        difference = (a.cpu().double() - b.double()).norm()
        assert difference <= tolerance * b.double().norm()


def use(kernel, monkeypatch):
    if kernel == "triton":
        pytest.importorskip("triton")
    monkeypatch.setenv("OPENCLIP_LINATTN_KERNEL", kernel)


def gradients(kind, inputs, mask, causal, factors, device):
    packed = inputs.detach().requires_grad_()
    given = {name: x.to(device).detach().requires_grad_() for name, x in factors.items()}
    o = OPERATORS[kind](*unpack(packed), causal=causal, key_padding_mask=mask, **given)
    direction = torch.linspace(-1, 1, o.numel()).view(o.shape).to(device, o.dtype)
    return o.detach(), *torch.autograd.grad(o, [packed, *given.values()], direction)


@pytest.mark.parametrize(
    ("kernel", "kind"), [*product(["torch"], OPERATORS), ("triton", "linear"), ("triton", "neumannlinear")]
)
def test_autocast_leaves_sums_over_tokens_in_float32(kernel, kind, monkeypatch, card):
    use(kernel, monkeypatch)
    q, k, v = (100 * torch.randn(3, 1, 2, 33, 16)).to(card).unbind(0)
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
        assert (q @ k.mT).dtype == torch.bfloat16
        got = OPERATORS[kind](q, k, v)
    with torch.no_grad():
        expected = OPERATORS[kind](q, k, v)
    assert got.dtype == torch.float32
    assert torch.equal(got, expected)


@pytest.mark.parametrize("kind", ["normlinear", "neumannlinear"])
def test_a_tensor_of_the_cpu_among_them_is_noticed(kind, monkeypatch, card):
    """These tests can fail: a scratch buffer without a device is on the CPU."""
    from openclip_linattn.ops.torch_kernels import blocks

    monkeypatch.setenv("OPENCLIP_LINATTN_KERNEL", "torch")

    def forgetful(self, chunk, buffer):
        return torch.zeros(chunk.numel()).view(-1, *chunk.shape[-2:])

    monkeypatch.setattr(blocks.Blocks, "empty", forgetful)
    with pytest.raises(RuntimeError, match="same device"):
        OPERATORS[kind](*torch.randn(3, 1, 2, 19, 16).to(card).unbind(0))
