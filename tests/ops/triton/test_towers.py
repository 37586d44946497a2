"""A whole image tower gives the same output and the same gradients with every implementation of its operator."""

import pytest
import torch

from openclip_linattn.ops import kernels

pytest.importorskip("triton")
open_clip = pytest.importorskip("open_clip")

KINDS = ("normlinear", "normlinearmean", "linear", "neumannlinear", "infsa", "lininfsa")
# Two implementations round differently, and three layers with their norms pass that on.
TOLERANCE = 2e-4


def run(tower, images, choice, monkeypatch):
    """The features and the gradients of all parameters."""
    monkeypatch.setenv(kernels.VARIABLE, choice)
    features = tower(images)
    gradients = torch.autograd.grad(features.square().sum(), list(tower.parameters()))
    return dict(zip(("features", *dict(tower.named_parameters())), (features, *gradients), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_tower_does_not_depend_on_the_implementation(kind, device, monkeypatch):
    torch.manual_seed(0)
    tower = open_clip.create_model(f"ViT-T32-8-{kind}").visual.to(device)
    images = torch.randn(2, 3, 48, 48, generator=torch.Generator().manual_seed(0)).to(device)
    expected = run(tower, images, "reference", monkeypatch)
    assert any("logit" in name for name in expected) == (kind in ("neumannlinear", "infsa", "lininfsa"))
    for choice in ("torch", "triton"):
        got = run(tower, images, choice, monkeypatch)
        for name, exact in expected.items():
            error = (got[name] - exact).norm()
            assert error <= TOLERANCE * exact.norm() + 1e-6, f"{name}, {choice}: {error / exact.norm():.1e}"


def test_the_kernels_run_in_the_tower(device, monkeypatch, kernel_module):
    normalized = kernel_module("normalized")
    calls = []
    for name in ("forward", "backward"):
        function = getattr(normalized, name)
        monkeypatch.setattr(
            normalized, name, lambda *x, name=name, function=function: calls.append(name) or function(*x)
        )
    tower = open_clip.create_model("ViT-T32-8-normlinear").visual.to(device)
    run(tower, torch.randn(1, 3, 48, 48).to(device), "triton", monkeypatch)
    layers = len(tower.transformer.resblocks)
    assert calls == ["forward"] * layers + ["backward"] * layers
