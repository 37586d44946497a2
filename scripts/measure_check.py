"""Measures what `openclip-linattn data check` costs, and prints JSON.

Draws shards of images that cost what photographs cost, and times, in turn and several times over: reading the tars,
reading and judging every sample (one process, no start), and the whole command's work with one and two processes.
Medians are reported, and extrapolated to LAION-400M on a node of 64 cores.

    python scripts/measure_check.py [FOLDER]
    python scripts/measure_check.py --tiny      a smoke form of seconds
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, features

from openclip_linattn.bench.machine import processor
from openclip_linattn.bench.photos import write_photo_shards
from openclip_linattn.data.checks.check import check
from openclip_linattn.data.checks.shard_report import check_shard
from openclip_linattn.data.checks.verdicts import VerdictStore
from openclip_linattn.data.reading import ShardLog, read_samples
from openclip_linattn.data.shard_pool import available_cores

LAION_SHARDS, LAION_SAMPLES = 41_408, 413_000_000
NODE_CORES = 64


@dataclass(frozen=True)
class Effort:
    """Shards that are drawn, samples in each, and how often each part is timed."""

    shards: int = 8
    per_shard: int = 500
    repeats: int = 3


def main(folder: Path, effort: Effort) -> None:
    """Draws the shards where they are not there yet, measures and prints."""
    shards = folder / f"photos-{effort.shards}x{effort.per_shard}"
    if not (shards / "complete").exists():
        write_photo_shards(shards, shards=effort.shards, per_shard=effort.per_shard)
        (shards / "complete").touch()
    urls = [str(path) for path in sorted(shards.glob("*.tar"))]
    size = sum(Path(url).stat().st_size for url in urls)
    tasks: dict[str, Callable[[], object]] = {
        "tar_reading": lambda: [sum(1 for _ in read_samples(url, ShardLog())) for url in urls],
        "judging": lambda: [check_shard(url) for url in urls],
        "check_1_process": lambda: stored_check(shards, 1),
        "check_2_processes": lambda: stored_check(shards, 2),
    }
    times: dict[str, list[float]] = {name: [] for name in tasks}
    for _ in range(effort.repeats):
        for name, task in tasks.items():
            start = time.perf_counter()
            task()
            times[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    print(json.dumps(describe(medians, size, effort.shards * effort.per_shard), indent=2))


def stored_check(shards: Path, workers: int) -> None:
    """What the command does: processes, and a store that keeps every result."""
    with tempfile.TemporaryDirectory() as state:
        store = VerdictStore(Path(state))
        report = check(str(shards), workers=workers, store=store)
        store.close(finished=True)
    assert report.usable
    assert not report.problems


def describe(medians: dict[str, float], size: int, samples: int) -> dict[str, object]:
    """Rates, and hours for LAION-400M: its samples over the rate of one core, times the cores of a node."""
    per_core = samples / medians["judging"]
    return {
        "machine": {
            "processor": processor(),
            "cores": available_cores(),
            "pillow": Image.__version__,
            "libjpeg_turbo": features.check_feature("libjpeg_turbo"),
        },
        "samples": samples,
        "bytes_per_sample": round(size / samples),
        "rates": {
            name: {
                "seconds": round(seconds, 3),
                "samples_per_second": round(samples / seconds),
                "megabytes_per_second": round(size / seconds / 1e6, 1),
            }
            for name, seconds in medians.items()
        },
        "speedup_of_2_processes": round(medians["check_1_process"] / medians["check_2_processes"], 2),
        "laion_400m": {
            "shards": LAION_SHARDS,
            "samples": LAION_SAMPLES,
            "hours_on_64_cores": round(LAION_SAMPLES / per_core / NODE_CORES / 3600, 2),
            "gigabytes_per_second_to_read": round(NODE_CORES * per_core * size / samples / 1e9, 2),
            "how": (
                "samples / (samples a second of one core in `judging` x 64), as if cores did not slow each other and "
                "the disk kept up with the stated rate"
            ),
        },
    }


if __name__ == "__main__":
    effort = Effort(2, 10, 1) if "--tiny" in sys.argv else Effort()
    folders = [argument for argument in sys.argv[1:] if argument != "--tiny"]
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(folders[0] if folders else temporary), effort)
