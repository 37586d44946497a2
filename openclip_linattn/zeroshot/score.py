"""Scores one loaded model on one evaluation set: images are encoded once for all its label sets."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from openclip_linattn.zeroshot.accuracy import accuracy
from openclip_linattn.zeroshot.embeddings import Classifiers
from openclip_linattn.zeroshot.features import check_finite, image_features
from openclip_linattn.zeroshot.labels import LabelSet
from openclip_linattn.zeroshot.predictions import Predictions, best_classes, gather
from openclip_linattn.zeroshot.reading import keyed_batches
from openclip_linattn.zeroshot.sets import EvaluationSet
from openclip_linattn.zeroshot.watching import Advance


@dataclass(frozen=True)
class Scored:
    """What a model reached with a label set (see `accuracy`), and what it chose for every image."""

    result: dict[str, Any]
    predictions: Predictions


def score(
    classifiers: Classifiers,
    data: EvaluationSet,
    label_sets: Sequence[LabelSet],
    *,
    batch_size: int,
    workers: int,
    advance: Advance = lambda _: None,
) -> list[Scored]:
    """Return the scores with each of `label_sets`, which are among those of `data`.

    Similarities are computed in float32 whatever the model's precision: in bfloat16 close classes tie.
    `advance` hears the size of every batch. Raises DataError for an image that cannot be used, and
    CheckpointError for features that are not finite.
    """
    loaded = classifiers.loaded
    weights = [classifiers.get(label_set) for label_set in label_sets]
    keys: list[str] = []
    labels: list[Tensor] = []
    best: list[list[Tensor]] = [[] for _ in label_sets]
    for batch in keyed_batches(data, loaded.transform, batch_size=batch_size, workers=workers):
        features = image_features(loaded, batch.images)
        check_finite(features, f"image features on {data.name}")
        for chosen, weight in zip(best, weights, strict=True):
            chosen.append(best_classes(features, weight))
        keys += batch.keys
        labels.append(batch.labels)
        advance(len(batch.keys))
    truth = torch.cat(labels)
    columns = [data.label_sets.index(label_set) for label_set in label_sets]
    predictions = [
        gather(keys, truth[:, column], torch.cat(chosen))
        for column, chosen in zip(columns, best, strict=True)
    ]
    return [
        Scored(accuracy(chosen, label_set), chosen)
        for chosen, label_set in zip(predictions, label_sets, strict=True)
    ]
