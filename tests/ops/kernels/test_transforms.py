"""The operators under what else PyTorch does to a function: higher gradients, function transforms, traces, threads."""

import io

import pytest
import torch

from openclip_linattn.attention import OperatorAttention
from openclip_linattn.ops import OPERATORS, lu
from openclip_linattn.ops.reference import REFERENCES

KINDS = ("linear", "normlinear", "neumannlinear", "infsa", "lininfsa")


def leaves(dtype=torch.float64, tokens=9):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 2, 2, tokens, 4, generator=generator, dtype=torch.float64).to(dtype)
    return [part.requires_grad_() for part in x.unbind(0)]


def module(kind):
    torch.manual_seed(0)
    made = OperatorAttention(8, 2, kind=kind, train_tokens=9)
    torch.nn.init.normal_(made.in_proj_weight, std=0.5)
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_a_third_gradient_is_that_of_the_formula(kind, relative_error):
    """The gradient that comes in depends on q here, as it does in every loss that is not linear."""
    q, k, v = leaves()

    def third(operator):
        (first,) = torch.autograd.grad(operator(q, k, v).pow(3).sum(), q, create_graph=True)
        second = torch.autograd.grad(first.square().sum(), (q, v), create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in second), (q, k, v))

    for got, expected in zip(third(OPERATORS[kind]), third(REFERENCES[kind]), strict=True):
        assert relative_error(got, expected) <= 1e-7


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_gradient_taken_under_autocast_is_not_rounded(kind):
    q, k, v = leaves(torch.float32)

    def second(enabled):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            (first,) = torch.autograd.grad(OPERATORS[kind](q, k, v).square().sum(), q, create_graph=True)
            return torch.autograd.grad(first.square().sum(), (q, k, v))

    for got, expected in zip(second(True), second(False), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # softmax is PyTorch's own operator
@pytest.mark.parametrize("kind", OPERATORS)
def test_functional_gradients_are_those_of_autograd(kind, relative_error):
    model, x = module(kind), torch.randn(3, 9, 8)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters, x):
        return torch.func.functional_call(model, parameters, (x,)).square().sum()

    per_sample = torch.func.vmap(torch.func.grad(lambda p, one: loss(p, one[None])), in_dims=(None, 0))(
        parameters, x
    )
    together = torch.func.grad(loss)(parameters, x)
    model(x).square().sum().backward()
    for name, p in model.named_parameters():
        assert relative_error(together[name], p.grad) <= 1e-4, name
        assert relative_error(per_sample[name].sum(0), p.grad) <= 1e-4, name


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit")
@pytest.mark.parametrize("kind", OPERATORS)
def test_a_saved_trace_computes_the_same_for_another_number_of_tokens(kind, relative_error):
    model, saved = module(kind), io.BytesIO()
    torch.jit.save(torch.jit.trace(model, torch.randn(3, 9, 8)), saved)
    saved.seek(0)
    x = torch.randn(2, 13, 8)
    assert relative_error(torch.jit.load(saved)(x), model(x)) <= 1e-5


@pytest.mark.parametrize("kind", OPERATORS)
def test_a_module_without_data_can_be_run_and_differentiated(kind):
    with torch.device("meta"):
        model = OperatorAttention(8, 2, kind=kind, train_tokens=9)
        x = torch.empty(3, 9, 8)
    model(x).sum().backward()
    assert all(p.is_meta and p.grad.shape == p.shape for p in model.parameters())


@pytest.fixture
def eight_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(8)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("batch", [(), (1,), (2, 3), (0, 3)])
@pytest.mark.parametrize("size", [lu.LARGEST, lu.LARGEST + 1, 160])
def test_large_systems_are_solved_on_several_threads(size, batch, eight_threads, relative_error):
    generator = torch.Generator().manual_seed(0)
    a = torch.eye(size) - torch.rand(*batch, size, size, generator=generator) / size / 2
    b = torch.randn(*batch, size, 3, generator=generator)
    assert relative_error(a @ lu.solve(a, b), b) <= 1e-5


@pytest.mark.parametrize("masked", [False, True], ids=["no-mask", "padded"])
@pytest.mark.parametrize("kind", KINDS)
def test_wide_heads_on_several_threads_equal_the_formula(
    kind, masked, eight_threads, tokens_of, relative_error
):
    q, k, v = (x.requires_grad_() for x in tokens_of("packed", 2, 2, 163, 160, 5))
    mask = torch.arange(163).expand(2, -1) > 150 if masked else None
    got, expected = (f[kind](q, k, v, key_padding_mask=mask) for f in (OPERATORS, REFERENCES))
    visible = expected if mask is None else expected.masked_fill(mask[:, None, :, None], 0)
    assert relative_error(got, visible) <= 1e-9
    gradients = [torch.autograd.grad(o.square().sum(), (q, k, v)) for o in (got, visible)]
    for a, b in zip(*gradients, strict=True):
        assert relative_error(a, b) <= 1e-7


def test_neumann_attention_keeps_its_solution_once():
    q, k, v = leaves()
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
        OPERATORS["neumannlinear"](q, k, v)
    heads, tokens, rank, width = 4, 9, 5, 4
    assert sizes == [*[q.numel()] * 3, heads * (rank * (3 * rank + width + 4) + 2 * tokens), 2]
