"""The embeddings of classes, in steps of bounded size, and each built once."""

from collections.abc import Sequence

import open_clip
import torch
import torch.nn.functional as F
from torch import Tensor

from openclip_linattn.zeroshot.encoders.embedding_cache import EmbeddingCache
from openclip_linattn.zeroshot.encoders.features import as_float32, autocast, check_finite
from openclip_linattn.zeroshot.encoders.models import LoadedModel
from openclip_linattn.zeroshot.encoders.trimmed_texts import can_trim, trimmed_features
from openclip_linattn.zeroshot.processes import ALONE, Processes, in_turn
from openclip_linattn.zeroshot.sets.labels import LabelSet
from openclip_linattn.zeroshot.watching import Advance, Watch, unwatched

# Ten classes at 80 templates, as in OpenCLIP: there the embeddings are equal to the last bit.
_TEXTS_PER_STEP = 800
# From here on the texts are encoded without their padding, several times quicker and equal up to rounding. ImageNet-1K
# with 80 templates lies below, ImageNet-21K with 7 above.
MIN_TRIMMED = 100_000
_TOKENS_PER_STEP = 16_384  # then
_STEPS_SORTED = 10  # whose texts are sorted by length
_Key = tuple[tuple[str, ...], tuple[str, ...]]


class Classifiers:
    """The class embeddings of one model, built once for each list of classes and templates.

    Those of many texts are kept in `cache`, if there is one; `watch` shows what is built.
    """

    def __init__(
        self, loaded: LoadedModel, cache: EmbeddingCache | None = None, watch: Watch = unwatched
    ) -> None:
        self.loaded = loaded
        self._cache = cache
        self._watch = watch
        self._built: dict[_Key, Tensor] = {}

    def get(self, label_set: LabelSet, processes: Processes = ALONE) -> Tensor:
        """Return the classifier (embedding, C) of a label set; raises CheckpointError where it is not finite.

        The texts are dealt out among `processes`, all of which must ask for the same label sets in the same order.
        """
        key = (label_set.classes, label_set.formats)
        if key not in self._built:
            within = self._within_another(key)
            self._built[key] = self._build(label_set, processes) if within is None else within
        return self._built[key]

    def _within_another(self, wanted: _Key) -> Tensor | None:
        """Return the columns of a classifier that has all these class names in it."""
        for (classes, formats), classifier in self._built.items():
            if formats == wanted[1] and set(wanted[0]) <= set(classes):
                index = {name: number for number, name in enumerate(classes)}
                return classifier[:, [index[name] for name in wanted[0]]]
        return None

    def _build(self, label_set: LabelSet, processes: Processes) -> Tensor:
        cache = self._cache
        # By one: the folder of the cache need not be shared by all machines.
        kept = processes.by_first(lambda: cache.get(label_set) if cache else None)
        if kept is not None:
            return kept.to(self.loaded.device)
        with self._watch(f"texts of {label_set.name}", len(label_set.classes)) as advance:
            classifier = class_embeddings(self.loaded, label_set, advance, processes)
        check_finite(classifier, f"text features of label set {label_set.name!r}")
        if cache and processes.first:
            cache.put(label_set, classifier)
        return classifier


def class_embeddings(
    loaded: LoadedModel,
    label_set: LabelSet,
    advance: Advance = lambda _: None,
    processes: Processes = ALONE,
) -> Tensor:
    """Return the zero-shot classifier (embedding, C): OpenCLIP's own, in float32, columns of norm 1.

    A column is the mean over the templates of the normalised text features, normalised again (Radford et
    al. 2021, section 3.1.4). Whole steps are dealt out among `processes`, so that their number changes no bit.
    `advance` hears how many classes each step did, times the processes.
    """
    classes = label_set.classes
    step = max(1, _TEXTS_PER_STEP // len(label_set.templates))
    trimmed = len(classes) * len(label_set.templates) >= MIN_TRIMMED and can_trim(loaded.clip)
    if trimmed:
        step *= _STEPS_SORTED
    build = _without_padding if trimmed else _by_openclip

    def columns() -> list[Tensor]:
        found = []
        with torch.inference_mode(), autocast(loaded):
            for own in processes.deal(len(classes), step):
                part = as_float32(build(loaded, classes[own.start : own.stop], label_set.formats), dim=0)
                found.append(
                    part if processes.count == 1 else part.cpu()
                )  # a card's number is its process's own
                advance(len(own) * processes.count)
        return found

    return torch.cat(in_turn(processes.collect(columns)), dim=1).to(loaded.device)


def _by_openclip(loaded: LoadedModel, names: Sequence[str], formats: Sequence[str]) -> Tensor:
    part: Tensor = open_clip.build_zero_shot_classifier(
        loaded.clip,
        tokenizer=loaded.tokenizer,
        classnames=names,
        templates=formats,
        num_classes_per_batch=None,
        device=loaded.device,
    )
    return part


def _without_padding(loaded: LoadedModel, names: Sequence[str], formats: Sequence[str]) -> Tensor:
    tokens = loaded.tokenizer([template.format(name) for name in names for template in formats])
    features = trimmed_features(loaded.clip, tokens.to(loaded.device), most=_TOKENS_PER_STEP)
    means = features.reshape(len(names), len(formats), -1).mean(dim=1)
    return F.normalize(means, dim=1).T
