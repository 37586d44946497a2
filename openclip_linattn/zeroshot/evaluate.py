"""Zero-shot classification of evaluation sets with the checkpoints of training runs."""

import importlib.metadata
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress, TaskID

from openclip_linattn.epochs import recorded_epoch
from openclip_linattn.errors import UserError
from openclip_linattn.zeroshot.bars import progress_bars, watch_on
from openclip_linattn.zeroshot.checkpoints import Checkpoint, CheckpointError, find_checkpoints
from openclip_linattn.zeroshot.dataset import open_evaluation_set
from openclip_linattn.zeroshot.embedding_cache import EmbeddingCache
from openclip_linattn.zeroshot.embeddings import Classifiers
from openclip_linattn.zeroshot.labels import LabelSet
from openclip_linattn.zeroshot.models import check_model_name, choose_device, load_model
from openclip_linattn.zeroshot.options import EvaluationOptions
from openclip_linattn.zeroshot.rows import Row, inputs_digest, read_rows, row_key, save_rows, write_json
from openclip_linattn.zeroshot.score import score
from openclip_linattn.zeroshot.sets import EvaluationSet

__all__ = ["EvaluationError", "EvaluationOptions", "evaluate"]

logger = logging.getLogger(__name__)

_PACKAGES = ("openclip-linattn", "open_clip_torch", "torch", "timm", "numpy", "webdataset")


class EvaluationError(UserError):
    """Some checkpoints could not be evaluated; `rows` holds those of the others."""

    def __init__(self, message: str, rows: list[Row]) -> None:
        super().__init__(message)
        self.rows = rows


def evaluate(
    checkpoints: Sequence[str | Path],
    data: Sequence[str | Path],
    options: EvaluationOptions | None = None,
    *,
    output: Path | None = None,
    console: Console | None = None,
) -> list[Row]:
    """Return one row per checkpoint, data set and label set, in this order.

    `checkpoints` and `data` are as in `find_checkpoints` and `open_evaluation_set`. Rows are saved after
    each checkpoint to zeroshot.jsonl beside it, where it lies in a run folder, and all to `output` (JSON).
    Notices and progress go to `console`; None is silent. What can be checked is checked before the first
    model is built. Raises UserError for bad input, DataError for a sample that cannot be used, and, once
    the others are done, EvaluationError for checkpoints that do not load or give non-finite features.
    """
    options = options or EvaluationOptions()
    found = find_checkpoints(checkpoints, options.model)
    for checkpoint in found:
        check_model_name(checkpoint.model)
    _check_output(output)
    device = choose_device(options.device)
    with progress_bars(console) as progress:
        sets = _open_sets(data, options, progress)
        for each in sets:
            names = ", ".join(label_set.name for label_set in each.label_sets)
            _say(progress, f"{each.name}: {each.n} images in {each.place}; labels: {names}")
        total = sum(each.n for each in sets) * len(found)
        task = progress.add_task("evaluating", total=total)
        run = _Evaluation(options, device, progress, task)
        rows, failures = run.all(found, sets)
    if output is not None:
        write_json(output, rows)
    if failures:
        raise EvaluationError("\n".join(failures), rows)
    return rows


