"""The operators as custom operators of PyTorch: schemas, graphs, second gradients, flops, memory and the choice."""

import re
from functools import partial

import pytest
import torch
from torch.profiler import profile
from torch.utils.flop_counter import FlopCounterMode

from openclip_linattn.errors import UserError
from openclip_linattn.ops import OPERATORS, kernels, reference
from openclip_linattn.ops.packed import unpack
from openclip_scaling.flops import attention_macs

GAMMA = torch.tensor([[0.5, 0.9]], dtype=torch.float64)
CUSTOM = {
    "normalized": (0.5, "torch"),
    "linear": ("torch",),
    "neumann": (GAMMA, "torch"),
    "inf": (True, "torch"),
    "lininf": ("torch",),
}
KIND = {
    "normlinear": "normalized",
    "linear": "linear",
    "neumannlinear": "neumann",
    "infsa": "inf",
    "lininfsa": "lininf",
}
FACTORS = {"infsa": "rho", "lininfsa": "rho", "neumannlinear": "gamma"}


def operator(name, suffix=""):
    return getattr(torch.ops.openclip_linattn, f"{name}_attention{suffix}").default


def inputs(layout, value_width, dtype):
    q, k, v = (torch.randn(2, 9, 2, width, dtype=torch.float64).to(dtype) for width in (4, 4, value_width))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return [x.contiguous() if layout == "contiguous" else x for x in (q, k, v)]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("value_width", [4, 3])
@pytest.mark.parametrize("layout", ["contiguous", "strided"])
@pytest.mark.parametrize("name", CUSTOM)
def test_passes_the_checks_of_pytorch(name, layout, value_width, dtype):
    torch.manual_seed(0)
    q, k, v = (x.requires_grad_() for x in inputs(layout, value_width, dtype))
    # AOT autograd is compared within the tolerances of the dtype; bfloat16 differs by the order of its sums.
    utils = ["test_schema", "test_autograd_registration", "test_faketensor"]
    if dtype != torch.bfloat16:
        utils.append("test_aot_dispatch_dynamic")
    torch.library.opcheck(operator(name), (q, k, v, *CUSTOM[name]), test_utils=utils)
    o, state = operator(name)(q, k, v, *CUSTOM[name])
    saved = (o.detach(), state) if name == "inf" else (state,)
    arguments = (torch.randn_like(o), *(x.detach() for x in (q, k, v)), *saved, *CUSTOM[name])
    torch.library.opcheck(
        operator(name, "_backward"), arguments, test_utils=["test_schema", "test_faketensor"]
    )


@pytest.mark.parametrize("name", CUSTOM)
def test_the_gradient_of_the_gradient(name):
    torch.manual_seed(1)
    q, k, v = (x.requires_grad_() for x in inputs("strided", 3, torch.float64))
    factors = tuple(x.clone().requires_grad_() if isinstance(x, torch.Tensor) else x for x in CUSTOM[name])
    learnt = [x for x in factors if isinstance(x, torch.Tensor)]
    rest = tuple(x for x in factors if not isinstance(x, torch.Tensor))

    def output(q, k, v, *learnt):
        return operator(name)(q, k, v, *learnt, *rest)[0]

    assert torch.autograd.gradgradcheck(output, (q, k, v, *learnt), atol=1e-6)


@pytest.mark.parametrize("kind", KIND)
def test_is_one_node_of_a_compiled_graph_for_any_number_of_tokens(kind, relative_error):
    nodes = []

    def backend(graph, _):
        nodes.append(
            [str(node.target) for node in graph.graph.nodes if "openclip_linattn" in str(node.target)]
        )
        return graph

    torch.compiler.reset()
    compiled = torch.compile(OPERATORS[kind], fullgraph=True, dynamic=True, backend=backend)
    for tokens in (9, 700):
        q, k, v = torch.randn(3, 2, 2, tokens, 4).unbind(0)
        assert relative_error(compiled(q, k, v), OPERATORS[kind](q, k, v)) <= 1e-6
    assert nodes == [[f"openclip_linattn.{KIND[kind]}_attention.default"]]


