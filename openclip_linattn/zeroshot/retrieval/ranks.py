"""Recall@k between images and texts from their features, in blocks: no N x M matrix is ever in memory."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Scores closer than this are equal: float32 features of norm 1 tell no more apart.
TIE = 1e-7
_IMAGES_PER_BLOCK = 1024
_TEXTS_PER_BLOCK = 8192


@dataclass(frozen=True)
class Hits:
    """Per query (rows) and k (columns), the chance that a right answer is among the k best: 0 or 1 but for ties."""

    images: Tensor
    texts: Tensor


def recall_hits(
    images: Tensor, texts: Tensor, owners: Tensor, ks: Sequence[int], *, device: torch.device
) -> Hits:
    """Return the hits of image-to-text (N, K) and text-to-image (M, K) retrieval, float64 on the CPU.

    `images` (N, d) and `texts` (M, d) are features of norm 1, `owners` (M,) the image of each text, and every
    image owns a text. An image's hit is any of its own texts among the k best texts, a text's is its image
    among the k best images. Where other scores equal that of the right answer, a hit is the expected one
    over all orders of the equals: counting only greater scores would give a model whose features are all
    alike a recall of 1, and counting equals as greater would punish captions that occur twice.
    Scores are computed in float64.
    """
    own_scores = _own_scores(images, texts, owners)
    best = torch.full((len(images),), -torch.inf, dtype=torch.float64)
    best = best.scatter_reduce(0, owners, own_scores, "amax")
    own_best = torch.zeros(len(images), dtype=torch.int64)
    own_best.index_add_(0, owners, (own_scores >= best[owners] - TIE).long())
    count = _Counts(len(images), len(texts))
    for first in range(0, len(images), _IMAGES_PER_BLOCK):
        rows = slice(first, first + _IMAGES_PER_BLOCK)
        left = images[rows].to(device, torch.float64)
        numbers = torch.arange(first, first + len(left), device=device)[:, None]
        for start in range(0, len(texts), _TEXTS_PER_BLOCK):
            columns = slice(start, start + _TEXTS_PER_BLOCK)
            scores = left @ texts[columns].to(device, torch.float64).T
            scores.masked_fill_(owners[columns].to(device) == numbers, -torch.inf)
            count.add(scores, rows, columns, best[rows].to(device), own_scores[columns].to(device))
    one = torch.ones(len(texts), dtype=torch.int64)
    return Hits(
        torch.stack([_chance(*count.images, own_best, k) for k in ks], dim=1),
        torch.stack([_chance(*count.texts, one, k) for k in ks], dim=1),
    )


class _Counts:
    """Counts, per query, the wrong answers whose score is greater than the right one's, and those equal to it."""

    def __init__(self, images: int, texts: int) -> None:
        self.images = (torch.zeros(images, dtype=torch.int64), torch.zeros(images, dtype=torch.int64))
        self.texts = (torch.zeros(texts, dtype=torch.int64), torch.zeros(texts, dtype=torch.int64))

    def add(self, scores: Tensor, rows: slice, columns: slice, best: Tensor, own: Tensor) -> None:
        """Count a block of wrong scores against those of the right answers, of its images and of its texts."""
        for (greater, tied), part, right, dim in (
            (self.images, rows, best[:, None], 1),
            (self.texts, columns, own[None], 0),
        ):
            above = (scores > right + TIE).sum(dim).cpu()
            greater[part] += above
            tied[part] += (scores >= right - TIE).sum(dim).cpu() - above


def _own_scores(images: Tensor, texts: Tensor, owners: Tensor) -> Tensor:
    blocks = [
        (some.double() * images[of].double()).sum(dim=1)
        for some, of in zip(
            torch.split(texts, _TEXTS_PER_BLOCK), torch.split(owners, _TEXTS_PER_BLOCK), strict=True
        )
    ]
    return torch.cat(blocks)


def _chance(greater: Tensor, tied: Tensor, own: Tensor, k: int) -> Tensor:
    """Return the chance that one of `own` right answers stands among the first k.

    `greater` answers stand before all of them; the `own` and the `tied` wrong ones follow in any order.
    """
    together = (tied + own).double()
    places = (k - greater).clamp(min=0).double().minimum(together)
    miss = torch.ones_like(together)
    for placed in range(int(own.max())):
        factor = (together - places - placed).clamp(min=0) / (together - placed).clamp(min=1)
        miss = torch.where(own > placed, miss * factor, miss)
    return 1 - miss
