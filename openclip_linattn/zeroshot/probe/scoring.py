"""Linear probe: how well a logistic regression on a model's image features tells the classes of a set."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from openclip_linattn.errors import UserError
from openclip_linattn.zeroshot.encoders.encoding import encoded_batches
from openclip_linattn.zeroshot.encoders.models import LoadedModel
from openclip_linattn.zeroshot.probe.fit import MOST_FITS, Floats, Ints, Regression, Sweep, split, sweep
from openclip_linattn.zeroshot.processes import ALONE, Processes
from openclip_linattn.zeroshot.results.accuracy import accuracy
from openclip_linattn.zeroshot.results.predictions import TOP_K, gather
from openclip_linattn.zeroshot.score import Scored
from openclip_linattn.zeroshot.sets.kinds import EvaluationSet
from openclip_linattn.zeroshot.sets.labels import LabelSet
from openclip_linattn.zeroshot.sets.reading import check_count
from openclip_linattn.zeroshot.watching import Advance, Watch, unwatched


def score_probe(  # noqa: PLR0913  (all but three have defaults)
    loaded: LoadedModel,
    train: EvaluationSet,
    test: EvaluationSet,
    *,
    shots: int | None = None,
    seed: int = 0,
    batch_size: int = 64,
    workers: int = 0,
    processes: Processes = ALONE,
    watch: Watch = unwatched,
) -> Scored:
    """Return the probe's result on `test` and what it chose for every image there.

    The features are the normalised image embeddings, as in clip_benchmark's probe. The result is that of
    `accuracy` with task, n_train, n_held_out, shots, seed, C, converged (of the last fit), the sweep over C
    as [C, accuracy on the held-out images, converged].
    The label set is the first of `train`, which `test` must have too. The same seed gives the same
    result whatever the number of workers. Raises UserError for sets that do not fit together, and what
    `split` and `encoded_batches` raise.
    """
    labelled = _common_label_set(train, test)
    reader = _Reader(loaded, labelled, batch_size, workers, processes, watch)
    x, y, _ = reader.read(train)
    test_x, test_y, keys = reader.read(test)
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


@dataclass(frozen=True)
class _Reader:
    loaded: LoadedModel
    labelled: LabelSet
    batch_size: int
    workers: int
    processes: Processes
    watch: Watch

    def read(self, data: EvaluationSet) -> tuple[Floats, Ints, list[str]]:
        """Return features (n, embedding), classes (n,) and keys, in the order of the keys."""
        with self.watch(f"features of {data.name}", data.n) as advance:
            parts = self.processes.collect(lambda: self._part(data, advance))
        keys = [key for found, _, _ in parts for key in found]
        check_count(data, len(keys))
        order = np.array(sorted(range(len(keys)), key=keys.__getitem__))
        rows = torch.cat([features for _, found, _ in parts for features in found]).numpy()
        labels = torch.cat([classes for _, _, found in parts for classes in found]).numpy()
        return rows.astype(np.float64)[order], labels.astype(np.int64)[order], [keys[each] for each in order]

    def _part(self, data: EvaluationSet, advance: Advance) -> tuple[list[str], list[Tensor], list[Tensor]]:
        column = [each.name for each in data.label_sets].index(self.labelled.name)
        keys: list[str] = []
        features, labels = [], []
        for encoded, batch in encoded_batches(
            self.loaded,
            data,
            batch_size=self.batch_size,
            workers=self.workers,
            processes=self.processes,
            advance=advance,
        ):
            features.append(encoded.cpu())
            labels.append(batch.labels[:, column])
            keys += batch.keys
        return keys, features, labels


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
