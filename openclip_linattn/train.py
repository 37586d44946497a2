"""Trains through OpenCLIP's own main: every flag of it passes through unchanged.

    python -m openclip_linattn.train --model ViT-S-16-normlinear --train-data ... [OpenCLIP's flags]
    torchrun --nproc_per_node 8 -m -- openclip_linattn.train --model ... [OpenCLIP's flags]

Before the model is built, the first process looks at the command and the shards, so that what would hang or fail
later ends with a sentence now; and the run leaves run.json beside OpenCLIP's own files. Checkpoints are written
whole or not at all, and SIGTERM, SIGUSR1 and Ctrl-C end every process with status 128 + the signal's number, ready
for `--resume latest`. torchrun passes on SIGTERM and Ctrl-C; SIGUSR1 would end torchrun alone and leave its processes
to train on, unless it is told `--signals-to-handle SIGTERM,SIGINT,SIGUSR1` (PyTorch 2.14 knows that flag). SLURM's
--signal reaches all processes of a step, and `pkill -USR1 -f -- '-m openclip_linattn.train'` on each node those that
torchrun has started: then either form will do.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import open_clip
from open_clip_train.distributed import world_info_from_env
from open_clip_train.main import main as open_clip_main
from open_clip_train.params import parse_args

from openclip_linattn.checkpointing import atomic_saving, partial_checkpoints
from openclip_linattn.conversion.teacher import check_teacher
from openclip_linattn.data.remote import register_readers
from openclip_linattn.errors import UserError
from openclip_linattn.interruption import end_children, ended_by_signals
from openclip_linattn.registration import model_name, models
from openclip_linattn.resume import check_resumed_file
from openclip_linattn.run_lock import only_process
from openclip_linattn.run_record import (
    FOREIGN,
    RunRecord,
    default_name,
    open_record,
    run_folder,
    settle_resume,
)
from openclip_linattn.training_data import (
    look_at_shards,
    look_at_validation,
    order_flags,
    settle_data,
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


def main(argv: list[str] | None = None) -> int:
    """Checks the command, trains through OpenCLIP's main, keeps run.json; returns the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        return run(argv)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201 - the one sentence that the user needs
        return 2
    except KeyboardInterrupt:  # before training has begun
        return 130


def run(argv: list[str]) -> int:
    """`main` with UserError left to the caller."""
    args = parse_args(argv)
    argv = [*argv, *settle(args)]
    _local_rank, rank, world_size = world_info_from_env()
    check_command(args, master=rank == 0)
    register_readers()
    if rank != 0:
        return _follow(argv, args)
    checked = look_at_shards(args, world_size)
    look_at_validation(args)
    plan = training_plan(args, checked, world_size)
    with only_process(run_folder(args)):
        latest = settle_resume(args)
        if not trains(args) and (run_folder(args) / "run.json").exists():
            return _status(open_clip_main(argv))  # an evaluation leaves the record of the training as it is
        record = open_record(args, argv, plan, checked, latest, world_size)
        return _lead([*argv, *order_flags(args, latest.epoch, world_size)], args, record)


def settle(args: argparse.Namespace) -> list[str]:
    """Settles, in `args`, what OpenCLIP would leave open or not read; returns the flags that say the same to it.

    A run without --name gets one, ViT-B/16 becomes ViT-B-16, and folders of shards become patterns.
    """
    settled = settle_data(args)
    if not args.model.startswith(FOREIGN):
        settled["model"] = model_name(args.model)
    if args.name is None:
        settled["name"] = default_name(args)
    changed = {key: value for key, value in settled.items() if value != getattr(args, key)}
    vars(args).update(changed)
    return [part for key, value in changed.items() for part in (f"--{key.replace('_', '-')}", value)]


def _lead(argv: list[str], args: argparse.Namespace, record: RunRecord) -> int:
    """Trains as the process that saves and keeps run.json."""
    status, code, why = "failed", 1, {}
    try:
        with atomic_saving(), ended_by_signals(record.interrupt, _saving(args)):
            code = _status(open_clip_main(argv))
        if code == 0:
            status = "finished" if trains(args) else "evaluated"
    except Exception as error:
        why["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
        end_children()  # OpenCLIP's --remote-sync has one that would be waited for until it ends
        raise
    finally:
        try:
            record.finish(status, **why)
        except UserError as error:
            if status != "failed":
                raise
            print(f"warning: {error}", file=sys.stderr)  # noqa: T201 - what made the run fail is said after it
    return code


def _follow(argv: list[str], args: argparse.Namespace) -> int:
    """Trains as any other process. While the first one saves it stays: torchrun ends all soon after one is gone."""
    with ended_by_signals(lambda _: None, _saving(args)):
        return _status(open_clip_main(argv))


def _saving(args: argparse.Namespace) -> Callable[[], bool]:
    """Whether a checkpoint of the run is being written, by this process or another."""
    checkpoints = run_folder(args) / "checkpoints"
    return lambda: bool(partial_checkpoints(checkpoints))


def _status(code: int | None) -> int:
    """OpenCLIP returns nothing, or -1 where it refuses."""
    return 1 if code is not None and code < 0 else code or 0


def check_command(args: argparse.Namespace, *, master: bool = True) -> None:
    """Raises UserError for a flag that cannot work, weights or a teacher that are not there, or a taken run name.

    Only the master process looks at the run's folder: the others may come when it has already begun the run.
    """
    if args.model in models():
        for flag, reason in REFUSED.items():
            if getattr(args, flag, False):
                raise UserError(f"{args.model} does not work with {reason}")
        if args.pretrained and not Path(args.pretrained).exists():
            raise UserError(_no_weights(args.model, args.pretrained))
    check_teacher(args)
    if master and args.resume and args.resume != "latest" and "://" not in args.resume:
        check_resumed_file(Path(args.resume))
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


if __name__ == "__main__":
    sys.exit(main())
