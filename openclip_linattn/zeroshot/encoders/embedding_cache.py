"""Keeps class embeddings that took long, across calls, in the user's cache folder."""

import contextlib
import hashlib
import json
import logging
import zipfile
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from openclip_linattn.files import atomic_path, cache_folder
from openclip_linattn.zeroshot.checkpoints import Checkpoint
from openclip_linattn.zeroshot.sets.labels import LabelSet

logger = logging.getLogger(__name__)

_DAMAGE = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile)
MIN_TEXTS = 20_000  # fewer are encoded anew: that takes a minute or less even on a CPU


class EmbeddingCache:
    """The class embeddings of one checkpoint, one file per label set with MIN_TEXTS texts or more.

    A file is valid for the checkpoint's size and time of change and for the versions of the packages; one
    that is not, or that is damaged, counts as absent and is written anew.
    """

    def __init__(self, checkpoint: Checkpoint, *, precision: str, device: torch.device) -> None:
        self.folder = cache_folder() / "class_embeddings"
        state = checkpoint.path.stat()
        versions = [version(package) for package in ("open_clip_torch", "torch")]
        self._stamp = json.dumps([state.st_size, state.st_mtime_ns, *versions])
        settings = sorted(checkpoint.settings.items())
        self._owner = [str(checkpoint.path), checkpoint.model, settings, precision, device.type]

    def get(self, label_set: LabelSet) -> Tensor | None:
        """Return the kept classifier (embedding, C) of a label set in float32, or None."""
        path = self._path(label_set)
        if path is None or not path.is_file():
            return None
        with (
            contextlib.suppress(*_DAMAGE),
            path.open("rb") as stream,
            np.load(stream, allow_pickle=False) as kept,
        ):
            if str(kept["stamp"]) == self._stamp:
                return torch.from_numpy(kept["classifier"])
        return None

    def put(self, label_set: LabelSet, classifier: Tensor) -> None:
        """Keep the classifier of a label set that has many texts; where it cannot be written it is not kept."""
        path = self._path(label_set)
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_path(path) as temporary, temporary.open("wb") as stream:
                np.savez(stream, classifier=classifier.cpu().numpy(), stamp=np.array(self._stamp))
        except OSError as error:
            logger.warning("the class embeddings were not kept in %s: %s", path, error.strerror)

    def _path(self, label_set: LabelSet) -> Path | None:
        if len(label_set.classes) * len(label_set.templates) < MIN_TEXTS:
            return None
        text = json.dumps([self._owner, label_set.classes, label_set.formats], default=str)
        return self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.npz"
