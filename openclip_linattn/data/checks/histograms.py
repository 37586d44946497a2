"""Histograms with fixed edges: small arrays of counts, which add up over shards."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Scale:
    """What is measured, in which unit, and the lower edges of its bins; the last bin has no upper edge."""

    name: str
    unit: str
    edges: tuple[float, ...]

    def zeros(self) -> list[int]:
        """An empty histogram."""
        return [0] * len(self.edges)

    def place(self, value: float) -> int:
        """The bin of a value that is not below the first edge."""
        return bisect_right(self.edges, value) - 1

    def total(self, histograms: Iterable[Sequence[int]]) -> list[int]:
        """The sum of histograms; an empty sequence stands for a shard that was not read."""
        counts = self.zeros()
        for histogram in histograms:
            for place, count in enumerate(histogram):
                counts[place] += count
        return counts

    def to_json(self, counts: Sequence[int]) -> dict[str, Any]:
        """Edges and counts as JSON values."""
        return {"unit": self.unit, "edges": list(self.edges), "counts": list(counts)}


# Of usable samples. The shorter side decides whether an image must be enlarged for training.
SIDES = Scale(
    "shorter side of the image",
    "px",
    (0, 32, 64, 96, 128, 160, 192, 224, 256, 320, 384, 512, 768, 1024, 2048, 4096),
)
ASPECTS = Scale(
    "width / height of the image", "", (0, 1 / 4, 1 / 3, 1 / 2, 2 / 3, 4 / 5, 5 / 4, 3 / 2, 2, 3, 4)
)
CAPTIONS = Scale(
    "length of the caption", "characters", (0, 1, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024)
)
