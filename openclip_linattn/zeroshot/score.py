"""Scores one loaded model on one evaluation set: images are encoded once for all its label sets."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import open_clip
import torch
import torch.nn.functional as F
from open_clip_train.precision import get_autocast
from torch import Tensor

from openclip_linattn.zeroshot.accuracy import Tally
from openclip_linattn.zeroshot.checkpoints import CheckpointError
from openclip_linattn.zeroshot.dataset import EvaluationSet
from openclip_linattn.zeroshot.labels import LabelSet
from openclip_linattn.zeroshot.models import LoadedModel
from openclip_linattn.zeroshot.reading import batches

_CLASSES_PER_STEP = 10
Advance = Callable[[int], None]


class Classifiers:
    """The class embeddings of one model, built once for each list of classes and templates."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self._built: dict[tuple[tuple[str, ...], tuple[str, ...]], Tensor] = {}

    def get(self, label_set: LabelSet) -> Tensor:
        """Return the classifier (embedding, C) of a label set."""
        key = (label_set.classes, label_set.formats)
        if key not in self._built:
            self._built[key] = class_embeddings(self.loaded, label_set)
        return self._built[key]


def class_embeddings(loaded: LoadedModel, label_set: LabelSet) -> Tensor:
    """Return the zero-shot classifier (embedding, C): OpenCLIP's own, in float32, columns of norm 1.

    A column is the mean over the templates of the normalised text features, normalised again (Radford et
    al. 2021, section 3.1.4).
    """
    with torch.inference_mode(), _autocast(loaded):
        classifier: Tensor = open_clip.build_zero_shot_classifier(
            loaded.clip,
            tokenizer=loaded.tokenizer,
            classnames=label_set.classes,
            templates=label_set.formats,
            num_classes_per_batch=_CLASSES_PER_STEP,
            device=loaded.device,
        )
        return _float32(classifier, dim=0)


def image_features(loaded: LoadedModel, images: Tensor) -> Tensor:
    """Return float32 features (B, embedding) of norm 1 of preprocessed images (B, 3, height, width)."""
    dtype = open_clip.get_input_dtype(loaded.precision)
    with torch.inference_mode(), _autocast(loaded):
        features: Tensor = loaded.clip.encode_image(images.to(loaded.device, dtype), normalize=True)
        return _float32(features, dim=-1)


def score(
    classifiers: Classifiers,
    data: EvaluationSet,
    label_sets: Sequence[LabelSet],
    *,
    batch_size: int,
    workers: int,
    advance: Advance = lambda _: None,
) -> list[dict[str, Any]]:
    """Return the result (see `Tally.result`) of each of `label_sets`, which are among those of `data`.

    Similarities are computed in float32 whatever the model's precision: in bfloat16 close classes tie.
    `advance` hears the size of every batch. Raises DataError for a sample that cannot be used, and
    CheckpointError for features that are not finite.
    """
    loaded = classifiers.loaded
    weights = [classifiers.get(label_set) for label_set in label_sets]
    for label_set, weight in zip(label_sets, weights, strict=True):
        _check_finite(weight, f"text features of label set {label_set.name!r}")
    columns = [data.label_sets.index(label_set) for label_set in label_sets]
    tallies = [Tally(label_set) for label_set in label_sets]
    for images, labels in batches(data, loaded.transform, batch_size=batch_size, workers=workers):
        features = image_features(loaded, images)
        _check_finite(features, f"image features on {data.name}")
        for tally, weight, column in zip(tallies, weights, columns, strict=True):
            tally.add((features @ weight).cpu(), labels[:, column])
        advance(len(images))
    return [tally.result() for tally in tallies]


def _check_finite(features: Tensor, what: str) -> None:
    if not bool(torch.isfinite(features).all()):
        raise CheckpointError(
            f"its {what} are not finite: the training diverged, or the precision is too low"
        )


def _float32(features: Tensor, dim: int) -> Tensor:
    return features if features.dtype == torch.float32 else F.normalize(features.float(), dim=dim)


def _autocast(loaded: LoadedModel) -> AbstractContextManager[None]:
    context: AbstractContextManager[None] = get_autocast(loaded.precision, device_type=loaded.device.type)()
    return context
