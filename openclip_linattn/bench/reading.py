"""Where the time of reading goes: the parts of one sample, whole loaders by workers, and the look before training."""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import open_clip
import torch

from openclip_linattn.bench.machine import environment
from openclip_linattn.bench.photos import write_photo_shards
from openclip_linattn.bench.reading_loaders import loader_rate
from openclip_linattn.bench.reading_parts import measure_parts
from openclip_linattn.data.sources import as_pattern, expand
from openclip_linattn.data.training.preflight import preflight
from openclip_linattn.errors import UserError
from openclip_linattn.registration import model_name


@dataclass(frozen=True)
class ReadingSettings:
    """What is read and how often: a source (None: photograph-like shards are drawn), a model, a batch, workers.

    samples: measured part by part. rounds: of every part and every loader. shards, per_shard, side: what is drawn.
    """

    source: str | None
    model: str
    batch_size: int
    workers: Sequence[int]
    samples: int
    rounds: int
    shards: int = 4
    per_shard: int = 1024
    side: int = 256


def bench_reading(settings: ReadingSettings, progress: Callable[[str], None]) -> dict[str, Any]:
    """The measurements, ready for JSON: `parts`, `loaders` and `preflight`, with what is needed to repeat them.

    Raises UserError where the source cannot be read or has fewer shards than a loader has workers.
    """
    if min(settings.workers) < 0 or min(settings.batch_size, settings.samples, settings.rounds) < 1:
        raise UserError("--workers must be 0 or more, --batch-size, --samples and --rounds at least 1")
    name = model_name(settings.model)
    _, transform, _ = open_clip.create_model_and_transforms(name)
    tokenizer = open_clip.get_tokenizer(name)
    with _source(settings, progress) as source:
        urls = expand(source)
        if len(urls) < max(settings.workers):
            raise UserError(
                f"--workers {max(settings.workers)} is more than the {len(urls)} shards of {source}, and every worker "
                "needs one of its own"
            )
        progress("the parts of a sample")
        parts = measure_parts(urls, transform, tokenizer, count=settings.samples, rounds=settings.rounds)
        rates: dict[int, list[float]] = {workers: [] for workers in settings.workers}
        for number in range(settings.rounds):
            for workers in rates:
                progress(f"round {number + 1} of {settings.rounds}, loader with {workers} workers")
                rates[workers].append(
                    loader_rate(
                        as_pattern(source),
                        transform,
                        tokenizer,
                        batch_size=settings.batch_size,
                        workers=workers,
                    )
                )
        progress("the look before training")
        looks = [_look(source, len(urls)) for _ in range(settings.rounds)]
    return {
        "benchmark": "reading",
        "environment": environment(torch.device("cpu"), torch.float32, 64),
        "model": name,
        "batch_size": settings.batch_size,
        "samples": settings.samples,
        "source": settings.source or _drawn(settings),
        "parts": part_rows(parts),
        "loaders": loader_rows(rates, parts),
        "preflight": {"seconds": statistics.median(looks), "times": looks},
    }


def part_rows(parts: dict[str, list[float]]) -> list[dict[str, Any]]:
    """A row for each part: median time per sample, its share of all parts, samples per second alone."""
    medians = {part: statistics.median(times) for part, times in parts.items()}
    total = sum(medians.values())
    return [
        {
            "part": part,
            "seconds": seconds,
            "share": seconds / total,
            "samples_per_s": 1 / seconds,
            "times": parts[part],
        }
        for part, seconds in medians.items()
    ]


def loader_rows(rates: dict[int, list[float]], parts: dict[str, list[float]]) -> list[dict[str, Any]]:
    """A row for each number of workers: median rate, and its ratio to one process that does nothing but the parts."""
    alone = 1 / sum(statistics.median(times) for times in parts.values())
    return [
        {
            "workers": workers,
            "samples_per_s": statistics.median(found),
            "of_parts": statistics.median(found) / alone,
            "rates": found,
        }
        for workers, found in rates.items()
    ]


def _look(source: str, shards: int) -> float:
    """Seconds of the look before training at its first time, when nothing is known of the set."""
    start = time.perf_counter()
    preflight(source, world_size=1, workers=min(1, shards), resampled=False, num_samples=1, cache=False)
    return time.perf_counter() - start


@contextmanager
def _source(settings: ReadingSettings, progress: Callable[[str], None]) -> Iterator[str]:
    if settings.source is not None:
        yield settings.source
        return
    with tempfile.TemporaryDirectory() as folder:
        progress(f"drawing {_drawn(settings)}")
        write_photo_shards(
            Path(folder), shards=settings.shards, per_shard=settings.per_shard, side=settings.side
        )
        yield folder


def _drawn(settings: ReadingSettings) -> str:
    return (
        f"{settings.shards} drawn shards of {settings.per_shard:,} samples, shorter side {settings.side} px"
    )
