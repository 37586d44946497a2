"""The kernels of infinite attention and of the Neumann passes, compiled for compute capability 9.0 without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SCRIPT = """
import json, sys
import compiled
import torch
from openclip_linattn.ops.triton_kernels import inf, lininf, neumann

kernels = compiled.install()
dtype, tokens, heads, width = getattr(torch, sys.argv[1]), *map(int, sys.argv[2:])
q, k, v = torch.zeros(1, tokens, 3, heads, width, dtype=dtype).permute(2, 0, 3, 1, 4)
gamma = torch.zeros(heads)
o, state = lininf.forward(q, k, v)
lininf.backward(o, q, k, v, state)
o, state = inf.forward(q, k, v, True)
inf.backward(o, q, k, v, o, state, True)
o, state = neumann.forward(q, k, v, gamma)
neumann.backward(o, q, k, v, state, gamma)
print(json.dumps([{**x._asdict(), "limit": compiled.SHARED_LIMIT} for x in kernels]))
"""


def compile_all(*arguments):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", SCRIPT, *map(str, arguments)]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert output.returncode == 0, output.stderr
    return json.loads(output.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "tokens", "heads", "width"),
    # Triton compiles the number one into its kernels.
    [("bfloat16", 64, 2, 64), ("bfloat16", 1, 1, 128), ("float32", 64, 2, 64)],
)
def test_kernels_compile_into_what_the_card_can_hold(dtype, tokens, heads, width):
    kernels = compile_all(dtype, tokens, heads, width)
    assert len(kernels) == 2 + 4 + 4
    for kernel in kernels:
        assert kernel["shared"] <= kernel["limit"], kernel["name"]
        assert kernel["spilled"] <= 64 or width > 64, kernel["name"]
    if dtype == "bfloat16":
        on_tensor_cores = {kernel["name"] for kernel in kernels if "wgmma" in kernel["ptx"]}
        assert {"query_gradients_kernel", "key_gradients_kernel", "sum_kernel"} <= on_tensor_cores
