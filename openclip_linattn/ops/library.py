"""Makes an operator with several implementations one custom operator of PyTorch.

To torch.compile it is one node without a graph break; FlopCounterMode counts its matrix products; its gradient is
a custom operator too, computed from q, k, v and a small state. Which implementation runs is chosen by `kernels.choose`
where the operator is called, and is an argument of both: a graph compiled for one, in a cache on disk perhaps, is none
for the other, whose state has another shape. Higher gradients are taken through the operator's plain form, in the
time and memory of that.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from openclip_linattn.ops.inputs import full_precision
from openclip_linattn.ops.kernels import choose, implementation
from openclip_linattn.ops.layout import compute_dtype, empty_gradients, empty_output, split_gradients

NAMESPACE = "openclip_linattn"


class Definition(NamedTuple):
    """What tells one operator from another."""

    name: str
    """The module in `torch_kernels` and `triton_kernels`."""
    plain: Callable[..., Tensor]
    """(q, k, v, *factors) -> o in differentiable operations."""
    forward_macs: Callable[[int, int, int], int]
    """Multiply-adds of the matrix products of one head, from N, D and Dv."""
    backward_macs: Callable[[int, int, int], int]
    factors: str = ""
    """Arguments after q, k and v in PyTorch's schema language, with the comma before them."""
    saves_output: bool = False
    factor_gradient: bool = False
    """There is one factor, a tensor, and it has a gradient."""
    factors_shape_state: bool = False
    """The shape of the state depends on the factors."""
    empty_output: Callable[[Tensor, Tensor], Tensor] = empty_output
    """From q and v."""


def define(d: Definition) -> Callable[..., tuple[Tensor, Tensor]]:
    """Register an operator and its gradient. Returns (q, k, v, *factors) -> (o, state) on checked tensors.

    Shapes: q, k (B, H, N, D), v (B, H, N, Dv), of one dtype; o as the definition says.
    """
    saved = "Tensor do, Tensor q, Tensor k, Tensor v, " + "Tensor o, " * d.saves_output + "Tensor state"
    results = "(Tensor, Tensor)" if d.factor_gradient else "Tensor"
    forward: Any = torch.library.custom_op(
        f"{NAMESPACE}::{d.name}_attention",
        _forward(d),
        mutates_args=(),
        schema=f"(Tensor q, Tensor k, Tensor v{d.factors}, str kernel) -> (Tensor, Tensor)",
    )
    backward: Any = torch.library.custom_op(
        f"{NAMESPACE}::{d.name}_attention_backward",
        _backward(d),
        mutates_args=(),
        schema=f"({saved}{d.factors}, str kernel) -> {results}",
    )
    forward.register_fake(_fake_forward(d))
    backward.register_fake(_fake_backward(d))
    forward.register_autograd(_gradient(d, backward), setup_context=_save(d))
    backward.register_autograd(_second_gradient(d), setup_context=_save_for_second)
    operators = getattr(torch.ops, NAMESPACE)
    register_flop_formula(getattr(operators, f"{d.name}_attention"))(_flops(d.forward_macs, 0))
    register_flop_formula(getattr(operators, f"{d.name}_attention_backward"))(_flops(d.backward_macs, 1))
    registered: Callable[..., tuple[Tensor, Tensor]] = getattr(operators, f"{d.name}_attention").default

    def function(q: Tensor, k: Tensor, v: Tensor, *factors: Any) -> tuple[Tensor, Tensor]:
        return registered(q, k, v, *factors, choose(q, v))

    return function


def _forward(d: Definition) -> Callable[..., tuple[Tensor, Tensor]]:
    def forward(q: Tensor, k: Tensor, v: Tensor, *factors: Any) -> tuple[Tensor, Tensor]:
        *given, kernel = factors
        with _without_autocast(q):
            result: tuple[Tensor, Tensor] = implementation(d.name, kernel).forward(q, k, v, *given)
        return result

    return forward


def _backward(d: Definition) -> Callable[..., Any]:
    def backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
        *given, kernel = rest
        with _without_autocast(q):
            return implementation(d.name, kernel).backward(do, q, k, v, *given)

    return backward


