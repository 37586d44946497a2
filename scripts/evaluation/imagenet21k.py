"""The class embeddings of ImageNet-21K: time and memory."""

import resource
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rich.console import Console

from evaluation.models import random_model
from evaluation.report import write_report
from openclip_linattn.zeroshot.bars import progress_bars, watch_on
from openclip_linattn.zeroshot.encoders import embeddings
from openclip_linattn.zeroshot.sets.labels import LabelSet
from openclip_linattn.zeroshot.sets.templates import find_templates
from openclip_linattn.zeroshot.sets.wnids import imagenet21k_wnids, synset_names


def measure(out: Path, *, model: str, templates: str, classes: int | None) -> Path:
    """Build the classifier of ImageNet-21K, or of its first `classes`, with random weights; writes imagenet21k.json."""
    names = tuple(synset_names()[wnid] for wnid in imagenet21k_wnids())
    label_set = LabelSet("imagenet21k", names, find_templates(templates))
    part = replace(label_set, classes=names[:classes])
    loaded = random_model(model)
    before = _peak_bytes()
    with (
        progress_bars(Console(stderr=True)) as progress,
        watch_on(progress, f"{model}: classes", len(part.classes)) as advance,
    ):
        start, busy = time.perf_counter(), time.process_time()
        with patch.object(embeddings, "MIN_TRIMMED", 0):  # a part goes the way of the whole
            classifier = embeddings.class_embeddings(loaded, part, advance)
        seconds, busy = time.perf_counter() - start, time.process_time() - busy
    texts = len(part.classes) * len(part.templates)
    content: dict[str, Any] = {
        "model": model,
        "templates": templates,
        "classes": len(part.classes),
        "classes_of_the_set": len(names),
        "texts": texts,
        "seconds": round(seconds, 2),
        "cpu_seconds": round(busy, 2),
        "texts_per_s": round(texts / seconds, 1),
        "classifier_bytes": classifier.nbytes,
        "peak_rss_bytes": _peak_bytes(),
        "peak_rss_bytes_before": before,
    }
    return write_report(out, "imagenet21k", content)


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
