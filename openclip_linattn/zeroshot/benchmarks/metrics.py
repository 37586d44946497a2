"""Scores a model on a set of clip_benchmark: its definitions, computed with bounded memory and in our precisions."""

from collections.abc import Iterator
from typing import Any

import torch
from clip_benchmark.metrics.zeroshot_classification import average_precision_per_class
from torch import Tensor

from openclip_linattn.errors import UserError
from openclip_linattn.zeroshot.benchmarks.sets import BenchmarkSet
from openclip_linattn.zeroshot.encoders.embeddings import Classifiers
from openclip_linattn.zeroshot.encoders.features import check_finite, image_features
from openclip_linattn.zeroshot.encoders.text_features import encode_texts
from openclip_linattn.zeroshot.results.accuracy import accuracy
from openclip_linattn.zeroshot.results.intervals import wilson
from openclip_linattn.zeroshot.results.predictions import best_classes, gather
from openclip_linattn.zeroshot.retrieval.scoring import caption_features, retrieval_result
from openclip_linattn.zeroshot.sets.labels import LabelSet
from openclip_linattn.zeroshot.watching import Advance


def score_benchmark(
    classifiers: Classifiers, data: BenchmarkSet, *, batch_size: int, advance: Advance
) -> dict[str, Any]:
    """Return the result of the set's task; `advance` hears the size of every batch of images.

    Classification has the keys of `accuracy`, or mean_average_precision where images have several classes;
    retrieval those of `retrieval_result`; image_caption_selection image_accuracy, text_accuracy and accuracy
    (both right), each with NAME_interval. Raises UserError for a set that cannot be scored, and CheckpointError for
    features that are not finite.
    """
    if data.task == "zeroshot_classification":
        return _classify(classifiers, data, advance)
    if data.task == "zeroshot_retrieval":
        return _retrieve(classifiers, data, batch_size, advance)
    return _select(classifiers, data, advance)


def _classify(classifiers: Classifiers, data: BenchmarkSet, advance: Advance) -> dict[str, Any]:
    label_set = _label_set(data)
    classifier = classifiers.get(label_set)
    best, scores, labels = [], [], []
    for features, targets in _features(classifiers, data, advance):
        labels.append(torch.as_tensor(targets))
        if labels[0].ndim == 2:
            scores.append((features @ classifier).cpu())
        else:
            best.append(best_classes(features, classifier))
    truth = torch.cat(labels)
    _check_labels(truth, label_set)
    if scores:
        precisions = average_precision_per_class(torch.cat(scores), truth)
        size = {"n": len(truth), "classes": len(label_set.classes)}
        return {"task": "multilabel", **size, "mean_average_precision": float(precisions.mean())}
    keys = [f"{number:09d}" for number in range(len(truth))]
    return {"task": "classification", **accuracy(gather(keys, truth, torch.cat(best)), label_set)}


def _label_set(data: BenchmarkSet) -> LabelSet:
    return LabelSet(data.name, tuple(map(str, data.dataset.classes)), tuple(data.dataset.templates))


def _check_labels(truth: Tensor, label_set: LabelSet) -> None:
    count = len(label_set.classes)
    many = truth.ndim == 2
    if (truth.shape[1] != count) if many else not 0 <= int(truth.min()) <= int(truth.max()) < count:
        what = f"{truth.shape[1]} columns" if many else f"from {int(truth.min())} to {int(truth.max())}"
        raise UserError(f"the labels of {label_set.name} are {what}, and it has {count} class names")


def _retrieve(
    classifiers: Classifiers, data: BenchmarkSet, batch_size: int, advance: Advance
) -> dict[str, Any]:
    parts, captions = [], []
    for features, texts in _features(classifiers, data, advance):
        parts.append(features.cpu())
        captions += [list(each) for each in texts]
    bare = sum(not each for each in captions)
    if bare:
        raise UserError(f"{bare} of the {len(captions)} images of {data.name} have no caption")
    loaded = classifiers.loaded
    texts = caption_features(loaded, captions, name=data.name, batch_size=batch_size)
    return retrieval_result(torch.cat(parts), texts, [len(each) for each in captions], device=loaded.device)


def _select(classifiers: Classifiers, data: BenchmarkSet, advance: Advance) -> dict[str, Any]:
    """Sets of a few images and a few captions each, the first image belonging to the first caption and so on."""
    n = right_image = right_text = right_both = 0
    for features, texts in _features(classifiers, data, advance):
        per_item = features.reshape(len(texts), -1, features.shape[-1]).cpu()
        said = [text for each in texts for text in each]
        encoded = encode_texts(classifiers.loaded, said, batch_size=len(said))
        check_finite(encoded, f"text features on {data.name}")
        scores = per_item @ encoded.reshape(len(texts), -1, encoded.shape[-1]).transpose(1, 2)
        pairs = torch.arange(min(scores.shape[1:]))
        text = (scores.argmax(dim=2)[:, : len(pairs)] == pairs).all(dim=1)
        image = (scores.argmax(dim=1)[:, : len(pairs)] == pairs).all(dim=1)
        n += len(texts)
        right_image += int(image.sum())
        right_text += int(text.sum())
        right_both += int((image & text).sum())
    result: dict[str, Any] = {"task": "image_caption_selection", "n": n}
    counts = {"image_accuracy": right_image, "text_accuracy": right_text, "accuracy": right_both}
    for name, right in counts.items():
        result[name] = right / n
        result[f"{name}_interval"] = list(wilson(right, n))
    return result


def _features(classifiers: Classifiers, data: BenchmarkSet, advance: Advance) -> Iterator[tuple[Tensor, Any]]:
    """Yield the features of each batch of images, whose items may hold several, and what goes with the items.

    Raises UserError when other than the counted number of items arrives, or none.
    """
    seen = 0
    for images, targets in data.batches:
        features = image_features(classifiers.loaded, images.flatten(0, -4))
        check_finite(features, f"image features on {data.name}")
        seen += len(images)
        advance(len(images))
        yield features, targets
    if not seen or (data.n is not None and seen != data.n):
        raise UserError(
            f"{seen} of the {data.n or 0} items of {data.name} arrived; did its data change meanwhile?"
        )
