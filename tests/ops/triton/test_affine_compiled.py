"""The real compiler takes the kernels, and what it makes of them fits the card; no GPU is needed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

# Kinds are compiled as their wrappers launch them, so that strides and lengths are specialised as on a card.
COMPILE = """
import json, sys, torch, compiled
kernels = compiled.install()
from openclip_linattn.ops.triton_kernels import linear, normalized
dtype, width, shapes = getattr(torch, sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
for batch, tokens, heads in shapes:
    packed = torch.empty(batch, tokens, 3, heads, width, dtype=dtype)
    q, k, v = packed.permute(2, 0, 3, 1, 4).unbind(0)
    for module, factors in ((normalized, (0.1,)), (linear, ())):
        o, state = module.forward(q, k, v, *factors)
        module.backward(o, q, k, v, state, *factors)
print(json.dumps([kernel._asdict() for kernel in kernels]))
"""
FUSED, SPLIT, SINGLE = (64, 197, 8), (1, 4096, 8), (1, 1, 1)


def compile_kernels(dtype, width, shapes):
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", COMPILE, dtype, str(width), json.dumps(shapes)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "width", "shapes", "spilled"),
    [
        ("bfloat16", 24, [SINGLE], 256),
        ("bfloat16", 64, [FUSED, SPLIT], 256),
        ("float16", 128, [FUSED], 512),
        ("float32", 64, [FUSED], 0),
        ("float32", 128, [FUSED], 2048),
    ],
)
def test_kernels_fit_the_card(dtype, width, shapes, spilled):
    kernels = compile_kernels(dtype, width, shapes)
    assert len(kernels) == sum(8 if shape == SPLIT else 4 for shape in shapes)
    for kernel in kernels:
        name = kernel["name"]
        assert kernel["shared"] <= 227 * 1024, name
        assert kernel["registers"] * kernel["warps"] * 32 <= 65536, name
        assert kernel["spilled"] <= spilled, name
        if dtype != "float32" and width % 16 == 0:
            assert "wgmma" in kernel["ptx"], name
            assert "cp.async.cg" in kernel["ptx"], (
                f"{name} does not read 16 bytes at a time in the background"
            )
