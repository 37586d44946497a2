"""Trains through OpenCLIP's own main: every flag of it passes through unchanged.

    python -m openclip_linattn.train --model ViT-S-16-normlinear --train-data ... [OpenCLIP's flags]
    torchrun --nproc_per_node 8 -m -- openclip_linattn.train --model ... [OpenCLIP's flags]

Before the model is built, the first process looks at the command and the shards, so that what would hang or fail
later ends with a sentence now; and the run leaves run.json beside OpenCLIP's own files.
"""

import argparse
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import open_clip
from open_clip_train.distributed import world_info_from_env
from open_clip_train.main import main as open_clip_main
from open_clip_train.params import parse_args

from openclip_linattn.data.preflight import PreflightResult, preflight
from openclip_linattn.data.sources import as_pattern
from openclip_linattn.errors import UserError
from openclip_linattn.manifest import Manifest, Plan, machine_facts, model_facts
from openclip_linattn.registration import model_name, models

# What OpenCLIP cannot do with our models, and why.
REFUSED = {
    "torchscript": "--torchscript: the towers are not scriptable; --torchcompile works",
    "trace": "--trace: a traced model cannot be trained; --torchcompile works",
    "force_quick_gelu": "--force-quick-gelu: OpenCLIP does not hand it to these towers; leave it out",
    "pretrained_image": "--pretrained-image: there are no image-only weights; use --pretrained PATH",
}


def main(argv: list[str] | None = None) -> int:
    """Checks the command, trains through OpenCLIP's main, keeps run.json; returns the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        return run(argv)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201 - the one sentence that the user needs
        return 2


def run(argv: list[str]) -> int:
    """`main` with UserError left to the caller."""
    args = parse_args(argv)
    if args.name is None:
        args.name = default_name(args)
        argv = [*argv, "--name", args.name]
    if args.train_data and Path(args.train_data).is_dir():
        args.train_data, args.dataset_type = as_pattern(args.train_data), "webdataset"
        argv = [*argv, "--train-data", args.train_data, "--dataset-type", "webdataset"]
    _local_rank, rank, world_size = world_info_from_env()
    check_command(args, master=rank == 0)
    if rank != 0:
        return open_clip_main(argv) or 0
    checked = look_at_shards(args, world_size)
    plan = training_plan(args, checked, world_size)
    return _train(argv, args, plan, open_manifest(args, argv, plan, checked, world_size))


def _train(argv: list[str], args: argparse.Namespace, plan: Plan | None, manifest: Manifest) -> int:
    status, code = "failed", 1
    try:
        code = open_clip_main(argv) or 0
        status = "finished" if code == 0 else "failed"
    finally:
        done = args.epochs if status == "finished" else _epochs_done(run_folder(args))
        manifest.finish(status, plan, epochs_done=done)
    return code if code >= 0 else 1


def check_command(args: argparse.Namespace, *, master: bool = True) -> None:
    """Raises UserError for a model that does not exist, a flag that cannot work, or a run name that is taken.

    Only the master process looks at the run's folder: the others may come when it has already begun the run.
    """
    if not args.model.startswith(
        ("hf-hub:", "local-dir:")
    ):  # these bring a config and a tokenizer of their own
        model_name(args.model)
    if args.model in models():
        for flag, reason in REFUSED.items():
            if getattr(args, flag, False):
                raise UserError(f"{args.model} does not work with {reason}")
    log = run_folder(args) / "out.log"
    if master and log.exists() and args.resume != "latest":
        raise UserError(
            f"the run {args.name!r} exists already ({log}); choose another --name, or continue it with --resume latest"
        )


def default_name(args: argparse.Namespace) -> str:
    """A run name of OpenCLIP's style, for commands that give none."""
    now = datetime.now().strftime("%Y_%m_%d-%H_%M_%S")
    model = args.model.replace("/", "-")
    return f"{now}-model_{model}-lr_{args.lr}-b_{args.batch_size}-j_{args.workers}-p_{args.precision}"


