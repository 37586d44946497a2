"""95 % intervals of accuracies: Wilson's for counts, the bootstrap for means over classes and for recall.

Where each class is seen all right or all wrong, the bootstrap shows no spread; there too Wilson's stands.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest

from openclip_linattn.errors import UserError

CONFIDENCE = 0.95
DRAWS = 2000
_NUMBERS_PER_STEP = 4_000_000  # 32 MB at a time

Interval = tuple[float, float]
Floats = NDArray[np.float64]


def wilson(right: int, n: int) -> Interval:
    """Return Wilson's 95 % interval (fractions) of an accuracy of `right` of `n` images.

    Unlike the normal approximation it has a width at 0 and at 1 and never leaves [0, 1] (Wilson 1927).
    Raises UserError where `right` does not lie between 0 and n, or n is 0.
    """
    if not 0 <= right <= n or n == 0:
        raise UserError(f"{right} of {n} images is no accuracy; right answers lie between 0 and n, n above 0")
    interval = binomtest(right, n).proportion_ci(CONFIDENCE, method="wilson")
    return float(interval.low), float(interval.high)


def mean_per_class_interval(right: Sequence[int], n: Sequence[int], *, seed: int = 0) -> Interval:
    """Return the 95 % bootstrap interval of the mean over classes of right[c] / n[c], classes as given.

    Images are drawn again within each class, one fewer than it has, which makes the variance unbiased in
    small classes (Rao and Wu 1988). A class of one image says nothing of its own spread: such classes are
    pooled, which errs on the wide side. Classes without images are left out, as in the mean itself.
    Raises UserError where there are no images, or where counts do not fit together.
    """
    hits, sizes = np.asarray(right), np.asarray(n)
    if hits.shape != sizes.shape or (hits > sizes).any() or (hits < 0).any():
        raise UserError("right answers and images per class do not fit together; give both for every class")
    if not sizes.any():
        raise UserError("no class has images, so there is no mean over classes")
    rng = np.random.default_rng(seed)
    single, several = sizes == 1, sizes > 1
    total = _resampled_sum(rng, hits[several], sizes[several])
    pooled = int(single.sum())
    if pooled:
        total += pooled * _resampled_sum(rng, hits[single].sum(keepdims=True), np.array([pooled]))
    low, high = _percentiles(total / (pooled + int(several.sum())))
    return (low, high) if low < high else _wilson_of_mean(hits[sizes > 0], sizes[sizes > 0])


def _wilson_of_mean(hits: NDArray[np.int_], sizes: NDArray[np.int_]) -> Interval:
    """Return Wilson's interval at the mean over classes, of as many images as a plain accuracy of its variance has."""
    images = int(len(sizes) ** 2 / (1 / sizes).sum())
    return wilson(round(images * float((hits / sizes).mean())), images)


def _resampled_sum(rng: np.random.Generator, hits: NDArray[np.int_], sizes: NDArray[np.int_]) -> Floats:
    """Return, for each draw, the sum of the classes' resampled rates; a class of one image keeps its rate."""
    drawn, kept = np.maximum(sizes - 1, 1), sizes == 1
    sums = []
    for draws in _draws(len(sizes)):
        rates = rng.binomial(drawn, hits / sizes, size=(draws, len(sizes))) / drawn
        sums.append(np.where(kept, hits, rates).sum(axis=1))
    return np.concatenate(sums)


def recall_interval(hits: Floats, queries: Floats | None = None, *, seed: int = 0) -> Interval:
    """Return the 95 % interval of a recall sum(hits) / sum(queries), over images.

    `hits` and `queries` (default: one each) are sums per image. Images are drawn, not queries, because the
    captions of one image are right and wrong together. Where the hits of each image are all or nothing, the
    images are a plain count, and the interval is Wilson's. It does not depend on the order of the images. Raises
    UserError for no image.
    """
    asked = np.ones(len(hits)) if queries is None else queries
    if not len(hits) or len(hits) != len(asked):
        raise UserError(f"{len(hits)} sums of hits and {len(asked)} of queries; give both for every image")
    right, wrong = hits == asked, hits == 0
    if right.all() or wrong.all() or ((right | wrong).all() and (asked == asked[0]).all()):
        return wilson(int(right.sum()), len(hits))
    order = np.lexsort((asked, hits))
    hits, asked = hits[order], asked[order]
    rng = np.random.default_rng(seed)
    recalls = []
    for draws in _draws(len(hits)):
        drawn = rng.integers(len(hits), size=(draws, len(hits)))
        recalls.append(hits[drawn].sum(axis=1) / asked[drawn].sum(axis=1))
    return _percentiles(np.concatenate(recalls))


def _draws(size: int) -> Iterator[int]:
    """Yield numbers of draws, DRAWS in all, each drawn at once for `size` images or classes."""
    step = max(1, _NUMBERS_PER_STEP // max(1, size))
    for start in range(0, DRAWS, step):
        yield min(step, DRAWS - start)


def _percentiles(values: Floats) -> Interval:
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(values, [tail, 1 - tail])
    return float(low), float(high)
