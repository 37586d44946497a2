"""The streamed operators equal the explicit formulas, whatever the chunks."""

import pytest
import torch

from openclip_linattn.ops import OPERATORS
from openclip_linattn.ops.reference import REFERENCES
from openclip_linattn.ops.streaming import STREAMS

FACTORS = {
    "softmax": {},
    "infsa": {"rho": "per head"},
    "linear": {},
    "linearelu": {},
    "normlinear": {"scale": 0.7, "length_scale": "train", "train_tokens": 37},
    "normlinearmean": {},
    "lininfsa": {"rho": "per head"},
    "neumannlinear": {"gamma": "per head"},
}
LINEAR = [kind for kind in FACTORS if kind not in ("softmax", "infsa")]


def streamed(kind, q, k, v, size, **factors):
    """The whole output (B, H, N, D) from chunks of `size` tokens, which are handed out anew at every pass."""
    parts = {"q": q, "k": k, "v": v}

    def chunks(names):
        return zip(*(parts[name].split(size, -2) for name in names), strict=True)

    output = STREAMS[kind](chunks, q.shape[-2], **factors)
    if isinstance(output, torch.Tensor):
        assert output.shape[2] == (1 if kind == "lininfsa" else q.shape[2])
        return output.expand(-1, -1, q.shape[-2], -1)
    return torch.cat([output(part) for part in q.split(size, -2)], -2)


def per_head(factors, heads, dtype):
    return {
        name: torch.linspace(0.3, 0.9, heads, dtype=dtype) if value == "per head" else value
        for name, value in factors.items()
    }


def test_every_kind_has_a_streamed_form():
    assert STREAMS.keys() == FACTORS.keys() == OPERATORS.keys()


@pytest.mark.parametrize("size", [1, 7, 64, 1000])
@pytest.mark.parametrize(
    ("tokens", "width", "heads"), [(1, 1, 1), (2, 59, 3), (65, 16, 2), (197, 1, 1), (257, 64, 1)]
)
@pytest.mark.parametrize("kind", STREAMS)
def test_equals_the_explicit_formula(kind, tokens, width, heads, size, tokens_of):
    q, k, v = tokens_of("packed", 2, heads, tokens, width, width)
    factors = per_head(FACTORS[kind], heads, q.dtype)
    expected = REFERENCES[kind](q, k, v, **factors)
    # Where q and k are opposite, 1 + q^.k^ is nothing but rounding.
    torch.testing.assert_close(streamed(kind, q, k, v, size, **factors), expected, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("kind", STREAMS)
def test_plain_calls_have_the_operators_defaults(kind, tokens_of, relative_error):
    q, k, v = tokens_of("packed", 1, 2, 50, 16, 16)
    assert relative_error(streamed(kind, q, k, v, 13), OPERATORS[kind](q, k, v)) < 1e-8


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", LINEAR)
def test_sums_are_in_float32_under_autocast_and_in_half_precision(kind, dtype, relative_error):
    """Equal tokens of size 8: a sum of 1,025 products of 64 x 16 leaves float16's range or bfloat16's digits."""
    x = torch.full((1, 1, 1025, 16), 8.0)
    expected = REFERENCES[kind](x.double(), x.double(), x.double())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = streamed(kind, x.to(dtype), x.to(dtype), x.to(dtype), 200)
    assert got.dtype == torch.float32
    assert relative_error(got, expected) < 1e-4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["softmax", "infsa"])
def test_quadratic_kinds_are_computed_as_their_operators_under_autocast_and_in_half_precision(kind, dtype):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 65, 16, generator=generator) for _ in range(3))
    v = v.to(dtype)  # autocast leaves normed queries and keys in float32
    expected = OPERATORS[kind](q.to(dtype), k.to(dtype), v)
    with torch.autocast("cpu", dtype=dtype):
        got = streamed(kind, q, k, v, 20)
    # One rounding of the output apart: the blocks of a kernel depend on the number of queries.
    torch.testing.assert_close(got, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-3)


def test_rows_without_weight_and_without_scores_are_zero():
    k = torch.nn.functional.normalize(
        torch.randn(1, 1, 1, 16, generator=torch.Generator().manual_seed(0)), dim=-1
    )
    k, v = k.expand(1, 1, 90, 16), torch.ones(1, 1, 90, 16)
    assert torch.equal(streamed("linear", -k, k, v, 20), torch.zeros(1, 1, 90, 16))
    assert torch.equal(streamed("lininfsa", -k, k, v, 20), torch.zeros(1, 1, 90, 16))


@pytest.mark.parametrize("kind", LINEAR)
def test_many_tokens_lose_no_digits(kind, relative_error):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 100_000, 8, generator=generator) + 0.3 for _ in range(3))
    exact = streamed(kind, q.double(), k.double(), v.double(), 8192)
    assert relative_error(streamed(kind, q, k, v, 8192), exact) < 3e-5
