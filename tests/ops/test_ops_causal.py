"""The causal forms go through the tokens in chunks: one for a text, memory linear in the length."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from openclip_linattn.bench.memory import with_peak
from openclip_linattn.ops import OPERATORS
from openclip_linattn.ops.reference import REFERENCES

IN_CHUNKS = ["linear", "linearelu", "normlinear", "normlinearmean", "neumannlinear"]


class Triangles(TorchDispatchMode):
    """Records the sizes of the matrices of which the part above the diagonal is cut off."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "tril" in func.__name__:
            self.sizes.append(tuple(args[0].shape[-2:]))
        return func(*args, **(kwargs or {}))


class Products(Triangles):
    """Records the sizes of the results of matrix products."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.__name__.startswith(("bmm", "mm")):
            self.sizes.append(tuple(out.shape[-2:]))
        return out


@pytest.mark.parametrize("kind", [*IN_CHUNKS, "infsa"])
def test_many_chunks_equal_the_explicit_formula(kind, packed_tokens, relative_error):
    inputs = packed_tokens(1, 1, 1000, 16)
    got, expected = (table[kind](*inputs, causal=True) for table in (OPERATORS, REFERENCES))
    assert relative_error(got, expected) <= 1e-10
    upstream = torch.randn(got.shape, dtype=got.dtype, generator=torch.Generator().manual_seed(1))
    gradients = (torch.autograd.grad(o, inputs, upstream) for o in (got, expected))
    for a, b in zip(*gradients, strict=True):
        assert relative_error(a, b) <= 1e-9


@pytest.mark.parametrize(
    ("tokens", "sizes"), [(77, [77]), (128, [128]), (129, [128, 1]), (300, [128, 128, 44])]
)
@pytest.mark.parametrize("kind", IN_CHUNKS)
def test_the_scores_of_each_chunk_are_made_once(kind, tokens, sizes, packed_tokens):
    with Triangles() as seen:
        OPERATORS[kind](*packed_tokens(1, 1, tokens, 8), causal=True)
    assert seen.sizes == [(size, size) for size in sizes]


@pytest.mark.parametrize("kind", IN_CHUNKS)
def test_a_single_chunk_leaves_no_state_behind(kind, packed_tokens):
    """A text of 77 tokens needs no sums for a later chunk: no product has the widths of k and v for its sides."""
    q, k, v = (x.float() for x in packed_tokens(1, 1, 77, 8))
    with Products() as seen:
        OPERATORS[kind](q, k, v, causal=True)
    assert not [size for size in seen.sizes if size[0] < 77]


@pytest.mark.parametrize(
    ("kind", "tensors"),
    [("linear", 10), ("linearelu", 13), ("normlinear", 9), ("neumannlinear", 14), ("infsa", 10)],
)
def test_forward_and_backward_take_memory_linear_in_the_tokens(kind, tensors, packed_tokens):
    """At most as many tensors of the size of q at once, gradients and output included, at 2,048 tokens."""
    q, k, v = packed_tokens(1, 2, 2048, 64, torch.float32)
    upstream = torch.ones_like(v)

    def training():
        return torch.autograd.grad(OPERATORS[kind](q, k, v, causal=True), (q, k, v), upstream)

    _, peak = with_peak(training, q.device)
    assert peak <= tensors * q.numel() * q.element_size()