@dataclass(frozen=True)
class _Evaluation:
    options: EvaluationOptions
    device: torch.device
    progress: Progress
    task: TaskID

    def all(
        self, checkpoints: Sequence[Checkpoint], sets: Sequence[EvaluationSet]
    ) -> tuple[list[Row], list[str]]:
        """Return the rows, and a sentence for each checkpoint that failed."""
        attempts = [self._attempt(checkpoint, sets) for checkpoint in checkpoints]
        failures = [attempt for attempt in attempts if isinstance(attempt, str)]
        return [row for attempt in attempts if not isinstance(attempt, str) for row in attempt], failures

    def _attempt(self, checkpoint: Checkpoint, sets: Sequence[EvaluationSet]) -> list[Row] | str:
        try:
            return self._one(checkpoint, sets)
        except CheckpointError as error:
            path = str(checkpoint.path)
            return str(error) if path in str(error) else f"{path}: {error}"

    def _one(self, checkpoint: Checkpoint, sets: Sequence[EvaluationSet]) -> list[Row]:
        """Return the rows of one checkpoint; its model is built only if one of them is missing."""
        folder = checkpoint.results_folder
        headers = self._headers(checkpoint, sets)
        done = _valid_rows(headers, read_rows(folder) if folder and not self.options.again else {})
        fresh = self._missing(checkpoint, sets, headers, done)
        if fresh and folder and self.options.save:
            _save(folder, fresh)
        if done:
            _say(
                self.progress,
                f"{checkpoint.path}: {len(done)} row(s) were there already (--again evaluates anew)",
            )
        found = {row_key(row): row for row in [*done.values(), *fresh]}
        return [found[key] for key in headers]

    def _headers(
        self, checkpoint: Checkpoint, sets: Sequence[EvaluationSet]
    ) -> dict[tuple[str, str, str], Row]:
        model, epoch = check_model_name(checkpoint.model), recorded_epoch(checkpoint.path)
        headers = {}
        for data in sets:
            for label_set in data.label_sets:
                header: Row = {
                    "checkpoint": str(checkpoint.path),
                    "run": checkpoint.run.name if checkpoint.run else None,
                    "model": model,
                    "epoch": epoch,
                    "dataset": data.name,
                    "data": data.source,
                    "label_set": label_set.name,
                    "precision": self.options.precision,
                    "templates": len(label_set.templates),
                    **inputs_digest(checkpoint, data, label_set, self.options.precision),
                }
                headers[row_key(header)] = header
        return headers

    def _missing(
        self,
        checkpoint: Checkpoint,
        sets: Sequence[EvaluationSet],
        headers: Mapping[tuple[str, str, str], Row],
        done: Mapping[tuple[str, str, str], Row],
    ) -> list[Row]:
        classifiers: Classifiers | None = None
        rows: list[Row] = []
        for data in sets:
            keys = {(checkpoint.path.name, data.source, each.name): each for each in data.label_sets}
            missing = {key: each for key, each in keys.items() if key not in done}
            if not missing:
                self.progress.advance(self.task, data.n)
                continue
            self.progress.update(self.task, description=f"{checkpoint.path.name} on {data.name}")
            if classifiers is None:
                classifiers = self._classifiers(checkpoint)
            results = self._score(classifiers, data, list(missing.values()))
            extra = {"image_size": classifiers.loaded.image_size, "versions": _versions()}
            rows += [
                {**headers[key], **result, **extra} for key, result in zip(missing, results, strict=True)
            ]
        return rows

    def _classifiers(self, checkpoint: Checkpoint) -> Classifiers:
        loaded = load_model(checkpoint, device=self.device, precision=self.options.precision)
        cache = EmbeddingCache(checkpoint, precision=self.options.precision, device=self.device)
        watch = partial(watch_on, self.progress)
        return Classifiers(loaded, cache=None if self.options.again else cache, watch=watch)

    def _score(
        self, classifiers: Classifiers, data: EvaluationSet, label_sets: list[LabelSet]
    ) -> list[dict[str, Any]]:
        scored = score(
            classifiers,
            data,
            label_sets,
            batch_size=self.options.batch_size,
            workers=self.options.worker_count,
            advance=lambda size: self.progress.advance(self.task, size),
        )
        return [each.result for each in scored]


def _open_sets(
    data: Sequence[str | Path], options: EvaluationOptions, progress: Progress
) -> list[EvaluationSet]:
    if not data:
        raise UserError("no evaluation set was named; give a folder of class folders or of tars with --data")
    sets = {}
    for source in data:
        opened = open_evaluation_set(
            source,
            label_sets=options.label_sets,
            classes=options.classes,
            classnames=options.classnames,
            templates=options.templates,
            watch=partial(watch_on, progress),
        )
        sets[opened.source, opened.label_sets] = opened
    return list(sets.values())


def _check_output(output: Path | None) -> None:
    if output is not None and (output.is_dir() or not output.absolute().parent.is_dir()):
        raise UserError(f"{output} cannot be written: it is a folder, or the folder around it does not exist")


def _valid_rows(
    headers: Mapping[tuple[str, str, str], Row], kept: Mapping[tuple[str, str, str], Row]
) -> dict[tuple[str, str, str], Row]:
    """Return the kept rows that still hold, under the checkpoint's present path."""
    marks = ("checkpoint_size", "checkpoint_mtime_ns", "inputs")
    return {
        key: {**kept[key], **header}
        for key, header in headers.items()
        if key in kept and all(kept[key].get(mark) == header[mark] for mark in marks)
    }


def _save(folder: Path, rows: Sequence[Row]) -> None:
    try:
        save_rows(folder, rows)
    except OSError as error:
        logger.warning("the results were not saved in %s: %s", folder, error.strerror)


def _versions() -> dict[str, str]:
    return {package: version for package in _PACKAGES if (version := _version(package)) is not None}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # a checkout on the path, not installed
        return None


def _say(progress: Progress, text: str) -> None:
    progress.console.print(text, markup=False, highlight=False, soft_wrap=True)
