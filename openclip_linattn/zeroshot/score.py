"""Scores one loaded model on one evaluation set: images are encoded once for all its label sets."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from openclip_linattn.zeroshot.encoders.embeddings import Classifiers
from openclip_linattn.zeroshot.encoders.encoding import encoded_batches
from openclip_linattn.zeroshot.processes import ALONE, Processes
from openclip_linattn.zeroshot.results.accuracy import accuracy
from openclip_linattn.zeroshot.results.predictions import Predictions, best_classes, gather
from openclip_linattn.zeroshot.sets.kinds import EvaluationSet, ShardSet
from openclip_linattn.zeroshot.sets.labels import LabelSet
from openclip_linattn.zeroshot.sets.reading import check_count
from openclip_linattn.zeroshot.watching import Advance

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Scored:
    """What a model reached (see `accuracy`), and what it chose for every image, where the task is to choose."""

    result: dict[str, Any]
    predictions: Predictions | None = None


class _Part(NamedTuple):
    """What one process found: keys, classes (n, L), and for each label set the best classes (n, k), by batch."""

    keys: list[str]
    labels: list[Tensor]
    best: list[list[Tensor]]


def score(
    classifiers: Classifiers,
    data: EvaluationSet,
    label_sets: Sequence[LabelSet],
    *,
    batch_size: int,
    workers: int,
    processes: Processes = ALONE,
    advance: Advance = lambda _: None,
) -> list[Scored]:
    """Return the scores with each of `label_sets`, which are among those of `data`.

    Similarities are computed in float32 whatever the model's precision: in bfloat16 close classes tie.
    `advance` is as in `encoded_batches`. Raises DataError for an image that cannot be used, and
    CheckpointError for features that are not finite.
    """

    def part() -> _Part:
        weights = [classifiers.get(label_set) for label_set in label_sets]
        found = _Part([], [], [[] for _ in label_sets])
        for features, batch in encoded_batches(
            classifiers.loaded,
            data,
            batch_size=batch_size,
            workers=workers,
            processes=processes,
            advance=advance,
        ):
            for chosen, weight in zip(found.best, weights, strict=True):
                chosen.append(best_classes(features, weight))
            found.keys.extend(batch.keys)
            found.labels.append(batch.labels)
        return found

    parts = processes.collect(part)
    keys = [key for each in parts for key in each.keys]
    check_count(data, len(keys))
    truth = torch.cat([labels for each in parts for labels in each.labels])
    scored = []
    for number, label_set in enumerate(label_sets):
        best = torch.cat([chosen for each in parts for chosen in each.best[number]])
        predictions = gather(keys, truth[:, data.label_sets.index(label_set)], best)
        if isinstance(data, ShardSet) and processes.first:
            _report_unseen(data, label_set, predictions)
        scored.append(Scored(accuracy(predictions, label_set), predictions))
    return scored


def _report_unseen(data: ShardSet, label_set: LabelSet, predictions: Predictions) -> None:
    """Say where classes that tars know by index only have no image: a heading in the file of names shifts them all."""
    seen = set(predictions.labels.tolist())
    unseen = [number for number in range(len(label_set.classes)) if number not in seen]
    if unseen and not label_set.fields:
        _warn_once(
            f"{data.source}: {len(unseen)} of the {len(label_set.classes)} classes of label set {label_set.name!r} "
            f"have no image, first class {unseen[0]}, {label_set.classes[unseen[0]]!r}; make sure that the names are "
            "those of the class indices and that the shards are all there"
        )


@cache
def _warn_once(text: str) -> None:
    logger.warning("%s", text)  # the next checkpoint would say the same
