"""The public operators with OPENCLIP_LINATTN_KERNEL=triton agree with the plain torch kernels."""

import pytest
import torch

from openclip_linattn.ops import OPERATORS, kernels
from openclip_linattn.ops.packed import unpack

KINDS = {"normlinear": None, "linear": None, "neumannlinear": "gamma", "infsa": "rho", "lininfsa": "rho"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_agree_with_the_torch_kernels(kind, dtype, device, monkeypatch, kernel_module, relative_error):
    generator = torch.Generator().manual_seed(0)
    packed = torch.randn(2, 37, 3, 2, 16, generator=generator).to(device, dtype).requires_grad_()
    factor = torch.tensor([0.5, 0.9], device=device, requires_grad=True)
    factors = {KINDS[kind]: factor} if KINDS[kind] else {}
    results = []
    for choice in ("torch", "triton"):
        monkeypatch.setenv(kernels.VARIABLE, choice)
        q, k, v = unpack(packed)
        assert kernels.implementation("normalized", q, v).__name__.endswith(f"{choice}_kernels.normalized")
        o = OPERATORS[kind](q, k, v, **factors)
        results.append([o, *torch.autograd.grad(o.square().sum(), (packed, *factors.values()))])
    for got, expected in zip(results[1], results[0], strict=True):
        # In bfloat16 both round, and the gradient of o^2 takes the rounding of o along.
        assert relative_error(got, expected) <= (1e-5 if dtype == torch.float32 else 3e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_batch_gives_an_empty_output(kind, device, monkeypatch, kernel_module):
    q = torch.zeros(0, 2, 700, 16, device=device, requires_grad=True)
    for choice in ("torch", "triton"):
        monkeypatch.setenv(kernels.VARIABLE, choice)
        o = OPERATORS[kind](q, q, q)
        (gradient,) = torch.autograd.grad(o.sum(), q)
        assert o.shape == gradient.shape == q.shape
