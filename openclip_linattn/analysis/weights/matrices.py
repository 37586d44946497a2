"""Matrices of weights over pairs of tokens, known by their products with vectors."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

HELD = 2**25
"""Quadratic weights of up to this many numbers are kept; beyond it each product computes them anew, block by block."""
_BLOCK = 2**23  # numbers of one block of rows


class Weights(ABC):
    """Non-negative weights W (B, H, N, N), row i holding those of query i on all keys."""

    def __init__(self, like: Tensor) -> None:
        self.shape = tuple(like.shape[:3])
        self._like = like

    @property
    def tokens(self) -> int:
        """N."""
        return self.shape[2]

    @abstractmethod
    def times(self, x: Tensor) -> Tensor:
        """W x for x (B, H, N, M)."""

    @abstractmethod
    def transposed_times(self, x: Tensor) -> Tensor:
        """W^T x for x (B, H, N, M)."""

    @abstractmethod
    def squared_norm(self) -> Tensor:
        """The squared Frobenius norm of each head, (B, H, 1, 1)."""

    @abstractmethod
    def scaled(self, factor: Tensor | float) -> "Weights":
        """The weights times a factor that broadcasts to (B, H, N, 1), one per row at most."""

    def ones(self) -> Tensor:
        """A column of ones, (B, H, N, 1)."""
        return self._like.new_ones(*self.shape, 1)

    def row_sums(self) -> Tensor:
        """Sums over the keys, (B, H, N, 1)."""
        return self.times(self.ones())

    def column_sums(self) -> Tensor:
        """Sums over the queries, (B, H, N, 1)."""
        return self.transposed_times(self.ones())

    def row(self, token: int) -> Tensor:
        """The weights of one query on all keys, (B, H, N)."""
        unit = torch.zeros_like(self.ones())
        unit[:, :, token] = 1
        return self.transposed_times(unit).squeeze(-1)


class LowRank(Weights):
    """W = left right^T with left and right (B, H, N, R); products take O(N R)."""

    def __init__(self, left: Tensor, right: Tensor) -> None:
        super().__init__(left)
        self.left, self.right = left, right

    def times(self, x: Tensor) -> Tensor:
        """W x for x (B, H, N, M)."""
        return self.left @ (self.right.mT @ x)

    def transposed_times(self, x: Tensor) -> Tensor:
        """W^T x for x (B, H, N, M)."""
        return self.right @ (self.left.mT @ x)

    def squared_norm(self) -> Tensor:
        """The squared Frobenius norm of each head, from two Gram matrices of size R."""
        grams = (self.left.mT @ self.left) * (self.right.mT @ self.right)
        return grams.sum((-2, -1), keepdim=True)

    def scaled(self, factor: Tensor | float) -> "LowRank":
        """The weights times a factor that broadcasts to (B, H, N, 1)."""
        return LowRank(self.left * factor, self.right)


class Quadratic(Weights):
    """W whose rows come from a function of queries and keys, for kinds without a low rank.

    `rows` makes of queries (B, H, R, D) and keys (B, H, N, D) the weights (B, H, R, N) of these rows.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        rows: Callable[[Tensor, Tensor], Tensor],
        factor: Tensor | float = 1.0,
    ) -> None:
        super().__init__(q)
        self.q, self.k, self.rows = q, k, rows
        self.factor = torch.as_tensor(factor, dtype=q.dtype, device=q.device).expand(*self.shape, 1)
        count = q.shape[0] * q.shape[1] * self.tokens**2
        self._held = rows(q, k) * self.factor if count <= HELD else None

    def times(self, x: Tensor) -> Tensor:
        """W x for x (B, H, N, M)."""
        return torch.cat([block @ x for _, block in self._blocks()], -2)

    def transposed_times(self, x: Tensor) -> Tensor:
        """W^T x for x (B, H, N, M)."""
        total = torch.zeros_like(x)
        for where, block in self._blocks():
            total += block.mT @ x[:, :, where]
        return total

    def squared_norm(self) -> Tensor:
        """The squared Frobenius norm of each head."""
        norms = [block.square().sum((-2, -1), keepdim=True) for _, block in self._blocks()]
        return torch.stack(norms).sum(0)

    def scaled(self, factor: Tensor | float) -> "Quadratic":
        """The weights times a factor that broadcasts to (B, H, N, 1)."""
        return Quadratic(self.q, self.k, self.rows, self.factor * factor)

    def _blocks(self) -> Iterator[tuple[slice, Tensor]]:
        if self._held is not None:
            yield slice(None), self._held
            return
        step = max(1, _BLOCK // (self.shape[0] * self.shape[1] * self.tokens))
        for start in range(0, self.tokens, step):
            where = slice(start, start + step)
            yield where, self.rows(self.q[:, :, where], self.k) * self.factor[:, :, where]
