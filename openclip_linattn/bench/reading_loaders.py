"""Samples per second of OpenCLIP's whole data loader, by the number of its worker processes."""

import time
from typing import Any

from open_clip_train.data import get_data
from open_clip_train.params import parse_args

BATCHES_PER_WORKER = 3
"""Batches that are timed, for every worker; as many before them fill the shuffle buffers and the queue."""


def loader_rate(source: str, transform: Any, tokenizer: Any, *, batch_size: int, workers: int) -> float:
    """Samples per second of the training loader over shards of `source`, once it is filled."""
    flags = {
        "train-data": source,
        "dataset-type": "webdataset",
        "train-num-samples": 10**9,  # no end comes in between
        "batch-size": batch_size,
        "workers": workers,
    }
    args = parse_args([part for flag, value in flags.items() for part in (f"--{flag}", str(value))])
    args.world_size, args.rank, args.distributed = 1, 0, False
    batches = iter(get_data(args, (transform, transform), tokenizer=tokenizer)["train"].dataloader)
    count = BATCHES_PER_WORKER * max(1, workers)
    for _ in range(count):
        next(batches)
    start = time.perf_counter()
    for _ in range(count):
        next(batches)
    return count * batch_size / (time.perf_counter() - start)
