"""Takes a packed projection apart so that its gradient comes together without a copy."""

from typing import Any

import torch
from torch import Tensor

from openclip_linattn.ops.graphs import needs_known_operations
from openclip_linattn.ops.layout import split_gradients


def unpack(packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The views q, k, v (B, H, N, D) of a packed projection (B, N, 3, H, D).

    The custom operators write the gradients of q, k and v into one buffer of the layout of `packed`
    (`layout.empty_gradients`), which then is the gradient of `packed`. Gradients of another layout are copied, and
    so are all in a compiled or recorded graph, which does not know where a tensor comes from. A hook that keeps the
    gradient of q, k or v keeps a view of that buffer: it clones it if the gradient of `packed` is changed in place.
    """
    if torch.compiler.is_compiling() or needs_known_operations():
        q, k, v = packed.permute(2, 0, 3, 1, 4).unbind(0)
        return q, k, v
    result: tuple[Tensor, Tensor, Tensor] = _Unpack.apply(packed)
    return result


class _Unpack(torch.autograd.Function):
    @staticmethod
    def forward(packed: Tensor) -> tuple[Tensor, ...]:
        return packed.permute(2, 0, 3, 1, 4).unbind(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:  # noqa: ARG004
        buffer = _common_buffer(gradients)
        return torch.stack(gradients, 2).permute(0, 3, 2, 1, 4) if buffer is None else buffer


def _common_buffer(gradients: tuple[Tensor, ...]) -> Tensor | None:
    """The buffer (B, N, 3, H, D) of which the gradients (B, H, N, D) are the three parts, or None."""
    batch, heads, tokens, width = gradients[0].shape
    base = gradients[0]._base
    if base is None or base.shape != (batch, tokens, 3 * heads * width) or not base.is_contiguous():
        return None
    parts = split_gradients(base, heads, width)
    same = all(
        x._base is base and x.storage_offset() == part.storage_offset() and x.stride() == part.stride()
        for x, part in zip(gradients, parts, strict=True)
    )
    return base.view(batch, tokens, 3, heads, width) if same else None
