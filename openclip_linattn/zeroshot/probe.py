"""Linear probe: how well a logistic regression on a model's image features tells the classes of a set."""

from typing import Any

import numpy as np
import torch

from openclip_linattn.errors import UserError
from openclip_linattn.zeroshot.accuracy import accuracy
from openclip_linattn.zeroshot.features import check_finite, image_features
from openclip_linattn.zeroshot.intervals import mean_per_class_interval, wilson
from openclip_linattn.zeroshot.labels import LabelSet
from openclip_linattn.zeroshot.models import LoadedModel
from openclip_linattn.zeroshot.predictions import TOP_K, Predictions, gather
from openclip_linattn.zeroshot.probe_fit import MOST_FITS, Floats, Ints, Regression, Sweep, split, sweep
from openclip_linattn.zeroshot.reading import keyed_batches
from openclip_linattn.zeroshot.score import Scored
from openclip_linattn.zeroshot.sets import EvaluationSet
from openclip_linattn.zeroshot.watching import Watch, unwatched


def score_probe(
    loaded: LoadedModel,
    train: EvaluationSet,
    test: EvaluationSet,
    *,
    shots: int | None = None,
    seed: int = 0,
    batch_size: int = 64,
    workers: int = 0,
    watch: Watch = unwatched,
) -> Scored:
    """Return the probe's result on `test` and what it chose for every image there.

    The features are the normalised image embeddings, as in clip_benchmark's probe. The result is that of
    `accuracy` with task, n_train, n_held_out, shots, seed, C, converged (of the last fit), the sweep over C
    as [C, accuracy on the held-out images, converged], and 95 % intervals of top1 and mean_per_class.
    The label set is the first of `train`, which `test` must have too. The same seed gives the same
    result whatever the number of workers. Raises UserError for sets that do not fit together, and what
    `split`, `keyed_batches` and `check_finite` raise.
    """
    labelled = _common_label_set(train, test)
    features = [_read(loaded, data, labelled, batch_size, workers, watch) for data in (train, test)]
    (x, y, _), (test_x, test_y, keys) = features
    _check_classes(y, test_y, labelled, train)
    parts = split(y, shots=shots, seed=seed, names=labelled.classes)
    size = len(labelled.classes)
    with watch("fitting the probe", MOST_FITS) as advance:
        found = sweep(x, y, parts, size, advance)
        regression = Regression(x[parts.final], y[parts.final], found.C)
        advance(1)
    best = regression.best(test_x, size, min(TOP_K, size))
    predictions = gather(keys, torch.from_numpy(test_y), torch.from_numpy(best))
    result = {
        "task": "linear_probe",
        **accuracy(predictions, labelled),
        "n_train": len(parts.final),
        "n_held_out": len(parts.held),
        "shots": shots,
        "seed": seed,
        **_penalty(found, regression),
        "intervals": _intervals(predictions, size),
    }
    return Scored(result, predictions)


def _common_label_set(train: EvaluationSet, test: EvaluationSet) -> LabelSet:
    if train.source == test.source:
        raise UserError(f"{train.source} was given to train on and to test on; a probe needs two splits")
    labelled = train.label_sets[0]
    same_name = next((each for each in test.label_sets if each.name == labelled.name), None)
    if same_name is None:
        names = ", ".join(repr(each.name) for each in test.label_sets)
        raise UserError(
            f"{test.source} has no label set {labelled.name!r}, as {train.source} has; it has {names}"
        )
    if same_name.classes != labelled.classes:
        raise UserError(
            f"{train.source} and {test.source} have other classes, or another order of them, in label set "
            f"{labelled.name!r}"
        )
    return labelled


def _read(
    loaded: LoadedModel,
    data: EvaluationSet,
    labelled: LabelSet,
    batch_size: int,
    workers: int,
    watch: Watch,
) -> tuple[Floats, Ints, list[str]]:
    """Return features (n, embedding), classes (n,) and keys, in the order of the keys."""
    column = [each.name for each in data.label_sets].index(labelled.name)
    parts, labels, keys = [], [], []
    with watch(f"features of {data.name}", data.n) as advance:
        for batch in keyed_batches(data, loaded.transform, batch_size=batch_size, workers=workers):
            features = image_features(loaded, batch.images)
            check_finite(features, f"image features on {data.name}")
            parts.append(features.cpu())
            labels.append(batch.labels[:, column])
            keys += batch.keys
            advance(len(batch.keys))
    order = np.array(sorted(range(len(keys)), key=keys.__getitem__))
    rows = torch.cat(parts).numpy().astype(np.float64)[order]
    return rows, torch.cat(labels).numpy().astype(np.int64)[order], [keys[number] for number in order]


def _check_classes(train: Ints, test: Ints, labelled: LabelSet, data: EvaluationSet) -> None:
    present = np.unique(train)
    absent = np.setdiff1d(test, present)
    if len(absent):
        raise UserError(
            f"{len(absent)} of the classes to test have no image in {data.source}, first "
            f"{labelled.classes[absent[0]]!r}; a probe can only choose classes that it was trained on"
        )
    if len(present) < 2:
        raise UserError(
            f"the images of {data.source} are all of class {labelled.classes[present[0]]!r}; give more"
        )


def _penalty(found: Sweep, regression: Regression) -> dict[str, Any]:
    return {"C": found.C, "converged": regression.converged, "sweep": [list(each) for each in found.tried]}


def _intervals(predictions: Predictions, classes: int) -> dict[str, tuple[float, float]]:
    images = np.bincount(predictions.labels, minlength=classes)
    right = np.bincount(predictions.labels[predictions.right], minlength=classes)
    return {
        "top1": wilson(int(right.sum()), len(predictions.labels)),
        "mean_per_class": mean_per_class_interval(right.tolist(), images.tolist()),
    }
