"""Memory stays linear in the tokens, and the operators compile into one graph."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from openclip_linattn.ops import OPERATORS
from openclip_linattn.ops.reference import REFERENCES

TOKENS = 1024
LINEAR = ["linear", "linearelu", "normlinear", "normlinearmean", "lininfsa", "neumannlinear"]


class BiggestTensor(TorchDispatchMode):
    """Records the number of elements of the biggest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                # Broadcast views span more elements than they store.
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return out


def biggest(operator, *, causal):
    q, k, v = (torch.randn(1, 1, TOKENS, 16, requires_grad=True) for _ in range(3))
    with BiggestTensor() as recorded:
        o = operator(q, k, v, causal=causal)
        torch.autograd.grad(o.sum(), (q, k, v))
    return recorded.elements


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("kind", LINEAR)
def test_linear_kinds_never_hold_a_matrix_of_all_pairs(kind, causal):
    if causal and kind == "lininfsa":
        pytest.skip("no causal form")
    # The gradients of q, k and v share one buffer.
    assert biggest(OPERATORS[kind], causal=causal) <= 3 * TOKENS * 17


def test_the_recorder_sees_the_matrix_of_a_quadratic_kind():
    assert biggest(REFERENCES["infsa"], causal=False) >= TOKENS * TOKENS


@pytest.mark.parametrize("masked", [False, True], ids=["no-mask", "padded"])
@pytest.mark.parametrize("kind", OPERATORS)
def test_compiles_into_one_graph_with_exact_gradients_under_autocast(
    kind, masked, packed_tokens, relative_error
):
    causal = kind != "lininfsa"
    name = {"infsa": "rho", "lininfsa": "rho", "neumannlinear": "gamma"}.get(kind)
    factors = {name: torch.tensor([0.5, 0.9], requires_grad=True)} if name else {}
    torch.compiler.reset()
    compiled = torch.compile(OPERATORS[kind], fullgraph=True, backend="aot_eager")
    for batch in (4, 3) if masked else (4,):
        q, k, v = packed_tokens(batch, 2, 21, 8, torch.float32)
        mask = torch.arange(21).expand(batch, -1) > 15 if masked else None
        results = []
        for function in (OPERATORS[kind], compiled):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                o = function(q, k, v, causal=causal, key_padding_mask=mask, **factors)
            results.append([o, *torch.autograd.grad(o.square().sum(), (q, k, v, *factors.values()))])
        for eager, graph in zip(*results, strict=True):
            assert relative_error(graph, eager) <= 1e-5
