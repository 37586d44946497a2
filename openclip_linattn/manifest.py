"""run.json: what a training run is, what it planned, what it has seen; written beside OpenCLIP's own files."""

import json
import platform
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from openclip_linattn.data.training.epoch_shape import Coverage, worker_batches
from openclip_linattn.errors import UserError
from openclip_linattn.files import write_json
from openclip_linattn.unique import Visit, unique_bound, unique_expected
from openclip_scaling.flops import clip_cost

PACKAGES = ("openclip-linattn", "open_clip_torch", "torch", "timm", "webdataset", "numpy", "transformers")
ENDINGS = ("signal", "error")  # what run.json says of a segment that ended early


@dataclass(frozen=True)
class Plan:
    """Samples and steps that a training command asks for, with OpenCLIP's rounding.

    Shards: every epoch is rounded up to whole batches per data-loader worker. Other data (`drop_last`): rounded down to
    whole batches of each process's share. With accumulation the tail is dropped.
    """

    samples_per_epoch: int
    batch_size: int
    world_size: int
    workers: int
    accum_freq: int
    epochs: int
    drop_last: bool = False

    @property
    def global_batch(self) -> int:
        """Samples of one optimiser step over all processes."""
        return self.batch_size * self.world_size * self.accum_freq

    @property
    def steps_per_epoch(self) -> int:
        """Optimiser steps of one epoch."""
        if self.drop_last:
            share = -(-self.samples_per_epoch // self.world_size)
            return share // self.batch_size // self.accum_freq
        batches = worker_batches(
            self.samples_per_epoch,
            batch_size=self.batch_size,
            world_size=self.world_size,
            workers=self.workers,
        )
        return batches * max(1, self.workers) // self.accum_freq

    def totals(self, epochs: int) -> dict[str, int]:
        """Epochs, steps and samples of a number of epochs."""
        steps = self.steps_per_epoch * epochs
        return {"epochs": epochs, "steps": steps, "samples": steps * self.global_batch}


class Manifest:
    """The file <logs>/<name>/run.json, rewritten atomically at every change."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content: dict[str, Any] = {"segments": [], **read_manifest(path.parent)}
        self._open: dict[str, Any] | None = None

    def start(
        self,
        plan: Plan | None,
        *,
        start_epoch: int,
        held: int | None = None,
        coverage: Coverage | None = None,
        **facts: Any,
    ) -> None:
        """Opens a segment: one process group's life, from start or resume to its end.

        `held` is the number of samples that the training set holds, where it is known, and `coverage` what an epoch
        sees of them. A segment that has no end was killed before it could write one.
        """
        for each in self.content["segments"]:
            if each["end"] is None:
                each["status"] = "killed"
        for key in ENDINGS:
            self.content.pop(key, None)
        self.content.update(facts)
        self.content["status"] = "running"
        segment: dict[str, Any] = {
            "start": _now(),
            "start_epoch": start_epoch,
            "end": None,
            "status": "running",
        }
        self._open = segment
        self.content["segments"].append(segment)
        if plan is not None:
            segment["planned"] = plan.totals(max(0, plan.epochs - start_epoch))
            self.content["batch_size"] = plan.global_batch
            self.content["planned"] = _plus(self.seen_before(start_epoch), segment["planned"])
            segment["dataset"] = {"pattern": facts.get("dataset", {}).get("pattern"), "samples": held}
            if coverage is not None:
                segment["dataset"].update(unique_per_epoch=coverage.unique, reach=coverage.reach)
            self._count_unique(plan.epochs, self.content["planned"]["samples"])
        self.write()

    def finish(self, status: str, plan: Plan | None, *, epochs_done: int, **why: str) -> None:
        """Closes the segment with what was truly seen: whole epochs, which are what OpenCLIP saves.

        `why` is the `signal` or the `error` that ended it early.
        """
        segment = self.content["segments"][-1]
        segment["end"] = _now()
        segment.update(status=status, **why)
        self.content.update(status=status, **why)
        if plan is not None:
            start_epoch = segment["start_epoch"]
            segment["seen"] = plan.totals(max(0, epochs_done - start_epoch))
            self.content["seen"] = _plus(self.seen_before(start_epoch), segment["seen"])
            self._count_unique(epochs_done, self.content["seen"]["samples"])
        self.write()

    def changes(self, plan: Plan, *, start_epoch: int) -> list[str]:
        """What a resumed run asks for otherwise than before, in sentences."""
        planned = [each for each in self.content["segments"] if each.get("planned", {}).get("epochs")]
        if not planned:
            return []
        before, sentences = planned[-1], []
        steps = before["planned"]["steps"] // before["planned"]["epochs"]
        size = before["planned"]["samples"] // max(1, before["planned"]["steps"])
        if (steps, size) != (plan.steps_per_epoch, plan.global_batch):
            sentences.append(
                f"an epoch had {steps:,} steps of {size:,} samples before and has {plan.steps_per_epoch:,} steps of "
                f"{plan.global_batch:,} from epoch {start_epoch} on; OpenCLIP counts the learning-rate schedule as if "
                "all epochs had the new length, and run.json counts the real samples"
            )
        epochs = before["start_epoch"] + before["planned"]["epochs"]
        if epochs != plan.epochs:
            sentences.append(
                f"the run was planned for {epochs} epochs and now for {plan.epochs}; the learning-rate schedule changes"
            )
        return sentences

    def seen_before(self, start_epoch: int) -> dict[str, int]:
        """Epochs, steps and samples that earlier segments saw up to `start_epoch`, where the next one takes over."""
        earlier = self.content.get("earlier", {})
        total = {key: int(earlier.get(key, 0)) for key in ("epochs", "steps", "samples")}
        for segment, epochs in self._counted(start_epoch):
            if segment is not self._open and epochs:
                seen = segment.get("seen") or segment["planned"]
                total = _plus(total, {key: seen[key] * epochs // seen["epochs"] for key in total})
        return total

    def _counted(self, until: int) -> Iterator[tuple[dict[str, Any], int]]:
        """The segments, the last first, with the epochs of each that count among those before `until`.

        A resumed run repeats no epoch, so of a segment only the epochs before the next start count.
        """
        for segment in reversed(self.content["segments"]):
            seen = segment.get("seen") or segment.get("planned") or {}
            yield segment, min(seen.get("epochs", 0), max(0, until - segment["start_epoch"]))
            until = min(until, segment["start_epoch"])

    def _count_unique(self, epochs: int, drawn: int) -> None:
        visits = [
            Visit(data["pattern"], data["samples"], count, data.get("unique_per_epoch"), data.get("reach"))
            for segment, count in self._counted(epochs)
            if (data := segment.get("dataset")) is not None
        ]
        earlier = int(self.content.get("earlier", {}).get("samples", 0))
        self.content["unique_samples_bound"] = unique_bound(visits, drawn, earlier)
        self.content["unique_samples_expected"] = None if earlier else unique_expected(visits)

    def write(self) -> None:
        """Writes the file, whole or not at all; raises UserError where it cannot."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.path, self.content)
        except OSError as error:
            raise UserError(
                f"{self.path} cannot be written ({error.strerror or error}): give --logs a folder that can be written, "
                "with room in it"
            ) from error


def read_manifest(folder: Path) -> dict[str, Any]:
    """The content of a run folder's run.json; empty where there is none or it is not readable as JSON."""
    try:
        content = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def model_facts(
    name: str, config: dict[str, Any], image_size: int | None = None, context_length: int | None = None
) -> dict[str, Any]:
    """Attention kinds, parameters per tower and forward GMAC per pair of a registered model."""
    if image_size is not None:
        config = {**config, "vision_cfg": {**config["vision_cfg"], "image_size": image_size}}
    if context_length is not None:
        config = {**config, "text_cfg": {**config["text_cfg"], "context_length": context_length}}
    cost = clip_cost(config)
    return {
        "model": name,
        "attention": cost.image_attention,
        "text_attention": cost.text_attention,
        "parameters": {
            "image": cost.image_parameters,
            "text": cost.text_parameters,
            "total": cost.parameters,
        },
        "gmac_per_pair": cost.gmac,
        "model_config": config,
    }


def machine_facts(argv: list[str]) -> dict[str, Any]:
    """Versions, git commit and command line of this process."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "versions": versions,
        "git_commit": _git_commit(),
        "command": shlex.join(["python", "-m", "openclip_linattn.train", *argv]),
    }


def _git_commit() -> str | None:
    """The commit of the checkout that the command runs in, marked when there are uncommitted changes."""
    try:
        result = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip() or None


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _plus(a: dict[str, int], b: dict[str, int]) -> dict[str, int]:
    return {key: a[key] + b[key] for key in a}