def run_folder(args: argparse.Namespace) -> Path:
    """<logs>/<name>, OpenCLIP's own folder of a run."""
    return Path(str(args.logs)) / str(args.name)


def reads_shards(args: argparse.Namespace) -> bool:
    """Whether OpenCLIP would read --train-data as webdataset shards."""
    kind: str = args.dataset_type
    if not args.train_data:
        return False
    return kind == "webdataset" or (kind == "auto" and str(args.train_data).endswith("tar"))


def look_at_shards(args: argparse.Namespace, world_size: int) -> PreflightResult | None:
    """Checks the training shards as far as it takes seconds; raises UserError where training would hang or fail."""
    if not reads_shards(args):
        return None
    checked = preflight(
        args.train_data,
        world_size=world_size,
        workers=args.workers,
        resampled=args.dataset_resampled,
        num_samples=args.train_num_samples,
        batch_size=args.batch_size,
        accum=args.accum_freq,
    )
    for warning in checked.warnings:
        print(f"warning: {warning}", file=sys.stderr)  # noqa: T201 - OpenCLIP sets up its log later
    return checked


def training_plan(args: argparse.Namespace, checked: PreflightResult | None, world_size: int) -> Plan | None:
    """What the command asks for; None where OpenCLIP itself works it out (CSV files) or nothing is trained."""
    samples = args.train_num_samples or (checked.num_samples if checked else None)
    if not samples or (checked is None and args.dataset_type != "synthetic"):
        return None
    return Plan(samples, args.batch_size, world_size, args.workers, args.accum_freq, args.epochs)


def open_manifest(
    args: argparse.Namespace,
    argv: list[str],
    plan: Plan | None,
    checked: PreflightResult | None,
    world_size: int,
) -> Manifest:
    """Starts run.json for this run, or continues the one of a resumed run."""
    manifest = Manifest(run_folder(args) / "run.json")
    facts: dict[str, Any] = {
        "name": args.name,
        "world_size": world_size,
        **_model_facts(args),
        **machine_facts(argv),
    }
    if checked is not None:
        facts["dataset"] = checked.to_json()
    if plan is not None:
        facts["unique_samples_bound"] = _unique_bound(plan, checked)
    manifest.start(plan, start_epoch=_start_epoch(args), **facts)
    return manifest


def _model_facts(args: argparse.Namespace) -> dict[str, Any]:
    config = open_clip.get_model_config(args.model)
    try:
        return model_facts(args.model, config, _single(args.force_image_size))
    except (
        ValueError
    ):  # a model whose cost is no matter of arithmetic, as a ResNet: OpenCLIP trains it all the same
        return {"model": args.model}


def _single(size: Any) -> Any:
    return size[0] if isinstance(size, (list, tuple)) and len(size) == 1 else size


def _unique_bound(plan: Plan, checked: PreflightResult | None) -> int:
    """No more distinct samples than the set holds can have been seen, nor more than were drawn."""
    drawn = plan.totals(plan.epochs)["samples"]
    held = checked.held if checked else None
    return min(drawn, held) if held else drawn


def _start_epoch(args: argparse.Namespace) -> int:
    return _epochs_done(run_folder(args)) if args.resume == "latest" else _epoch_of(Path(args.resume or ""))


def _epochs_done(folder: Path) -> int:
    """The highest epoch that has a checkpoint."""
    return max((_epoch_of(path) for path in (folder / "checkpoints").glob("epoch_*.pt")), default=0)


def _epoch_of(path: Path) -> int:
    """The epoch that a checkpoint closes: from its name, or for epoch_latest.pt from inside."""
    number = path.stem.removeprefix("epoch_")
    if number.isdigit():
        return int(number)
    if not path.is_file():
        return 0
    import torch

    checkpoint = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    return int(checkpoint.get("epoch", 0))


if __name__ == "__main__":
    sys.exit(main())
