"""Is an operator right? Its output and gradients against the explicit formula in float64, in the run's number type.

Errors are relative by norm, |got - exact| / |exact|. A gradient that vanishes exactly (that of the scores of a single
token, say) is measured against `do` instead.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite, nan

import torch
from torch import Tensor

from openclip_linattn.bench.contestants import Contestant, Function
from openclip_linattn.bench.exact_rows import ROW_FORMULAS
from openclip_linattn.bench.inputs import Inputs, Shape, make_inputs
from openclip_linattn.bench.memory import out_of_memory
from openclip_linattn.ops.tf32 import tf32_allowed

NAMES = ("o", "dq", "dk", "dv")
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}
"""Allowed errors: some rounding steps of the number type, for sums are kept in float32 at least."""
TF32_TOLERANCE = 5e-3
"""For float32 on a GPU where products may round their factors to TF32."""
LONG_SUMS = 4
"""Factor on the tolerance at the measured lengths, where sums run over up to millions of tokens."""
VANISHING = 1e-6

SHORT_TOKENS = (1, 77, 196, 197)
PREFIX_TOKENS = {"cpu": 1024, "cuda": 4096}
"""One longer sequence, whose N x N formula fits: long enough for operators that work in chunks."""
TINY_TOKENS = (1, 77)


@dataclass(frozen=True)
class Finding:
    """One comparison: `what` of `name` at `tokens` is off by `error` where `allowed` is allowed.

    problem: what was raised, where there is nothing to compare.
    """

    name: str
    tokens: int
    what: str
    error: float
    allowed: float
    problem: str = ""

    @classmethod
    def raised(cls, name: str, tokens: int, error: Exception) -> "Finding":
        """The finding that `name` raised an error instead of giving a result."""
        text = (str(error).strip().splitlines() or [""])[0]
        return cls(name, tokens, "", nan, nan, f"{type(error).__name__}: {text}")

    @property
    def passed(self) -> bool:
        """False for NaN too."""
        return isfinite(self.error) and self.error <= self.allowed

    def sentence(self) -> str:
        """What failed, for a reader of the table."""
        details = (
            f"{self.what} at {self.tokens:,} tokens is off by {self.error:.2g}, allowed {self.allowed:.2g}"
        )
        if self.problem:
            details = f"at {self.tokens:,} tokens it raises {self.problem}"
        return (
            f"{self.name}: the check against the reference failed ({details}), so none of its ratios is shown"
        )


def tolerance(dtype: torch.dtype, device: torch.device) -> float:
    """The allowed relative error of a number type on a device."""
    if dtype == torch.float32 and device.type == "cuda" and tf32_allowed():
        return TF32_TOLERANCE
    return TOLERANCES[dtype]


def check_short(contestant: Contestant, shape: Shape, lengths: Sequence[int]) -> list[Finding]:
    """Output and gradients at lengths whose N x N formula fits, on at most 2 sequences of 2 heads.

    A length whose formula is too large for the device is left out; after an error that the operator raises no
    further length is tried.
    """
    small = replace(shape, batch=min(shape.batch, 2), heads=min(shape.heads, 2))
    findings: list[Finding] = []
    for tokens in lengths:
        inputs = make_inputs(small, tokens, contestant.layout, seed=tokens)
        try:
            exact = run_training(contestant.reference, _double(inputs))
        except RuntimeError as error:
            if out_of_memory(error):
                continue
            raise
        try:
            got = run_training(contestant.function, inputs)
        except Exception as error:
            return [*findings, Finding.raised(contestant.name, tokens, error)]
        allowed = tolerance(shape.dtype, shape.device)
        scales = (inputs.v, inputs.do, inputs.do, inputs.do)
        findings += [
            Finding(contestant.name, tokens, what, relative_error(a, b, scale), allowed)
            for what, a, b, scale in zip(NAMES, got, exact, scales, strict=True)
        ]
    return findings


def check_rows(contestant: Contestant, inputs: Inputs, results: Sequence[Tensor]) -> list[Finding]:
    """Three output rows of the first and of the last head at the measured length, and their query gradients.

    results: (o,) or (o, dq, dk, dv) of the measured run. Returns nothing for kinds whose rows have no formula in
    O(N), and no gradients for those whose rows share one query.
    """
    formula = ROW_FORMULAS.get(contestant.name)
    if formula is None:
        return []
    tokens = inputs.q.shape[-2]
    index = sorted({0, tokens // 3, tokens - 1})
    q, k, v, do = (_two_heads(x) for x in inputs)
    queries = formula.queries(q, index).requires_grad_(len(results) > 1 and not formula.pooled)
    exact = formula.rows(queries, k, v)
    rows = do[:, index].double()
    expected = {"o rows": exact.expand_as(rows)}
    if queries.requires_grad:
        expected["dq rows"] = torch.autograd.grad(exact, queries, rows)[0]
    allowed = LONG_SUMS * tolerance(do.dtype, do.device)
    return [
        Finding(
            contestant.name, tokens, what, relative_error(_two_heads(got)[:, index], wanted, rows), allowed
        )
        for got, (what, wanted) in zip(results, expected.items(), strict=False)
    ]


def relative_error(got: Tensor, exact: Tensor, scale: Tensor) -> float:
    """|got - exact| / |exact|, or / |scale| where the exact value vanishes beside that."""
    difference = float((got.detach().double() - exact.detach().double()).norm())
    size, other = float(exact.detach().double().norm()), float(scale.detach().double().norm())
    return difference / (size if size > VANISHING * other else other)


def run_training(function: Function, inputs: Inputs) -> tuple[Tensor, ...]:
    """The output and the gradients of q, k and v: what forward+backward times."""
    o = function(*inputs[:3])
    return (o, *torch.autograd.grad(o, inputs[:3], inputs.do))


def run_forward(function: Function, inputs: Inputs) -> tuple[Tensor, ...]:
    """The output alone, without anything kept for gradients."""
    with torch.no_grad():
        return (function(*inputs[:3]),)


def _double(inputs: Inputs) -> Inputs:
    q, k, v = (x.detach().double().requires_grad_() for x in inputs[:3])
    return Inputs(q, k, v, inputs.do.double())


def _two_heads(x: Tensor) -> Tensor:
    """The first head of the first sequence and the last of the last, (2, N, D)."""
    return torch.stack([x.detach()[0, 0], x.detach()[-1, -1]])
