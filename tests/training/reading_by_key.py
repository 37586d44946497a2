"""Test only: reads through OpenCLIP's own loader in several processes, and prints what each one got, in order.

The argument is a JSON list of settings, which are OpenCLIP's arguments and `start_epoch`. With `shards` in them the
loader yields that many names of shards for each data-loader worker, in the order in which it would open them;
otherwise captions. Standard output gets a JSON list with an answer for each: a list of epochs, each a list of
processes, each a list of captions or names.
"""

import json
import multiprocessing
import os
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from open_clip_train.data import get_data, tarfile_to_samples_nothrow
from open_clip_train.main import random_seed
from torchvision.transforms import ToTensor

DEFAULTS = {
    "batch_size": 8,
    "csv_caption_key": "title",
    "csv_img_key": "filepath",
    "csv_separator": "\t",
    "dataset_resampled": False,
    "dataset_type": "webdataset",
    "distributed": False,
    "epochs": 1,
    "imagenet_v2": None,
    "imagenet_val": None,
    "seed": 0,
    "start_epoch": 0,
    "train_data_upsampling_factors": None,
    "train_num_samples": None,
    "val_data": None,
    "workers": 1,
    "world_size": 1,
}


def untouched(text: Any) -> list[str]:
    """The tokenizer: shards bring a caption, tables a list of one."""
    return text if isinstance(text, list) else [text]


def names(shards: Any) -> Any:
    """A stage of webdataset's pipeline that ends it with the names of shards."""
    for shard in shards:
        yield Path(shard["url"]).name


def read(args: SimpleNamespace, rank: int, found: Any) -> None:
    """What the epochs from `start_epoch` on bring, read as OpenCLIP's training does."""
    torch.set_num_threads(1)
    warnings.filterwarnings(
        "ignore", "This DataLoader will create"
    )  # more workers than this machine has cores
    warnings.filterwarnings("ignore", "'pin_memory' argument is set")  # where there is no accelerator
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(args.world_size))
    random_seed(args.seed, rank)  # as OpenCLIP's main does before it makes the loader
    data = get_data(args, (ToTensor(), None), epoch=args.start_epoch, tokenizer=untouched)["train"]
    shards = getattr(args, "shards", None)
    if shards is not None:
        dataset = data.dataloader.pipeline[0].dataset
        dataset.pipeline[dataset.pipeline.index(tarfile_to_samples_nothrow) :] = [names]
        dataset.with_epoch(shards)
    for epoch in range(args.start_epoch, args.epochs):
        data.set_epoch(epoch)
        if shards is not None:
            got = list(data.dataloader)
        else:
            got = [caption for _, captions in data.dataloader for caption in captions]
        found.put((epoch - args.start_epoch, rank, got))


def answer(args: SimpleNamespace) -> list[list[list[str]]]:
    """By epoch and process; forked, so that OpenCLIP is imported once."""
    context = multiprocessing.get_context("fork")
    epochs = args.epochs - args.start_epoch
    found = context.Queue()
    readers = [context.Process(target=read, args=(args, rank, found)) for rank in range(args.world_size)]
    for reader in readers:
        reader.start()
    got: list[list[list[str]]] = [[[] for _ in readers] for _ in range(epochs)]
    for _ in range(len(readers) * epochs):
        epoch, rank, names_or_captions = found.get(timeout=60)
        got[epoch][rank] = names_or_captions
    for reader in readers:
        reader.join()
    return got


if __name__ == "__main__":
    print(json.dumps([answer(SimpleNamespace(**{**DEFAULTS, **each})) for each in json.loads(sys.argv[1])]))
