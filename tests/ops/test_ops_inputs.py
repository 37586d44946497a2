"""Wrong inputs are refused with a sentence that names the argument."""

import pytest
import torch

from openclip_linattn.errors import UserError
from openclip_linattn.ops import OPERATORS
from openclip_linattn.ops.reference import REFERENCES

GOOD = torch.zeros(2, 3, 5, 4)
WRONG = {
    "three dimensions": ((GOOD[0], GOOD, GOOD), {}, r"q must have shape \(B, H, N, D\), got 3 dimensions"),
    "not a tensor": ((GOOD, [1.0], GOOD), {}, "k must be a tensor of shape .* got list"),
    "integers": ((GOOD, GOOD, GOOD.long()), {}, "v must be floating point, got torch.int64"),
    "complex": ((GOOD.to(torch.complex64), GOOD, GOOD), {}, "q must be floating point, got torch.complex64"),
    "other tokens": (
        (GOOD, GOOD[:, :, :4], GOOD[:, :, :4]),
        {},
        r"q and k the same width, got q \(2, 3, 5, 4\)",
    ),
    "other heads": ((GOOD, GOOD, GOOD[:, :1]), {}, "same batch, heads and tokens"),
    "other widths": ((GOOD, GOOD[..., :3], GOOD), {}, "q and k the same width"),
    "no tokens": ((GOOD[:, :, :0],) * 3, {}, "at least one head and one token"),
    "no heads": ((GOOD[:, :0],) * 3, {}, "at least one head"),
    "no width": ((GOOD[..., :0],) * 3, {}, "at least one head and one token of width 1"),
    "other device": ((GOOD, GOOD.to("meta"), GOOD), {}, "q on cpu and k on meta"),
    "float mask": ((GOOD,) * 3, {"key_padding_mask": torch.zeros(2, 5)}, "True = padding, got torch.float32"),
    "list mask": ((GOOD,) * 3, {"key_padding_mask": [[False] * 5] * 2}, "True = padding, got list"),
    "mask of another shape": (
        (GOOD,) * 3,
        {"key_padding_mask": torch.zeros(5, 2, dtype=torch.bool)},
        r"key_padding_mask must have shape \(B, N\) = \(2, 5\), got \(5, 2\)",
    ),
    "mask elsewhere": (
        (GOOD,) * 3,
        {"key_padding_mask": torch.zeros(2, 5, dtype=torch.bool, device="meta")},
        "key_padding_mask is on meta, but q is on cpu",
    ),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("kind", OPERATORS)
def test_wrong_tensors_are_named(kind, name):
    tensors, options, message = WRONG[name]
    with pytest.raises(UserError, match=message):
        OPERATORS[kind](*tensors, **options)


@pytest.mark.parametrize("table", [OPERATORS, REFERENCES], ids=["fast", "reference"])
@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("linear", {"feature_map": "relu"}, "feature_map must be 'affine' or 'elu', got 'relu'"),
        ("normlinear", {"length_scale": "max"}, "length_scale must be one of none, mean, train, got 'max'"),
        ("normlinear", {"length_scale": "train"}, "needs train_tokens"),
        ("normlinear", {"length_scale": "train", "train_tokens": 0}, "needs train_tokens.* got 0"),
        ("normlinear", {"scale": float("nan")}, "scale must be a finite number"),
        ("infsa", {"rho": float("inf")}, "rho must be a finite number"),
        ("infsa", {"rho": "0.5"}, "rho must be a finite number or a tensor"),
        ("infsa", {"rho": torch.ones(2)}, r"rho must .* shape \(\), \(3,\) or \(3, 1, 1\), got shape \(2,\)"),
        ("lininfsa", {"rho": torch.ones(3, dtype=torch.int64)}, "rho must hold one floating-point value"),
        ("neumannlinear", {"gamma": torch.ones(2, 3)}, r"gamma must .* got shape \(2, 3\)"),
        ("neumannlinear", {"gamma": torch.ones(1, 2, 3, 1, 1)}, "gamma must hold one floating-point value"),
        ("infsa", {"neumann_terms": 0}, "neumann_terms must be an integer of at least 1, got 0"),
        ("infsa", {"neumann_terms": 1.5}, "neumann_terms must be an integer"),
        ("lininfsa", {"causal": True}, "lininfsa has no causal form"),
    ],
)
def test_wrong_factors_are_named(table, kind, options, message):
    with pytest.raises(UserError, match=message):
        table[kind](GOOD, GOOD, GOOD, **options)


@pytest.mark.parametrize("kind", OPERATORS)
def test_the_output_has_the_dtype_of_v(kind):
    q, v = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4, dtype=torch.bfloat16)
    o = OPERATORS[kind](q, q, v)
    assert o.dtype == torch.bfloat16
    torch.testing.assert_close(o.float(), OPERATORS[kind](q, q, v.float()), rtol=2e-2, atol=2e-2)
