"""Matrix products and solves that autocast leaves alone in the backward pass too.

Switching autocast off around a forward pass covers its gradient only where the gradient is taken outside
autocast. A compiled model under autocast differentiates inside it, and so does a caller who runs backward()
there; plain products would then round to half precision again. On NVIDIA GPUs the float32 products follow
torch.set_float32_matmul_precision: with TF32 allowed their factors are rounded to 11 bits.
"""

from typing import Any

import torch
from torch import Tensor

from openclip_linattn.ops import lu
from openclip_linattn.ops.graphs import is_traced
from openclip_linattn.ops.inputs import full_precision


def product(a: Tensor, b: Tensor, row: Tensor | None = None) -> Tensor:
    """The matrix product a b of (B, H, L, M) and (B, H, M, N), plus a row (B, H, 1, N) where one is given."""
    if is_traced():
        return a @ b if row is None else a @ b + row
    result: Tensor = _Product.apply(a, b, row)
    return result


def solve(a: Tensor, b: Tensor) -> Tensor:
    """The solution x of a x = b for square matrices a (B, H, M, M) and right-hand sides b (B, H, M, N)."""
    if is_traced():
        return _Solve.forward(a, b)
    result: Tensor = _Solve.apply(a, b)
    return result


def solve_lower(a: Tensor, b: Tensor) -> Tensor:
    """The solution x of a x = b for lower triangular matrices a, by forward substitution."""
    if is_traced():
        return _SolveLower.forward(a, b)
    result: Tensor = _SolveLower.apply(a, b)
    return result


class _Product(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor, row: Tensor | None) -> Tensor:
        o = a @ b
        return o if row is None else o.add_(row)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:  # noqa: ARG004
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        a, b = ctx.saved_tensors
        of_a, of_b, of_row = ctx.needs_input_grad
        with full_precision(a):
            return (
                grad @ b.mT if of_a else None,
                a.mT @ grad if of_b else None,
                grad.sum(-2, keepdim=True) if of_row else None,
            )


class _Solve(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        return lu.solve(a, b)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, x = ctx.saved_tensors
        with full_precision(a):
            grad_b = lu.solve(a.mT, grad)
            return -(grad_b @ x.mT), grad_b


class _SolveLower(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        x: Tensor = torch.linalg.solve_triangular(a, b, upper=False)
        return x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, x = ctx.saved_tensors
        with full_precision(a):
            grad_b: Tensor = torch.linalg.solve_triangular(a.mT, grad, upper=True)
            return -(grad_b @ x.mT).tril(), grad_b
