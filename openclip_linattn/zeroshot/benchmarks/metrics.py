"""Scores a model on a set of clip_benchmark: its definitions, computed with bounded memory and in our precisions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from clip_benchmark.metrics.zeroshot_classification import average_precision_per_class
from torch import Tensor

from openclip_linattn.errors import UserError
from openclip_linattn.zeroshot.benchmarks.sets import BenchmarkSet
from openclip_linattn.zeroshot.encoders.embeddings import Classifiers
from openclip_linattn.zeroshot.encoders.features import check_finite, image_features
from openclip_linattn.zeroshot.encoders.text_features import encode_texts
from openclip_linattn.zeroshot.processes import ALONE, Processes
from openclip_linattn.zeroshot.results.accuracy import accuracy
from openclip_linattn.zeroshot.results.intervals import wilson
from openclip_linattn.zeroshot.results.predictions import best_classes, gather
from openclip_linattn.zeroshot.retrieval.scoring import caption_features, retrieval_result
from openclip_linattn.zeroshot.sets.labels import LabelSet
from openclip_linattn.zeroshot.watching import Advance


@dataclass(frozen=True)
class Encoded:
    """A batch of a set: how many items it had, and what the set's task keeps of it."""

    items: int
    kept: Any


def encode_benchmark(
    classifiers: Classifiers, data: BenchmarkSet, *, processes: Processes = ALONE, advance: Advance
) -> list[Encoded]:
    """Return what the set's task keeps of every batch of this process.

    `advance` hears the items of every batch, times the processes. Raises CheckpointError for features that are not
    finite.
    """
    encode = _TASKS[data.task].encode
    found = []
    for images, targets in data.batches:
        # An item may hold several images.
        features = image_features(classifiers.loaded, images.flatten(0, -4))
        check_finite(features, f"image features on {data.name}")
        found.append(Encoded(len(images), encode(classifiers, data, features, targets)))
        advance(len(images) * processes.count)
    return found


def benchmark_result(
    classifiers: Classifiers, data: BenchmarkSet, found: Sequence[Encoded], *, batch_size: int
) -> dict[str, Any]:
    """Return the result of the set's task from all its batches.

    Classification has the keys of `accuracy`, or mean_average_precision where images have several classes;
    retrieval those of `retrieval_result`; image_caption_selection image_accuracy, text_accuracy and accuracy
    (both right), each with NAME_interval. Raises UserError for a set that cannot be scored and where other than the
    counted number of items arrived, or none, and CheckpointError for features that are not finite.
    """
    seen = sum(batch.items for batch in found)
    if not seen or (data.n is not None and seen != data.n):
        raise UserError(
            f"{seen} of the {data.n or 0} items of {data.name} arrived; did its data change meanwhile?"
        )
    return _TASKS[data.task].result(classifiers, data, [batch.kept for batch in found], batch_size)


def _similarities(
    classifiers: Classifiers, data: BenchmarkSet, features: Tensor, targets: Any
) -> tuple[Tensor, Tensor]:
    """Keep the labels, and the best classes; where an image has several, its scores."""
    classifier = classifiers.get(_label_set(data))
    labels = torch.as_tensor(targets)
    several = labels.ndim == 2
    return labels, (features @ classifier).cpu() if several else best_classes(features, classifier)


def _classify(
    _classifiers: Classifiers, data: BenchmarkSet, kept: Sequence[tuple[Tensor, Tensor]], _batch_size: int
) -> dict[str, Any]:
    label_set = _label_set(data)
    truth, answers = (torch.cat(parts) for parts in zip(*kept, strict=True))
    _check_labels(truth, label_set)
    if truth.ndim == 2:
        precisions = average_precision_per_class(answers, truth)
        size = {"n": len(truth), "classes": len(label_set.classes)}
        return {"task": "multilabel", **size, "mean_average_precision": float(precisions.mean())}
    keys = [f"{number:09d}" for number in range(len(truth))]
    return {"task": "classification", **accuracy(gather(keys, truth, answers), label_set)}


def _label_set(data: BenchmarkSet) -> LabelSet:
    return LabelSet(data.name, tuple(map(str, data.dataset.classes)), tuple(data.dataset.templates))


def _check_labels(truth: Tensor, label_set: LabelSet) -> None:
    count = len(label_set.classes)
    many = truth.ndim == 2
    if (truth.shape[1] != count) if many else not 0 <= int(truth.min()) <= int(truth.max()) < count:
        what = f"{truth.shape[1]} columns" if many else f"from {int(truth.min())} to {int(truth.max())}"
        raise UserError(f"the labels of {label_set.name} are {what}, and it has {count} class names")


def _captioned(
    _classifiers: Classifiers, _data: BenchmarkSet, features: Tensor, texts: Any
) -> tuple[Tensor, list[list[str]]]:
    return features.cpu(), [list(each) for each in texts]


def _retrieve(
    classifiers: Classifiers,
    data: BenchmarkSet,
    kept: Sequence[tuple[Tensor, list[list[str]]]],
    batch_size: int,
) -> dict[str, Any]:
    captions = [each for _, texts in kept for each in texts]
    bare = sum(not each for each in captions)
    if bare:
        raise UserError(f"{bare} of the {len(captions)} images of {data.name} have no caption")
    loaded = classifiers.loaded
    texts = caption_features(loaded, captions, name=data.name, batch_size=batch_size)
    images = torch.cat([features for features, _ in kept])
    return retrieval_result(images, texts, [len(each) for each in captions], device=loaded.device)


def _selected(classifiers: Classifiers, data: BenchmarkSet, features: Tensor, texts: Any) -> list[int]:
    """Count the right images, the right captions, and the items where both are right.

    An item has a few images and a few captions, the first image belonging to the first caption and so on.
    """
    per_item = features.reshape(len(texts), -1, features.shape[-1]).cpu()
    said = [text for each in texts for text in each]
    encoded = encode_texts(classifiers.loaded, said, batch_size=len(said))
    check_finite(encoded, f"text features on {data.name}")
    scores = per_item @ encoded.reshape(len(texts), -1, encoded.shape[-1]).transpose(1, 2)
    pairs = torch.arange(min(scores.shape[1:]))
    text = (scores.argmax(dim=2)[:, : len(pairs)] == pairs).all(dim=1)
    image = (scores.argmax(dim=1)[:, : len(pairs)] == pairs).all(dim=1)
    return [int(image.sum()), int(text.sum()), int((image & text).sum()), len(texts)]


def _select(
    _classifiers: Classifiers, _data: BenchmarkSet, kept: Sequence[list[int]], _batch_size: int
) -> dict[str, Any]:
    *counts, n = (sum(column) for column in zip(*kept, strict=True))
    result: dict[str, Any] = {"task": "image_caption_selection", "n": n}
    for name, right in zip(("image_accuracy", "text_accuracy", "accuracy"), counts, strict=True):
        result[name] = right / n
        result[f"{name}_interval"] = list(wilson(right, n))
    return result


class _Task(NamedTuple):
    """What is kept of the features of a batch and of what goes with its items, and the result of all batches."""

    encode: Callable[[Classifiers, BenchmarkSet, Tensor, Any], Any]
    result: Callable[[Classifiers, BenchmarkSet, Sequence[Any], int], dict[str, Any]]


_TASKS = {
    "zeroshot_classification": _Task(_similarities, _classify),
    "zeroshot_retrieval": _Task(_captioned, _retrieve),
    "image_caption_selection": _Task(_selected, _select),
}
