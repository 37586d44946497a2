"""Measures what `openclip-scaling collect` costs: seconds and memory for run folders with many bytes of logs.

Writes run folders with logs as OpenCLIP 3.3.0 writes them (checkpoints, evaluations and a resume in each) into a
temporary folder, runs the command on them as a process of its own, and samples the memory of it and its workers.

    python scripts/measure_collect.py [--folders 1000] [--megabytes 1000] [--out scaling/results/collect/collect.json]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

from joblib import cpu_count

from openclip_linattn.bench.machine import processor
from openclip_linattn.files import write_json

EPOCHS, BATCH = 8, 4096
PARAMS = {
    "accum_freq": 1, "batch_size": BATCH // 8, "device": "cuda:0", "epochs": EPOCHS, "lr_scheduler": "cosine",
    "model": "ViT-T64-16-normlinear", "siglip": False, "train_num_samples": None, "world_size": 8,
}  # fmt: skip
MODEL = """CLIP(
  (visual): VisionTransformer(
    (conv1): Conv2d(3, 64, kernel_size=(16, 16), stride=(16, 16), bias=False)
    (transformer): Transformer(
      (resblocks): ModuleList(
        (0-1): 2 x ResidualAttentionBlock(
          (attn): Attention(
            kind=normlinear, causal=False, heads=1
          )
          (mlp): Sequential(
            (c_fc): Linear(in_features=64, out_features=256, bias=True)
          )
        )
      )
    )
  )
  (transformer): Transformer(
    (resblocks): ModuleList(
      (0): ResidualAttentionBlock(
        (mlp): Sequential(
          (c_fc): Linear(in_features=64, out_features=256, bias=True)
        )
      )
    )
  )
  (token_embedding): Embedding(49408, 64)
)"""
LINE = len(
    "2026-01-31,12:00:00 | INFO | Train Epoch: 0 [  4096/1228800 (33%)] Data (t): 0.080 Batch (t): 0.212, 19320.7/s, "
    "2415.09/s/gpu LR: 0.000500 Logit Scale: 14.286 Contrastive_loss: 2.0794 (2.0794) Loss: 2.0794 (2.0794)\n"
)


def log_lines(steps: int) -> Iterator[str]:
    """An out.log of EPOCHS epochs of `steps` logged steps, resumed after half of them."""
    total, clock = steps * BATCH, datetime(2026, 1, 31, 12)
    width = len(str(total))
    for epoch in range(EPOCHS):
        if epoch in (0, EPOCHS // 2):
            head = [
                "Running in distributed mode with multiple processes. Device: cuda:0.Process (global: 0, local 0), "
                "total 8.",
                "Final image preprocessing configuration set: {'size': (64, 64), 'mode': 'RGB'}",
                "Model:", MODEL, "Params:", *(f"  {key}: {value}" for key, value in PARAMS.items()),
            ]  # fmt: skip
            yield from (f"{clock:%Y-%m-%d,%H:%M:%S} | INFO | {text}\n" for text in head)
        for step in range(steps):
            clock += timedelta(seconds=20)
            done = epoch * steps + step
            loss = 8 * (done + 10) ** -0.2 + 0.05 * math.sin(1.7 * done)
            seen = (step + 1) * BATCH
            yield (
                f"{clock:%Y-%m-%d,%H:%M:%S} | INFO | Train Epoch: {epoch} [{seen:>{width}}/{total} "
                f"({100 * seen / total:.0f}%)] Data (t): 0.080 Batch (t): 0.212, 19320.7/s, 2415.09/s/gpu "
                f"LR: 0.000500 Logit Scale: 14.286 Contrastive_loss: {loss:#.5g} ({loss:#.5g}) "
                f"Loss: {loss:#.5g} ({loss:#.5g})\n"
            )
        yield f"{clock:%Y-%m-%d,%H:%M:%S} | INFO | Eval Epoch: {epoch + 1} clip_val_loss: {loss:.4f}\n"


def write_runs(folder: Path, count: int, size: int) -> int:
    """Write `count` run folders whose logs have `size` bytes together, about; returns the bytes."""
    text = "".join(log_lines(max(2, size // count // EPOCHS // LINE))).encode()
    params = "".join(f"{key}: {value}\n" for key, value in PARAMS.items())
    for number in range(count):
        run = folder / f"run-{number:04d}"
        (run / "checkpoints").mkdir(parents=True)
        (run / "out.log").write_bytes(text)
        (run / "params.txt").write_text(params, encoding="utf-8")
    return count * len(text)


def measure(arguments: list[str]) -> dict[str, float]:
    """Seconds that a command takes, those of its processes on a core, and the most memory they have together."""
    start, worked, peak = time.perf_counter(), processor_seconds(), 0
    with subprocess.Popen(arguments, stdout=subprocess.DEVNULL, start_new_session=True) as process:
        while process.poll() is None:
            peak = max(peak, resident(process.pid))
            time.sleep(0.05)
        seconds = time.perf_counter() - start
    if process.returncode:
        raise SystemExit(f"{' '.join(arguments)} ended with status {process.returncode}.")
    return {
        "seconds": round(seconds, 2),
        "processor_seconds": round(processor_seconds() - worked, 2),
        "peak_megabytes": round(peak / 1e6),
    }


def processor_seconds() -> float:
    """Seconds on a core of all processes that were started from here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def resident(session: int) -> int:
    """Resident bytes of all processes of a session; pages that they share count for each."""
    total = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # After the name, which may hold blanks: state, parent, group, session; 21 fields on the resident pages.
            fields = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:  # the process has ended meanwhile
            continue
        if int(fields[3]) == session:
            total += int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures openclip-scaling collect.")
    parser.add_argument("--folders", type=int, default=1000)
    parser.add_argument("--megabytes", type=float, default=1000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        size = write_runs(folder / "logs", options.folders, round(options.megabytes * 1e6))
        command = [sys.executable, "-m", "openclip_scaling.cli", "collect", str(folder / "logs")]
        reading = measure(command)
        saving = measure([*command, "-o", str(folder / "table.csv")])
        with (folder / "table.csv").open(encoding="utf-8") as rows:
            checkpoints = sum(1 for _ in rows) - 1
    result = {
        "command": f"python scripts/measure_collect.py --folders {options.folders} --megabytes {options.megabytes:g}",
        "machine": {"processor": processor(), "cores": cpu_count()},
        "folders": options.folders,
        "bytes": size,
        "checkpoints": checkpoints,
        "reading": reading,
        "reading_and_writing_tables": saving,
    }
    print(json.dumps(result, indent=1))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        write_json(options.out, result)


if __name__ == "__main__":
    main()
