"""Looks at what a training command reads, before OpenCLIP does: training and validation data, steps of an epoch."""

import argparse
import sys
from dataclasses import replace

from openclip_linattn.data.checks.check import check
from openclip_linattn.data.sizes import sample_count
from openclip_linattn.data.sources import as_pattern
from openclip_linattn.data.sources.folders import is_folder
from openclip_linattn.data.sources.parts import is_list
from openclip_linattn.data.training.factors import settle_factors
from openclip_linattn.data.training.preflight import SILENCE, PreflightResult, preflight
from openclip_linattn.errors import UserError
from openclip_linattn.manifest import Plan

# OpenCLIP's validation holds similarities and their ranking, N x N numbers each: 5 GB at this many samples.
MANY_VALIDATION_SAMPLES = 20_000


def trains(args: argparse.Namespace) -> bool:
    """Whether the command trains, rather than evaluates only."""
    return bool(args.train_data) or args.dataset_type == "synthetic"


def settle_data(args: argparse.Namespace) -> dict[str, str]:
    """What the command says of its data, in the form that OpenCLIP reads; by the names of its arguments.

    Folders of shards and list files become patterns, and what they are is said where OpenCLIP would go by the ending.
    """
    settled: dict[str, str] = {}
    shards = {
        key: source
        for key in ("train_data", "val_data")
        if is_shards(source := getattr(args, key), args.dataset_type)
    }
    settled.update({key: as_pattern(source) for key, source in shards.items()})
    if (
        args.dataset_type == "auto"
        and shards
        and len(shards) == sum(map(bool, (args.train_data, args.val_data)))
    ):
        settled["dataset_type"] = "webdataset"
    factors = args.train_data_upsampling_factors
    if factors is not None and "train_data" in shards:
        settled["train_data_upsampling_factors"] = settle_factors(
            factors, shards["train_data"], resampled=args.dataset_resampled
        )
    return settled


def order_flags(args: argparse.Namespace, start_epoch: int, world_size: int) -> list[str]:
    """The flags that keep a resumed run from repeating the first epoch's order.

    OpenCLIP seeds the order of shards by the epoch, and that of other data too where there are several processes. A
    single process draws it from the seed alone, as at the start: then the epoch is added to the seed, which decides
    nothing else here, for the weights come from the checkpoint.
    """
    if not start_epoch or world_size > 1 or not trains(args) or is_shards(args.train_data, args.dataset_type):
        return []
    return ["--seed", str(args.seed + start_epoch)]


def is_shards(source: str | None, dataset_type: str) -> bool:
    """Whether OpenCLIP would read a source as webdataset shards.

    Raises UserError where it has to guess by the ending and cannot.
    """
    if not source:
        return False
    if dataset_type == "auto" and (is_list(source) or is_folder(source)):
        return True
    if dataset_type == "auto":
        ending = source.split(".")[-1]
        if ending not in ("tar", "csv", "tsv"):
            raise UserError(
                f"OpenCLIP cannot tell by its ending what {source} is: give --dataset-type webdataset, or csv"
            )
        return ending == "tar"
    return dataset_type == "webdataset"


def look_at_shards(args: argparse.Namespace, world_size: int) -> PreflightResult | None:
    """Checks the training shards as far as it takes seconds; raises UserError where training would hang or fail."""
    if not is_shards(args.train_data, args.dataset_type):
        return None
    if args.dataset_resampled and not args.workers and args.epochs > 1:
        raise UserError(
            "with --workers 0 and --dataset-resampled OpenCLIP draws the same shards in every epoch: give --workers 1 "
            "or more"
        )
    checked = preflight(
        args.train_data,
        world_size=world_size,
        workers=args.workers,
        resampled=args.dataset_resampled,
        num_samples=args.train_num_samples,
        batch_size=args.batch_size,
    )
    for warning in checked.warnings:
        print(f"warning: {warning}", file=sys.stderr)  # noqa: T201 - OpenCLIP sets up its log later
    weighted = args.train_data_upsampling_factors is not None
    return replace(checked, coverage=None) if weighted else checked


def look_at_validation(args: argparse.Namespace) -> None:
    """Raises UserError where validation, after the first epoch, would find no sample in its shards."""
    if not is_shards(args.val_data, args.dataset_type):
        return
    try:
        errors = check(args.val_data, sample_shards=2, sample_limit=64, silence=SILENCE).errors
    except UserError as error:
        errors = [str(error)]
    if errors:
        raise UserError("\n".join(f"--val-data: {error}" for error in errors))
    held = sample_count(args.val_data) or 0
    if held > MANY_VALIDATION_SAMPLES:
        gigabytes = 3 * 4 * held**2 / 1e9
        print(  # noqa: T201
            f"warning: --val-data has {held:,} samples, and OpenCLIP ranks all of them against each other: about "
            f"{gigabytes:,.0f} GB of memory. Give it fewer shards; --val-num-samples does not limit them.",
            file=sys.stderr,
        )


def training_plan(args: argparse.Namespace, checked: PreflightResult | None, world_size: int) -> Plan | None:
    """What the command asks for; None where nothing is trained. Raises UserError where an epoch has no step."""
    if not trains(args):
        return None
    if checked is not None:
        samples = args.train_num_samples or checked.num_samples or 0
    elif args.dataset_type == "synthetic":
        samples = args.train_num_samples or 0
    else:
        samples = csv_rows(args.train_data, args.csv_separator, (args.csv_img_key, args.csv_caption_key))
    plan = Plan(
        samples,
        args.batch_size,
        world_size,
        args.workers,
        args.accum_freq,
        args.epochs,
        drop_last=checked is None,
    )
    if plan.steps_per_epoch == 0:
        raise UserError(
            f"an epoch of {samples:,} samples is less than one step of {plan.global_batch:,}, so nothing would be "
            "trained: lower --batch-size or --accum-freq, or give more samples"
        )
    return plan


def csv_rows(path: str, separator: str, columns: tuple[str, str]) -> int:
    """Rows of a CSV file as OpenCLIP reads it; raises UserError where it cannot be read or lacks a column."""
    import pandas as pd

    try:
        found = list(pd.read_csv(path, sep=separator, nrows=0).columns)
        missing = [column for column in columns if column not in found]
        if missing:
            raise UserError(
                f"{path} has no column {missing[0]!r}; its columns are {found}: give --csv-img-key, --csv-caption-key "
                f"or --csv-separator (now {separator!r})"
            )
        return len(pd.read_csv(path, sep=separator, usecols=[columns[0]]))
    except (OSError, UnicodeDecodeError, pd.errors.ParserError, pd.errors.EmptyDataError) as error:
        raise UserError(f"{path} cannot be read as CSV: {error}") from error
