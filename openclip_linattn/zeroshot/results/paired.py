"""Compares two models on the same images: McNemar's exact test and the interval of the difference."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest

from openclip_linattn.errors import UserError
from openclip_linattn.zeroshot.results.intervals import Interval, wilson

SIGNIFICANT = 0.05


@dataclass(frozen=True)
class Answers:
    """Which images a model answered rightly (a boolean per image), with the digest of what it was asked.

    `right` and `asked` are `right` and `digest` of `Predictions`.
    """

    name: str
    right: NDArray[np.bool_]
    asked: str


@dataclass(frozen=True)
class Comparison:
    """Two models on n images: `only_first` and `only_second` count the images that one alone got right.

    `difference` is the first's accuracy minus the second's, with its 95 % interval; `p` is McNemar's.
    """

    first: str
    second: str
    n: int
    only_first: int
    only_second: int
    difference: float
    interval: Interval
    p: float

    @property
    def sentence(self) -> str:
        """What the comparison says, in a sentence; they differ where p is below 0.05."""
        counts = (
            f"{self.first} is right on {_images(self.only_first)} where {self.second} is wrong, "
            f"{self.second} on {self.only_second}"
        )
        p = "p < 0.001" if self.p < 0.001 else f"p = {self.p:.2g}"
        if self.p >= SIGNIFICANT:
            return f"{counts}: not distinguishable ({p})"
        low, high = (100 * bound for bound in self.interval)
        points = 100 * self.difference
        if points > 0:
            return f"{counts}: {self.first} is better by {points:.2f} points [{low:.2f}, {high:.2f}] ({p})"
        return f"{counts}: {self.second} is better by {-points:.2f} points [{-high:.2f}, {-low:.2f}] ({p})"


def compare(first: Answers, second: Answers) -> Comparison:
    """Compare two models on the same images.

    The test is McNemar's exact one: of the images that only one model got right, each side's share is
    binomial with 1/2. Raises UserError where the images differ in number, in kind or in order, or are none.
    """
    if first.right.shape != second.right.shape or first.asked != second.asked:
        raise UserError(
            f"{first.name} and {second.name} were not evaluated on the same images in the same order "
            f"({len(first.right)} and {len(second.right)} images); evaluate both on one set"
        )
    if not len(first.right):
        raise UserError(
            f"{first.name} and {second.name} were evaluated on no image; there is nothing to compare"
        )
    a, b = first.right, second.right
    both, neither = int((a & b).sum()), int((~a & ~b).sum())
    only_first, only_second = int((a & ~b).sum()), int((b & ~a).sum())
    apart = only_first + only_second
    return Comparison(
        first=first.name,
        second=second.name,
        n=len(a),
        only_first=only_first,
        only_second=only_second,
        difference=(only_first - only_second) / len(a),
        interval=difference_interval(both, only_first, only_second, neither),
        p=float(binomtest(only_first, apart).pvalue) if apart else 1.0,
    )


def difference_interval(both: int, only_first: int, only_second: int, neither: int) -> Interval:
    """Return the 95 % interval of the difference of two accuracies on the same images.

    It is method 10 of Newcombe 1998 (Statistics in Medicine 17, 2635-2650): Wilson's intervals of the two
    accuracies, combined with their correlation.
    """
    n = both + only_first + only_second + neither
    first, second = (both + only_first) / n, (both + only_second) / n
    low1, high1 = wilson(both + only_first, n)
    low2, high2 = wilson(both + only_second, n)
    phi = _correlation(both, only_first, only_second, neither)
    below = _combined(first - low1, high2 - second, phi)
    above = _combined(high1 - first, second - low2, phi)
    difference = (only_first - only_second) / n
    return difference - below, difference + above


def _combined(x: float, y: float, phi: float) -> float:
    return math.sqrt(max(0.0, x * x - 2 * phi * x * y + y * y))


def _correlation(both: int, only_first: int, only_second: int, neither: int) -> float:
    """Return Newcombe's phi: the correlation of the two answers, drawn to zero by n/2 where it is positive."""
    n = both + only_first + only_second + neither
    margins = (both + only_first) * (only_second + neither) * (both + only_second) * (only_first + neither)
    if margins == 0:
        return 0.0
    product = both * neither - only_first * only_second
    return (max(0.0, product - n / 2) if product > 0 else product) / math.sqrt(margins)


def _images(count: int) -> str:
    return "1 image" if count == 1 else f"{count} images"
