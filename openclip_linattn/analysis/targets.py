"""The class of each image whose zero-shot probability a deletion curve follows."""

from collections.abc import Sequence

import torch
from torch import Tensor

from openclip_linattn.analysis.deletion import Probability
from openclip_linattn.analysis.images import Picture
from openclip_linattn.zeroshot.encoders.embeddings import Classifiers
from openclip_linattn.zeroshot.encoders.features import image_features
from openclip_linattn.zeroshot.encoders.models import LoadedModel
from openclip_linattn.zeroshot.sets.labels import LabelSet

TARGETS = ("predicted", "label")


class ZeroShot:
    """A model's zero-shot probabilities over the classes of a label set."""

    def __init__(self, loaded: LoadedModel, label_set: LabelSet) -> None:
        self.loaded = loaded
        self._classifier = Classifiers(loaded).get(label_set)
        self._scale = float(loaded.clip.logit_scale.detach().exp())

    def probabilities(self, images: Tensor) -> Tensor:
        """Probabilities (B, C) of preprocessed images: the softmax of the scaled cosines, as in training."""
        logits = self._scale * image_features(self.loaded, images) @ self._classifier
        # In float32 an unlikely label's probability rounds to zero, and nothing can be divided by it.
        return logits.double().softmax(-1)

    def of_targets(self, images: Tensor, pictures: Sequence[Picture], target: str) -> Probability:
        """What makes of changed images (B, ...) the probability (B,) of each one's class.

        target: "predicted", the most probable class of the image as it is, or "label", its class in the first label
        set of the pictures' source.
        """
        if target == "label":
            classes = torch.tensor([picture.labels[0] for picture in pictures], device=images.device)
        else:
            classes = self.probabilities(images).argmax(-1)
        return lambda changed: self.probabilities(changed).gather(1, classes.unsqueeze(1)).squeeze(1)