def test_a_graph_says_which_implementation_it_is_for(monkeypatch):
    """PyTorch keeps compiled graphs on disk, and the implementations save states of other shapes."""
    monkeypatch.setattr(kernels, "_INTERPRETED", True)
    monkeypatch.setattr(kernels, "supported", lambda *_: True)
    seen = []

    def backend(graph, _):
        seen.extend(node.args[-1] for node in graph.graph.nodes if "openclip_linattn" in str(node.target))
        return lambda *inputs: (torch.zeros(1, 2, 9, 4),)

    for choice in ("torch", "triton"):
        torch.compiler.reset()
        monkeypatch.setenv(kernels.VARIABLE, choice)
        torch.compile(OPERATORS["linear"], fullgraph=True, backend=backend)(
            *torch.randn(3, 1, 2, 9, 16).unbind(0)
        )
    assert seen == ["torch", "triton"]


@pytest.mark.parametrize("kind", KIND)
def test_an_exported_graph_holds_operations_that_others_know(kind, relative_error):
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return OPERATORS[kind](q, k, v)

    tensors = tuple(torch.randn(3, 1, 2, 9, 4).unbind(0))
    program = torch.export.export(Model(), tensors)
    assert not any("openclip_linattn" in str(node.target) for node in program.graph.nodes)
    assert relative_error(program.module()(*tensors), Model()(*tensors)) <= 1e-6


@pytest.mark.parametrize("kind", KIND)
def test_the_flop_counter_sees_the_products_of_the_cost_model(kind):
    tokens, heads, width = 50, 3, 16
    q, k, v = torch.randn(3, 2, heads, tokens, width, requires_grad=True).unbind(0)
    with FlopCounterMode(display=False) as forward:
        o = OPERATORS[kind](q, k, v)
    # The cost model counts in whole numbers of a third of a cube.
    expected = 2 * 2 * attention_macs(kind, tokens, heads * width, heads)
    assert forward.get_total_flops() == pytest.approx(expected, rel=1e-4)
    with FlopCounterMode(display=False) as backward:
        torch.autograd.grad(o.sum(), (q, k, v))
    assert 1.2 * expected <= backward.get_total_flops() <= 2.6 * expected


def peak(operator, arguments):
    """The most bytes of tensors that live at once during a forward and backward pass, beyond the arguments."""

    def run():
        o = operator(*arguments)
        return torch.autograd.grad(o, arguments, torch.ones_like(o))

    run()
    with profile(profile_memory=True) as recorded:
        run()
    events = recorded.profiler.kineto_results.events()
    sizes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    assert sizes
    now = highest = 0
    for _, size in sorted(sizes, key=lambda pair: pair[0]):
        now += size
        highest = max(highest, now)
    return highest


@pytest.mark.filterwarnings("ignore:.*Profiler")
@pytest.mark.parametrize("kind", ["linear", "normlinear", "neumannlinear"])
def test_peak_memory_is_that_of_the_bare_products(kind):
    """Within 5 %: nothing of the size of q is held beyond what the bare products hold."""
    q, k, v = (
        x.detach().requires_grad_() for x in torch.randn(2, 8192, 3, 2, 64).permute(2, 0, 3, 1, 4).unbind(0)
    )
    bare = peak(lambda q, k, v: q @ (k.mT @ v), (q, k, v))
    assert peak(OPERATORS[kind], (q, k, v)) <= 1.05 * bare