def _without_autocast(x: Tensor) -> AbstractContextManager[object]:
    # Entering a context costs as much as a small product, and mostly autocast is off here.
    device = x.device.type
    enabled = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return full_precision(x) if enabled else nullcontext()


def _fake_forward(d: Definition) -> Callable[..., tuple[Tensor, Tensor]]:
    def fake(q: Tensor, k: Tensor, v: Tensor, *factors: Any) -> tuple[Tensor, Tensor]:  # noqa: ARG001
        *given, kernel = factors
        shape = implementation(d.name, kernel).state_shape(q, v, *given if d.factors_shape_state else ())
        return d.empty_output(q, v), q.new_empty(shape, dtype=compute_dtype(q))

    return fake


def _fake_backward(d: Definition) -> Callable[..., Any]:
    def fake(do: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:  # noqa: ARG001
        gradients = empty_gradients(q, v)
        return (gradients, torch.empty_like(rest[-2])) if d.factor_gradient else gradients

    return fake


def _save(d: Definition) -> Callable[..., None]:
    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        o, state = output
        q, k, v, *factors = inputs
        tensors = [x for x in factors if isinstance(x, Tensor)]
        ctx.numbers = [x for x in factors if not isinstance(x, Tensor)]
        ctx.save_for_backward(q, k, v, *[o] * d.saves_output, state, *tensors)
        ctx.mark_non_differentiable(state)
        ctx.set_materialize_grads(False)

    return save


def _gradient(d: Definition, operator: Any) -> Callable[..., tuple[Tensor | None, ...]]:
    def gradient(ctx: Any, do: Tensor | None, _of_state: None) -> tuple[Tensor | None, ...]:
        if do is None:
            return (None,) * len(ctx.needs_input_grad)
        q, *saved = ctx.saved_tensors  # once: activation checkpointing computes them on the way
        result = operator(do, q, *saved, *ctx.numbers)
        buffer, of_factors = (result[0], result[1:]) if d.factor_gradient else (result, ())
        return *split_gradients(buffer, q.shape[1], q.shape[3]), *of_factors, *[None] * len(ctx.numbers)

    return gradient


def _save_for_second(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG001
    ctx.numbers = [x for x in inputs if not isinstance(x, Tensor)]
    ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)))


def _second_gradient(d: Definition) -> Callable[..., tuple[Tensor | None, ...]]:
    """The gradient of `_backward` with respect to do, q, k, v and the factor."""

    def second(ctx: Any, of_buffer: Tensor, *of_factor: Tensor) -> tuple[Tensor | None, ...]:
        third = torch.is_grad_enabled()  # the result is to be differentiated again
        # The caller may differentiate inside autocast.
        with torch.enable_grad(), full_precision(of_buffer):
            do, q, k, v, *rest = map(_alias, ctx.saved_tensors)
            inputs = [q, k, v, *rest[-1:]] if d.factor_gradient else [q, k, v]
            o = d.plain(q, k, v, *inputs[3:], *ctx.numbers[:-1])  # without the kernel
            first = torch.autograd.grad(o, inputs, do, create_graph=True)
            outer = *split_gradients(of_buffer, q.shape[1], q.shape[3]), *of_factor
            second = torch.autograd.grad(first, [do, *inputs], outer, create_graph=third)
        unused = [None] * (4 + len(rest) - len(second))  # the output and the state
        return *second[:4], *unused, *second[4:], *[None] * len(ctx.numbers)

    return second


def _alias(x: Tensor) -> Tensor:
    """The tensor as an input of its own: that do may depend on q is no part of the gradient of one operator."""
    return x.view_as(x) if x.requires_grad else x.detach().requires_grad_()


def _flops(macs: Callable[[int, int, int], int], position: int) -> Callable[..., int]:
    """A flop formula that finds q, k and v from `position` on."""

    def flops(*shapes: Any, out_shape: Any = None, **_: Any) -> int:  # noqa: ARG001
        (batch, heads, tokens, width), value_width = shapes[position], shapes[position + 2][-1]
        products: int = batch * heads * macs(tokens, width, value_width)
        return 2 * products

    return flops
