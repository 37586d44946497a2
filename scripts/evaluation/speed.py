"""Speed: images per second of an evaluation, over those of the bare tower on the same machine."""

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from evaluation.models import random_model
from evaluation.report import write_report
from openclip_linattn.bench.photos import photo
from openclip_linattn.zeroshot.encoders.embeddings import Classifiers
from openclip_linattn.zeroshot.encoders.features import image_features
from openclip_linattn.zeroshot.encoders.models import LoadedModel
from openclip_linattn.zeroshot.score import score
from openclip_linattn.zeroshot.sets.dataset import open_evaluation_set
from openclip_linattn.zeroshot.sets.kinds import EvaluationSet
from openclip_linattn.zeroshot.sets.reading import keyed_batches

GOAL = 0.85


def measure(
    out: Path, *, models: Sequence[str], images: int, side: int, batch_size: int, workers: int, rounds: int
) -> Path:
    """Time both in turns on drawn photographs, whose shorter side has `side` pixels; writes speed.json."""
    with tempfile.TemporaryDirectory() as folder:
        data = _photos(Path(folder), images, side)
        rows = [_model(name, data, batch_size, workers, rounds) for name in models]
    content = {"images": images, "side": side, "batch_size": batch_size, "workers": workers, "rounds": rounds}
    return write_report(out, "speed", {**content, "goal": GOAL, "models": rows})


def _photos(root: Path, images: int, side: int) -> EvaluationSet:
    for number in range(images):
        path = root / ("even", "odd")[number % 2] / f"{number:05d}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(photo(number, side))
    return open_evaluation_set(root, templates="one")


def _model(name: str, data: EvaluationSet, batch_size: int, workers: int, rounds: int) -> dict[str, Any]:
    loaded = random_model(name)
    classifiers = Classifiers(loaded)
    classifiers.get(data.label_sets[0])  # texts are no part of it
    tasks: dict[str, Callable[[], object]] = {
        "evaluation": lambda: score(
            classifiers, data, data.label_sets, batch_size=batch_size, workers=workers
        ),
        "tower": lambda: _forward(loaded, data.n, batch_size),
        "reading": lambda: _read(loaded, data, batch_size),
    }
    _forward(loaded, batch_size, batch_size)
    seconds: dict[str, list[float]] = {name: [] for name in tasks}
    for _ in range(rounds):
        for task, run in tasks.items():
            start = time.perf_counter()
            run()
            seconds[task].append((time.perf_counter() - start) / data.n)
    medians = {task: statistics.median(each) for task, each in seconds.items()}
    return {"model": name, "seconds_per_image": seconds, **_summary(medians, workers)}


def _summary(medians: dict[str, float], workers: int) -> dict[str, Any]:
    """The ratio of the rates, and the highest that reading lets pass.

    Reading is timed in one process. Workers that have cores of their own pass `workers` images in that time; where
    they take theirs from the tower, which otherwise computes on all, its time and theirs add up.
    """
    tower, reading = medians["tower"], medians["reading"]
    cores = os.cpu_count() or 1
    beside = min(1.0, tower / (reading / workers))
    shared = tower / (tower + reading / cores)
    return {
        "images_per_s": 1 / medians["evaluation"],
        "tower_images_per_s": 1 / tower,
        "ratio": tower / medians["evaluation"],
        "reading_ms_per_image": 1e3 * reading,
        "tower_ms_per_image": 1e3 * tower,
        "highest_ratio_on_shared_cores": min(beside, shared) if torch.get_num_threads() >= cores else beside,
    }


def _forward(loaded: LoadedModel, images: int, batch_size: int) -> None:
    size = loaded.clip.visual.image_size
    batch = torch.randn(batch_size, 3, *((size, size) if isinstance(size, int) else size))
    for start in range(0, images, batch_size):
        image_features(loaded, batch[: images - start])


def _read(loaded: LoadedModel, data: EvaluationSet, batch_size: int) -> None:
    for _ in keyed_batches(data, loaded.transform, batch_size=batch_size, workers=0):
        pass
