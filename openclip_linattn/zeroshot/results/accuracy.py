"""Accuracy from predictions: over all images and per class."""

from typing import Any

import numpy as np

from openclip_linattn.zeroshot.results.intervals import mean_per_class_interval, wilson
from openclip_linattn.zeroshot.results.predictions import Predictions
from openclip_linattn.zeroshot.sets.labels import LabelSet

MOST_LISTED = 1000  # classes; a list of all 21,843 of ImageNet-21K would be a megabyte in every row


def accuracy(predictions: Predictions, label_set: LabelSet) -> dict[str, Any]:
    """Return n, classes, top1, top5 (five classes or more), mean_per_class and per_class [name, n, top1].

    Accuracies are fractions; NAME_interval is the 95 % interval [low, high] of top1, top5 and mean_per_class.
    Counts are kept by class index, for names may repeat. The mean per class is over the classes that have images
    (balanced accuracy); a class without images has top1 None. per_class is absent beyond MOST_LISTED classes.
    """
    size, n = len(label_set.classes), len(predictions.labels)
    images = np.bincount(predictions.labels, minlength=size).tolist()
    hits = np.bincount(predictions.labels[predictions.right], minlength=size).tolist()
    rates = [right / count if count else None for right, count in zip(hits, images, strict=True)]
    seen = [rate for rate in rates if rate is not None]
    result: dict[str, Any] = {"n": n, "classes": size, "top1": sum(hits) / n}
    result["top1_interval"] = list(wilson(sum(hits), n))
    if (among_five := predictions.right_in_top5) is not None:
        result["top5"] = int(among_five.sum()) / n
        result["top5_interval"] = list(wilson(int(among_five.sum()), n))
    result["mean_per_class"] = sum(seen) / len(seen)
    result["mean_per_class_interval"] = list(mean_per_class_interval(hits, images))
    if size <= MOST_LISTED:
        result["per_class"] = [list(row) for row in zip(label_set.classes, images, rates, strict=True)]
    return result