@pytest.mark.parametrize("kind", OPERATORS)
def test_a_packed_projection_gets_the_gradient_of_its_parts(kind, relative_error):
    packed = torch.randn(2, 9, 3, 2, 4, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(
        OPERATORS[kind](*packed.permute(2, 0, 3, 1, 4).unbind(0)).square().sum(), packed
    )
    (got,) = torch.autograd.grad(OPERATORS[kind](*unpack(packed)).square().sum(), packed)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("kind", KIND)
def test_the_gradient_of_a_packed_projection_is_not_copied(kind, monkeypatch):
    def refuse(*_):
        raise AssertionError("copied")

    monkeypatch.setattr(torch, "stack", refuse)
    packed = torch.randn(2, 9, 3, 2, 4, requires_grad=True)
    OPERATORS[kind](*unpack(packed)).square().sum().backward()
    assert packed.grad.abs().sum() > 0


def test_gradients_from_two_uses_of_a_packed_projection_add_up():
    packed = torch.randn(2, 9, 3, 2, 4, dtype=torch.float64, requires_grad=True)

    def twice(q, k, v):
        return OPERATORS["normlinear"](q, k, v) + OPERATORS["linear"](v, q, k)

    got = torch.autograd.grad(twice(*unpack(packed)).square().sum(), packed)
    expected = torch.autograd.grad(twice(*packed.permute(2, 0, 3, 1, 4).unbind(0)).square().sum(), packed)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("masked", [False, True], ids=["no-mask", "padded"])
@pytest.mark.parametrize("kind", OPERATORS)
def test_the_environment_may_ask_for_the_formula(kind, masked, monkeypatch, packed_tokens, relative_error):
    q, k, v = packed_tokens(2, 2, 19, 4, torch.float32)
    mask = torch.arange(19).expand(2, -1) > 15 if masked else None
    expected = OPERATORS[kind](q, k, v, key_padding_mask=mask)
    monkeypatch.setenv(kernels.VARIABLE, "reference")
    seen, visible = [], reference._visible
    monkeypatch.setattr(reference, "_visible", lambda *a, **b: seen.append(1) or visible(*a, **b))
    got = OPERATORS[kind](q, k, v, key_padding_mask=mask)
    assert seen
    assert relative_error(got, expected) <= 1e-5
    assert (got.requires_grad, got.dtype, got.shape) == (True, expected.dtype, expected.shape)


def test_the_environment_may_ask_for_torch(monkeypatch):
    monkeypatch.setenv(kernels.VARIABLE, "torch")
    q, k, v = torch.randn(3, 1, 2, 9, 4).unbind(0)
    assert kernels.choose(q, v) == "torch"
    assert OPERATORS["normlinear"](q, k, v).isfinite().all()


@pytest.mark.parametrize("kind", ["normlinear", "softmax"])
def test_an_unknown_implementation_is_refused(kind, monkeypatch):
    monkeypatch.setenv(kernels.VARIABLE, "cuda")
    message = "OPENCLIP_LINATTN_KERNEL must be one of reference, torch, triton, got 'cuda'"
    with pytest.raises(UserError, match=message):
        OPERATORS[kind](*torch.randn(3, 1, 2, 9, 4).unbind(0))


def test_triton_is_refused_where_it_cannot_run(monkeypatch):
    monkeypatch.setenv(kernels.VARIABLE, "triton")
    monkeypatch.setattr(kernels, "_INTERPRETED", False)
    message = "OPENCLIP_LINATTN_KERNEL=triton, but no Triton kernel takes torch.float32 queries on cpu"
    with pytest.raises(UserError, match=re.escape(message)):
        OPERATORS["normlinear"](*torch.randn(3, 1, 2, 9, 4).unbind(0))


@pytest.mark.parametrize("kind", KIND)
def test_inputs_without_gradient_and_unused_outputs(kind):
    q, k, v = torch.randn(3, 1, 2, 9, 4).unbind(0)
    v.requires_grad_()
    (dv,) = torch.autograd.grad(OPERATORS[kind](q, k, v).sum(), v)
    assert dv.shape == v.shape
    if kind in FACTORS:
        factor = torch.tensor([0.5, 0.5], requires_grad=True)
        function = partial(OPERATORS[kind], **{FACTORS[kind]: factor})
        (gradient,) = torch.autograd.grad(function(q, k, v.detach()).sum(), factor)
        assert gradient.abs().min() > 0
