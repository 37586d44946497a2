"""The checks themselves: exact rows against the formulas, and what counts as wrong."""

import pytest
import torch

from openclip_linattn.bench import exact_rows
from openclip_linattn.bench.checks import Finding, check_rows, check_short, relative_error, run_training
from openclip_linattn.bench.contestants import contestants
from openclip_linattn.bench.exact_rows import ROW_FORMULAS
from openclip_linattn.bench.inputs import Shape, make_inputs
from openclip_linattn.ops import OPERATORS

CPU = torch.device("cpu")
ENTRANTS = {entrant.name: entrant for entrant in contestants(list(OPERATORS), "packed", "cpu")}


@pytest.mark.parametrize("name", ROW_FORMULAS)
def test_exact_rows_are_rows_of_the_formula(name, monkeypatch):
    monkeypatch.setattr(exact_rows, "BLOCK", 16)
    shape = Shape(2, 3, 8, torch.float64, CPU)
    inputs = make_inputs(shape, 41, "packed")
    results = run_training(ENTRANTS[name].reference, inputs)
    findings = check_rows(ENTRANTS[name], inputs, results)
    assert [finding.what for finding in findings] == ["o rows", "dq rows"][: 1 if name == "lininfsa" else 2]
    for finding in findings:
        assert finding.error < 1e-12, finding
        assert finding.tokens == 41


def test_rows_are_looked_at_in_the_first_and_the_last_head():
    shape = Shape(2, 3, 8, torch.float64, CPU)
    inputs = make_inputs(shape, 41, "packed")
    o, *gradients = run_training(ENTRANTS["linear"].reference, inputs)
    for b, h, row, seen in ((0, 0, 40, True), (1, 2, 0, True), (1, 2, 13, True), (0, 1, 0, False)):
        broken = o.detach().clone()
        broken[b, h, row] *= 1.5
        findings = check_rows(ENTRANTS["linear"], inputs, (broken, *gradients))
        assert findings[0].passed != seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ENTRANTS)
def test_every_contestant_passes_at_short_lengths(name, dtype):
    findings = check_short(ENTRANTS[name], Shape(1, 2, 16, dtype, CPU), (1, 33))
    assert [finding.what for finding in findings] == ["o", "dq", "dk", "dv"] * 2
    assert all(finding.passed for finding in findings), [f.sentence() for f in findings if not f.passed]


def test_lengths_whose_formula_does_not_fit_are_left_out():
    def too_large(q, k, v):
        if q.shape[-2] > 10:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes.")
        return ENTRANTS["linear"].reference(q, k, v)

    entrant = type(ENTRANTS["linear"])(
        "linear", "operator", ENTRANTS["linear"].function, too_large, "linear", "packed"
    )
    findings = check_short(entrant, Shape(1, 1, 8, torch.float32, CPU), (5, 20))
    assert {finding.tokens for finding in findings} == {5}


def test_relative_error_of_a_value_that_vanishes_is_measured_against_the_scale():
    scale = torch.full((4,), 2.0)
    assert relative_error(torch.full((4,), 1e-3), torch.zeros(4), scale) == pytest.approx(5e-4)
    assert relative_error(torch.full((4,), 1.01), torch.ones(4), scale) == pytest.approx(1e-2, rel=1e-3)


def test_a_nan_is_wrong():
    assert not Finding("linear", 1, "o", float("nan"), 1.0).passed
    assert not Finding.raised("linear", 1, ValueError()).passed
    assert "raises ValueError" in Finding.raised("linear", 1, ValueError()).sentence()


def test_both_layouts_hold_the_same_numbers():
    shape = Shape(2, 3, 8, torch.float32, CPU)
    packed, contiguous = (make_inputs(shape, 5, layout) for layout in ("packed", "contiguous"))
    for a, b in zip(packed, contiguous, strict=True):
        assert torch.equal(a, b)
        assert b.is_contiguous()
    assert {x.untyped_storage().data_ptr() for x in packed[:3]} == {packed.q.untyped_storage().data_ptr()}
    assert packed.q.stride() == (5 * 3 * 3 * 8, 8, 3 * 3 * 8, 1)
    assert packed.do.transpose(1, 2).is_contiguous()
    assert all(x.is_leaf and x.requires_grad for x in packed[:3])
