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

from openclip_linattn.data.preflight import PreflightResult
from openclip_linattn.data.sources import as_pattern
from openclip_linattn.errors import UserError
from openclip_linattn.manifest import Manifest, Plan, machine_facts, model_facts
from openclip_linattn.registration import model_name, models
from openclip_linattn.resume import epoch_of, epochs_done, latest_checkpoint
from openclip_linattn.training_data import (
    is_shards,
    look_at_shards,
    look_at_validation,
    training_plan,
    trains,
)

# What OpenCLIP cannot do with our models, and why.
REFUSED = {
    "torchscript": "--torchscript: the towers are not scriptable; --torchcompile works",
    "trace": "--trace: a traced model cannot be trained; --torchcompile works",
    "force_quick_gelu": "--force-quick-gelu: OpenCLIP does not hand it to these towers; leave it out",
    "pretrained_image": "--pretrained-image: there are no image-only weights; use --pretrained PATH",
}
FOREIGN = ("hf-hub:", "local-dir:")  # such models bring a config and a tokenizer of their own


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
    argv = [*argv, *settle(args)]
    _local_rank, rank, world_size = world_info_from_env()
    check_command(args, master=rank == 0)
    if rank != 0:
        return open_clip_main(argv) or 0
    checked = look_at_shards(args, world_size)
    look_at_validation(args)
    plan = training_plan(args, checked, world_size)
    if not trains(args) and (run_folder(args) / "run.json").exists():
        return _status(open_clip_main(argv))  # an evaluation leaves the record of the training as it is
    return _train(argv, args, plan, open_manifest(args, argv, plan, checked, world_size))


def settle(args: argparse.Namespace) -> list[str]:
    """Settles, in `args`, what OpenCLIP would leave open or not read; returns the flags that say the same to it.

    A run without --name gets one, ViT-B/16 becomes ViT-B-16, and folders of shards become patterns.
    """
    settled: dict[str, str] = {}
    if not args.model.startswith(FOREIGN):
        settled["model"] = model_name(args.model)
    if args.name is None:
        settled["name"] = default_name(args)
    if args.dataset_type == "auto" and args.train_data and Path(args.train_data).is_dir():
        settled["dataset_type"] = args.dataset_type = "webdataset"
    for key in ("train_data", "val_data"):
        source = getattr(args, key)
        if source and is_shards(source, args.dataset_type):
            settled[key] = as_pattern(source)
    changed = {
        key: value for key, value in settled.items() if key == "dataset_type" or value != getattr(args, key)
    }
    vars(args).update(changed)
    return [part for key, value in changed.items() for part in (f"--{key.replace('_', '-')}", value)]


def _train(argv: list[str], args: argparse.Namespace, plan: Plan | None, manifest: Manifest) -> int:
    status, code = "failed", 1
    try:
        code = _status(open_clip_main(argv))
        if code == 0:
            status = "finished" if trains(args) else "evaluated"
    finally:
        done = args.epochs if status == "finished" else epochs_done(run_folder(args))
        manifest.finish(status, plan, epochs_done=done)
    return code


def _status(code: int | None) -> int:
    """OpenCLIP returns nothing, or -1 where it refuses."""
    return 1 if code is not None and code < 0 else code or 0


def check_command(args: argparse.Namespace, *, master: bool = True) -> None:
    """Raises UserError for a flag that cannot work, weights that are not there, or a run name that is taken.

    Only the master process looks at the run's folder: the others may come when it has already begun the run.
    """
    if args.model in models():
        for flag, reason in REFUSED.items():
            if getattr(args, flag, False):
                raise UserError(f"{args.model} does not work with {reason}")
        if args.pretrained and not Path(args.pretrained).exists():
            raise UserError(_no_weights(args.model, args.pretrained))
    by_path = args.resume and args.resume != "latest" and "://" not in args.resume
    if by_path and not Path(args.resume).exists():
        raise UserError(f"--resume {args.resume}: no such checkpoint")
    log = run_folder(args) / ("out-0" if getattr(args, "log_local", False) else "out.log")
    if master and log.exists() and args.resume != "latest":
        raise UserError(
            f"the run {args.name!r} exists already ({log}); choose another --name, or continue it with --resume latest"
        )


def _no_weights(model: str, pretrained: str) -> str:
    for stock, tag in open_clip.list_pretrained():
        if tag == pretrained and model.startswith(f"{stock}-"):
            return (
                f"--pretrained {pretrained}: {model} has no released weights; those of {stock} start it, by the path "
                f'that open_clip.download_pretrained(open_clip.get_pretrained_cfg("{stock}", "{tag}")) returns'
            )
    return f"--pretrained {pretrained}: no such file, and {model} has no released weights"


def default_name(args: argparse.Namespace) -> str:
    """A run name of OpenCLIP's style, for commands that give none."""
    now = datetime.now().strftime("%Y_%m_%d-%H_%M_%S")
    model = args.model.replace("/", "-")
    return f"{now}-model_{model}-lr_{args.lr}-b_{args.batch_size}-j_{args.workers}-p_{args.precision}"


def run_folder(args: argparse.Namespace) -> Path:
    """<logs>/<name>, OpenCLIP's own folder of a run."""
    return Path(str(args.logs)) / str(args.name)


def open_manifest(
    args: argparse.Namespace,
    argv: list[str],
    plan: Plan | None,
    checked: PreflightResult | None,
    world_size: int,
) -> Manifest:
    """Starts run.json for this run, or continues the one of a resumed run."""
    manifest = Manifest(run_folder(args) / "run.json")
    start_epoch = _start_epoch(args, manifest)
    for sentence in manifest.changes(plan, start_epoch=start_epoch) if plan and args.resume else ():
        print(f"warning: {sentence}", file=sys.stderr)  # noqa: T201
    facts: dict[str, Any] = {
        "name": args.name,
        "world_size": world_size,
        **_model_facts(args),
        **machine_facts(argv),
    }
    if checked is not None:
        facts["dataset"] = checked.to_json()
    manifest.start(plan, start_epoch=start_epoch, held=checked.held if checked else None, **facts)
    return manifest


def _model_facts(args: argparse.Namespace) -> dict[str, Any]:
    if args.model.startswith(FOREIGN):
        return {"model": args.model}
    config = open_clip.get_model_config(args.model)
    try:
        return model_facts(args.model, config, _single(args.force_image_size), args.force_context_length)
    except (
        ValueError
    ):  # a cost that is no matter of arithmetic, as a ResNet's: OpenCLIP trains it all the same
        return {"model": args.model}


def _single(size: Any) -> Any:
    return size[0] if isinstance(size, (list, tuple)) and len(size) == 1 else size


def _start_epoch(args: argparse.Namespace, manifest: Manifest) -> int:
    """The epoch that training begins with; what a checkpoint of another run had seen is noted in the manifest."""
    folder = run_folder(args)
    if args.resume == "latest":
        if getattr(args, "remote_sync", None):
            return epochs_done(folder)
        checkpoint = latest_checkpoint(folder, save_most_recent=args.save_most_recent)
        return epoch_of(checkpoint) if checkpoint else 0
    if not args.resume:
        return 0
    start_epoch = epoch_of(Path(args.resume))
    source = Manifest(Path(args.resume).parent.parent / "run.json")
    if source.content["segments"]:
        manifest.content["earlier"] = {"checkpoint": args.resume, **source.seen_before(start_epoch)}
    return start_epoch


if __name__ == "__main__":
    sys.exit(main())
