"""Walks over tensors (B, H, N, D) in blocks that stay in cache.

A block is a few batch elements with all their heads and a range of their tokens, copied into scratch memory as
(G, L, D), G = batch elements x heads, in the dtype of the computation. The copy is what makes it fast: the rows
of a packed projection lie a page apart, and everything after the copy reads them where they are dense.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from openclip_linattn.ops.inputs import TINY
from openclip_linattn.ops.layout import compute_dtype

CPU_BLOCK = 3 << 16
"""Elements of a block per thread: three quarters of a MiB in float32, of which three fit a level-2 cache."""

DEVICE_BLOCK = 1 << 25
"""Elements of a block elsewhere, where a kernel launch costs more than a pass over memory."""


class Blocks:
    """The blocks of one call, and scratch memory for them.

    Tensors of tokens are (B, H, N, D) or, for what the operators keep per row, (B H, N, 1).

    Args:
        q, v: queries (B, H, N, D) and values (B, H, N, Dv), for shapes, dtype and device.
        scratch: the number of scratch buffers.
    """

    def __init__(self, q: Tensor, v: Tensor, scratch: int) -> None:
        batch, heads, tokens, width = q.shape
        dtype = compute_dtype(q)
        row = heads * max(width, v.shape[-1])
        size = CPU_BLOCK * torch.get_num_threads() if q.device.type == "cpu" else DEVICE_BLOCK
        self._batch = max(1, min(batch, size // (row * tokens)))
        pieces = -(-row * tokens // size)
        # Even pieces: a last one of a single token would cost as many calls as a full one.
        self._tokens = tokens if self._batch > 1 else -(-tokens // pieces)
        self._dtype = dtype
        self._buffers = q.new_empty(scratch, self._batch * self._tokens * row, dtype=dtype).unbind()

    def groups(self, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """The tensors (B, ...) or (B H, ...) in the batch elements of one block after the other."""
        batch = tensors[0].shape[0]
        if self._batch >= batch:
            yield tensors
            return
        for start in range(0, batch, self._batch):
            length = min(self._batch, batch - start)
            yield tuple(x.narrow(0, start * (n := x.shape[0] // batch), length * n) for x in tensors)

    def chunks(self, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """The tensors (..., N, D) of a group in the tokens of one block after the other."""
        tokens = tensors[0].shape[-2]
        if self._tokens >= tokens:
            yield tensors
            return
        for start in range(0, tokens, self._tokens):
            length = min(self._tokens, tokens - start)
            yield tuple(x.narrow(-2, start, length) for x in tensors)

    def empty(self, chunk: Tensor, buffer: int) -> Tensor:
        """A scratch buffer as (G, L, D), for a chunk (B', H, L, D); its content is undefined."""
        batch, heads, tokens, width = chunk.shape
        return self._buffers[buffer][: chunk.numel()].view(batch * heads, tokens, width)

    def read(self, chunk: Tensor, buffer: int) -> Tensor:
        """A chunk (B', H, L, D) as (G, L, D), not to be written to: dense rows as they are, others copied."""
        batch, heads, tokens, width = chunk.shape
        outer, inner, row, element = chunk.stride()
        dense = element == 1 and row == width and (batch == 1 or outer == heads * inner)
        if dense and chunk.dtype == self._dtype:
            return chunk.flatten(0, 1)
        scratch = self._buffers[buffer][: chunk.numel()]
        scratch.view(chunk.shape).copy_(chunk)
        return scratch.view(batch * heads, tokens, width)

    def inverse_norms(self, x: Tensor, out: Tensor) -> Tensor:
        """(|x|^2 + 1e-12)^-1/2 of the rows of a block x (G, L, D), written to out (G, L, 1)."""
        norms: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, out=out)
        return norms.square_().add_(TINY).rsqrt_()

    def scaled(self, chunk: Tensor, factors: Tensor, buffer: int) -> Tensor:
        """The rows of a chunk (B', H, L, D) times factors (G, L, 1), in a scratch buffer (G, L, D)."""
        scratch = self.empty(chunk, buffer)
        torch.mul(chunk, _like(factors, chunk), out=scratch.view(chunk.shape))
        return scratch

    def sum(self, chunk: Tensor) -> Tensor:
        """The sum over the tokens of a chunk (B', H, L, D), as (G, 1, D)."""
        return chunk.sum(-2, keepdim=True, dtype=self._dtype).flatten(0, 1)

    def write(self, chunk: Tensor, base: Tensor, x: Tensor, factors: Tensor, sign: int = 1) -> None:
        """Write base + sign factors x to a chunk (B', H, L, D) of an output.

        Shapes: base and x (G, L or 1, D), factors (G, L, 1).
        """
        base, x, factors = (_like(y, chunk) for y in (base, x, factors))
        if chunk.dtype == self._dtype:
            torch.addcmul(base, x, factors, value=sign, out=chunk)
        else:
            chunk.copy_(torch.addcmul(base, x, factors, value=sign))


def _like(x: Tensor, chunk: Tensor) -> Tensor:
    """A tensor (G, ...) as (B', H, ...)."""
    return x.view(*chunk.shape[:2], *x.shape[1:])


def row_products(x: Tensor, y: Tensor, scratch: Tensor) -> Tensor:
    """The inner products x_i.y_i of rows (G, L, D), as (G, L, 1)."""
    return torch.mul(x, y, out=scratch).sum(-1, keepdim=True)
