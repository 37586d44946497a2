"""The folder of a training run, and its run.json from start to end."""

import argparse
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import open_clip

from openclip_linattn.data.training.preflight import PreflightResult
from openclip_linattn.first_process import of_first_process
from openclip_linattn.manifest import Manifest, Plan, machine_facts, model_facts, read_manifest
from openclip_linattn.resume import Latest, epochs_done, resumed_epoch, set_aside, settle_latest

FOREIGN = ("hf-hub:", "local-dir:")  # such models bring a config and a tokenizer of their own


def default_name(args: argparse.Namespace) -> str:
    """A run name of OpenCLIP's style, for commands that give none: one for all processes of a torchrun."""
    now = of_first_process(datetime.now().strftime("%Y_%m_%d-%H_%M_%S"))
    model = args.model.replace("/", "-")
    return f"{now}-model_{model}-lr_{args.lr}-b_{args.batch_size}-j_{args.workers}-p_{args.precision}"


def run_folder(args: argparse.Namespace) -> Path:
    """<logs>/<name>, OpenCLIP's own folder of a run."""
    return Path(str(args.logs)) / str(args.name)


def settle_resume(args: argparse.Namespace) -> Latest:
    """What the run goes on from, made sure of before OpenCLIP looks, with a sentence for each file passed over.

    Raises UserError as `settle_latest` does. A run that is kept in a remote folder (--remote-sync) resumes from there,
    where nothing is settled.
    """
    if not args.resume:
        return Latest()
    if args.resume != "latest":
        return Latest(Path(args.resume), resumed_epoch(args.resume))
    folder = run_folder(args)
    if args.remote_sync:
        return Latest(epoch=epochs_done(folder))
    latest = settle_latest(folder, save_most_recent=args.save_most_recent)
    for skipped in latest.skipped:
        print(f"warning: {skipped}", file=sys.stderr)  # noqa: T201 - OpenCLIP sets up its log later
    return latest


@dataclass
class RunRecord:
    """run.json while a run lasts: opened with `open_record`, closed once by `finish`."""

    args: argparse.Namespace
    plan: Plan | None
    manifest: Manifest

    def finish(self, status: str, **why: str) -> None:
        """Closes the record; epochs that have no checkpoint count only where the run is finished."""
        done = self.args.epochs if status == "finished" else epochs_done(run_folder(self.args))
        self.manifest.finish(status, self.plan, epochs_done=done, **why)

    def interrupt(self, number: signal.Signals) -> None:
        """Closes the record of a run that a signal ends, and says how it goes on."""
        self.finish("interrupted", signal=number.name)
        done = epochs_done(run_folder(self.args))
        print(  # noqa: T201 - the log may be at the mercy of the thread that is being ended
            f"interrupted by {number.name}: {done} of {self.args.epochs} epochs are saved; the same command with "
            "--resume latest goes on from there",
            file=sys.stderr,
        )


def open_record(
    args: argparse.Namespace,
    argv: Sequence[str],
    plan: Plan | None,
    checked: PreflightResult | None,
    latest: Latest,
    world_size: int,
) -> RunRecord:
    """Starts run.json for this run, or continues the one of a resumed run."""
    manifest = _manifest(run_folder(args))
    if args.resume and args.resume != "latest":
        _note_earlier(args.resume, latest.epoch, manifest)
    for sentence in manifest.changes(plan, start_epoch=latest.epoch) if plan and args.resume else ():
        print(f"warning: {sentence}", file=sys.stderr)  # noqa: T201
    facts: dict[str, Any] = {
        "name": args.name,
        "world_size": world_size,
        **_model_facts(args),
        **machine_facts(list(argv)),
    }
    if checked is not None:
        facts["dataset"] = checked.to_json()
    if latest.skipped:
        before = manifest.content.get("skipped_checkpoints", [])
        facts["skipped_checkpoints"] = [*before, *map(vars, latest.skipped)]
    held, coverage = (checked.held, checked.coverage) if checked else (None, None)
    manifest.start(plan, start_epoch=latest.epoch, held=held, coverage=coverage, **facts)
    return RunRecord(args, plan, manifest)


def _manifest(folder: Path) -> Manifest:
    """The record so far; one that cannot be read is kept under another name, and a new one begun."""
    path = folder / "run.json"
    if path.exists() and not read_manifest(folder):
        kept = set_aside(path, "unreadable")
        print(  # noqa: T201
            f"warning: {path} is no JSON object and is kept as {kept.name}; what the run had seen before is lost",
            file=sys.stderr,
        )
    return Manifest(path)


def _note_earlier(checkpoint: str, start_epoch: int, manifest: Manifest) -> None:
    """Notes what the checkpoint of another run had seen."""
    source = Manifest(Path(checkpoint).parent.parent / "run.json")
    if source.content["segments"]:
        manifest.content["earlier"] = {"checkpoint": checkpoint, **source.seen_before(start_epoch)}


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
