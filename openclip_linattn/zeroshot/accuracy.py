"""Counts right answers per class."""

from typing import Any

import torch
from torch import Tensor

from openclip_linattn.zeroshot.labels import LabelSet

TOP_K = 5


class Tally:
    """Counts, per class, the images and those whose true class is the first, or among the first five.

    Counts are kept by class index. With fewer than five classes there is no top-5.
    """

    def __init__(self, label_set: LabelSet) -> None:
        self.label_set = label_set
        size = len(label_set.classes)
        self.images = torch.zeros(size, dtype=torch.int64)
        self.top1 = torch.zeros(size, dtype=torch.int64)
        self.top5 = torch.zeros(size, dtype=torch.int64) if size >= TOP_K else None

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Count a batch: logits (B, C) and true class indices (B,), both on the same device."""
        best = logits.topk(min(TOP_K, logits.shape[1]), dim=1).indices
        right = best == labels[:, None]
        self._count(self.images, labels)
        self._count(self.top1, labels[right[:, 0]])
        if self.top5 is not None:
            self._count(self.top5, labels[right.any(dim=1)])

    @staticmethod
    def _count(counts: Tensor, labels: Tensor) -> None:
        counts += torch.bincount(labels.cpu(), minlength=len(counts))

    def result(self) -> dict[str, Any]:
        """Return n, top1, top5 (five classes or more), mean_per_class and per_class [name, n, top1].

        Accuracies are fractions. The mean per class is over the classes that have images (balanced
        accuracy); a class without images has top1 None.
        """
        n = int(self.images.sum())
        rates = [
            right / images if images else None
            for right, images in zip(self.top1.tolist(), self.images.tolist(), strict=True)
        ]
        seen = [rate for rate in rates if rate is not None]
        result: dict[str, Any] = {"n": n, "classes": len(rates), "top1": int(self.top1.sum()) / n}
        if self.top5 is not None:
            result["top5"] = int(self.top5.sum()) / n
        result["mean_per_class"] = sum(seen) / len(seen)
        result["per_class"] = [
            [name, images, rate]
            for name, images, rate in zip(self.label_set.classes, self.images.tolist(), rates, strict=True)
        ]
        return result
