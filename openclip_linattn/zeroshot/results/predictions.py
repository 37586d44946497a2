"""What a model chose for every image, in an order that does not depend on how the images were read."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

TOP_K = 5


@dataclass(frozen=True)
class Predictions:
    """Per image, in the order of the keys: key, true class (n,), and the best classes (n, k), best first.

    A key is the image's path within the set, or its shard's and its sample's key. k is five, or the number
    of classes where that is smaller.
    """

    keys: tuple[str, ...]
    labels: NDArray[np.int32]
    best: NDArray[np.int32]

    @property
    def right(self) -> NDArray[np.bool_]:
        """Whether the first class is the true one (n,)."""
        return np.equal(self.best[:, 0], self.labels)

    @property
    def right_in_top5(self) -> NDArray[np.bool_] | None:
        """Whether the true class is among the first five (n,); None with fewer than five classes."""
        return (self.best == self.labels[:, None]).any(axis=1) if self.best.shape[1] == TOP_K else None

    @property
    def digest(self) -> str:
        """A digest of keys and true classes: equal where two models were asked the same."""
        text = "".join(
            f"{key}\0{label}\n" for key, label in zip(self.keys, self.labels.tolist(), strict=True)
        )
        return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]


def gather(keys: Sequence[str], labels: Tensor, best: Tensor) -> Predictions:
    """Return the predictions of images that were read in any order; tensors are (n,) and (n, k) on the CPU."""
    order = sorted(range(len(keys)), key=keys.__getitem__)
    return Predictions(
        tuple(keys[number] for number in order),
        labels.int().numpy()[order],
        best.int().numpy()[order],
    )


def best_classes(features: Tensor, classifier: Tensor, most: int = 2**25) -> Tensor:
    """Return the best five class indices (B, 5), or all where there are fewer, best first, on the CPU.

    At most `most` similarities are held at a time (or those of one image).
    """
    classes = classifier.shape[1]
    k, step = min(TOP_K, classes), max(1, most // classes)
    parts = (features[first : first + step] @ classifier for first in range(0, len(features), step))
    return torch.cat([similarities.topk(k, dim=1).indices.int().cpu() for similarities in parts])
