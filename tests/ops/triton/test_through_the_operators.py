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
        assert kernels.choose(q, v) == choice
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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a card")
@pytest.mark.parametrize("kind", KINDS)
def test_a_cuda_graph_repeats_both_passes(kind, device, relative_error):
    """Nothing waits for the device: torch.compile's mode "reduce-overhead" captures the operators so."""
    packed = torch.randn(2, 37, 3, 2, 16, device=device, requires_grad=True)

    def training():
        return torch.autograd.grad(OPERATORS[kind](*unpack(packed)).square().sum(), packed)[0]

    with torch.cuda.stream(torch.cuda.Stream()):
        training()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = training()
    with torch.no_grad():
        packed.copy_(torch.randn_like(packed))
    graph.replay()
    assert relative_error(captured, training()) <= 1e-6
