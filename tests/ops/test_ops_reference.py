"""Every operator equals its explicit N x N formula in float64, with all gradients."""

import zlib

import pytest
import torch

from openclip_linattn.ops import OPERATORS
from openclip_linattn.ops.reference import REFERENCES

PER_HEAD = "one value per head"
"""Replaced by a tensor (H,) whose gradient is compared too."""

GRID = {
    "softmax": [{}],
    "linear": [{}],
    "linearelu": [{}],
    "normlinear": [{}, {"scale": 0.7, "length_scale": "train", "train_tokens": 37}],
    "normlinearmean": [{}],
    "infsa": [{"rho": PER_HEAD}, {"neumann_terms": 3}],
    "lininfsa": [{"rho": PER_HEAD}],
    "neumannlinear": [{"gamma": PER_HEAD}, {}],
}
"""The factors with which each kind is tried; a new operator adds one row."""

SHAPES = [  # (tokens, width, heads)
    *[(1, 1, 1), (1, 64, 3), (2, 1, 3), (2, 59, 1), (37, 16, 3), (63, 59, 1), (64, 64, 1), (65, 16, 3)],
    *[
        (65, 1, 1),
        (65, 59, 1),
        (77, 64, 1),
        (127, 16, 1),
        (128, 59, 1),
        (129, 16, 3),
        (197, 64, 1),
        (257, 16, 1),
    ],
]
NO_CAUSAL_FORM = {"lininfsa"}


def grid():
    for kind, rows in GRID.items():
        for factors in rows:
            for causal in (False,) if kind in NO_CAUSAL_FORM else (False, True):
                name = "-".join([kind, *factors, *(["causal"] if causal else [])])
                yield pytest.param(kind, factors, causal, id=name)


def padding_mask(name, batch, tokens):
    if name == "no-mask":
        return None
    mask = torch.zeros(batch, tokens, dtype=torch.bool)
    if name == "padded":
        mask = torch.rand(batch, tokens, generator=torch.Generator().manual_seed(tokens)) < 0.3
        mask[-1] = True
    return mask


def test_every_kind_has_a_reference_and_a_row_in_the_grid():
    assert OPERATORS.keys() == REFERENCES.keys() == GRID.keys()


@pytest.mark.parametrize("mask_name", ["no-mask", "nothing-padded", "padded"])
@pytest.mark.parametrize(("tokens", "width", "heads"), SHAPES)
@pytest.mark.parametrize(("kind", "factors", "causal"), list(grid()))
def test_equals_the_explicit_formula(kind, factors, causal, tokens, width, heads, mask_name, packed_tokens):
    batch = 1 if mask_name == "no-mask" else 3
    q, k, v = packed_tokens(batch, heads, tokens, width, seed=zlib.crc32(kind.encode()) + tokens)
    factors = {
        name: torch.linspace(0.3, 0.9, heads, dtype=q.dtype, requires_grad=True)
        if value is PER_HEAD
        else value
        for name, value in factors.items()
    }
    options = {"causal": causal, "key_padding_mask": padding_mask(mask_name, batch, tokens), **factors}
    leaves = [q, k, v, *(x for x in factors.values() if isinstance(x, torch.Tensor))]
    results = [table[kind](q, k, v, **options) for table in (OPERATORS, REFERENCES)]
    upstream = torch.randn(results[0].shape, dtype=q.dtype, generator=torch.Generator().manual_seed(1))
    got, expected = ([o, *torch.autograd.grad(o, leaves, upstream)] for o in results)
    # At width 1 the unit vectors are constant, and their gradient is rounding alone.
    rounding = (1e-9 if width == 1 else 1e-12) * (v.norm() + upstream.norm())
    for name, a, b in zip(["o", "dq", "dk", "dv", "dfactor"], got, expected, strict=False):
        assert (a - b).norm() <= 1e-7 * b.norm() + rounding, name


@pytest.mark.parametrize("masked", [False, True], ids=["no-mask", "padded"])
@pytest.mark.parametrize(("kind", "factors", "causal"), list(grid()))
def test_gradients_agree_with_finite_differences(kind, factors, causal, masked, packed_tokens):
    q, k, v = packed_tokens(2, 2, 4, 3)
    mask = torch.tensor([[False, True, False, False], [False] * 4]) if masked else None
    tensors = {name for name, value in factors.items() if value is PER_HEAD}
    fixed = {name: value for name, value in factors.items() if name not in tensors}

    def call(q, k, v, *values):
        given = dict(zip(sorted(tensors), values, strict=True))
        return OPERATORS[kind](q, k, v, causal=causal, key_padding_mask=mask, **fixed, **given)

    leaves = [torch.tensor([0.4, 0.9], dtype=torch.float64, requires_grad=True) for _ in tensors]
    assert torch.autograd.gradcheck(call, (q, k, v, *leaves))


@pytest.mark.parametrize("kind", OPERATORS)
def test_values_may_be_of_another_width(kind):
    q, k, v = torch.randn(1, 2, 9, 4), torch.randn(1, 2, 9, 4), torch.randn(1, 2, 9, 7)
    o = OPERATORS[kind](q, k, v)
    assert o.shape == (1, 2, 9, 7)
    torch.testing.assert_close(o, REFERENCES[kind](q, k, v))


@pytest.mark.parametrize("shape", [(), (2,), (1,), (2, 1, 1), (1, 2, 1, 1)], ids=str)
@pytest.mark.parametrize(
    ("kind", "name"), [("infsa", "rho"), ("lininfsa", "rho"), ("neumannlinear", "gamma")]
)
def test_factors_broadcast_per_head(kind, name, shape, packed_tokens):
    q, k, v = packed_tokens(3, 2, 5, 4)
    factor = torch.full(shape, 0.5, requires_grad=True)
    o = OPERATORS[kind](q, k, v, **{name: factor})
    torch.testing.assert_close(o, OPERATORS[kind](q, k, v, **{name: 0.5}))
    (gradient,) = torch.autograd.grad(o.sum(), factor)
    assert gradient.shape == shape
    assert gradient.dtype == torch.float32
    assert gradient.abs().min() > 0
