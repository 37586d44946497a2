"""The rows of one checkpoint: those that are there, and those that have to be found."""

import importlib.metadata
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from rich.progress import Progress, TaskID

from openclip_linattn.epochs import recorded_epoch
from openclip_linattn.errors import UserError
from openclip_linattn.zeroshot.bars import watch_on
from openclip_linattn.zeroshot.benchmarks.passthrough import BenchmarkError
from openclip_linattn.zeroshot.checkpoints import Checkpoint, CheckpointError
from openclip_linattn.zeroshot.encoders.embedding_cache import EmbeddingCache
from openclip_linattn.zeroshot.encoders.embeddings import Classifiers
from openclip_linattn.zeroshot.encoders.models import check_model_name, load_model
from openclip_linattn.zeroshot.options import EvaluationOptions
from openclip_linattn.zeroshot.processes import Processes
from openclip_linattn.zeroshot.results.answers import AnswerBook
from openclip_linattn.zeroshot.results.prediction_files import save_predictions
from openclip_linattn.zeroshot.results.rows import Row, RowKey, inputs_digest, read_rows, row_key, save_rows
from openclip_linattn.zeroshot.score import Scored
from openclip_linattn.zeroshot.sets.streaming import DataError
from openclip_linattn.zeroshot.tasks import Means, Question, Task

logger = logging.getLogger(__name__)

_PACKAGES = (
    "openclip-linattn", "open_clip_torch", "torch", "timm", "numpy", "webdataset", "clip-benchmark",
)  # fmt: skip
_MARKS = ("checkpoint_size", "checkpoint_mtime_ns", "inputs")  # a kept row holds while these are equal


@dataclass(frozen=True)
class Found:
    """The rows of a checkpoint in the order of the questions, and a sentence for whatever failed."""

    rows: list[Row]
    failures: list[str]


@dataclass(frozen=True)
class Evaluation:
    """What is asked of every checkpoint, and with what.

    `answers` hears what is found for every image. `broken` are the numbers of the tasks whose data turned out to be
    damaged, which would be read in vain for every other checkpoint.
    """

    options: EvaluationOptions
    tasks: Sequence[Task]
    device: torch.device
    processes: Processes
    progress: Progress
    bar: TaskID
    answers: AnswerBook
    broken: set[int] = field(default_factory=set)

    def checkpoint(self, checkpoint: Checkpoint) -> Found:
        """Return the rows of one checkpoint; its model is built only if one of them is missing.

        Rows that were found before a checkpoint turns out not to load, or diverged, are kept.
        """
        failures: list[str] = []
        try:
            headers = self.processes.by_first(lambda: self._headers(checkpoint))
        except CheckpointError as error:
            return Found([], [_named(error, checkpoint)])
        rows = self.processes.by_first(lambda: self._kept(checkpoint, headers))
        if rows:
            self.progress.console.print(
                f"{checkpoint.path}: {len(rows)} row(s) were there already (--again evaluates anew)",
                markup=False, highlight=False, soft_wrap=True,
            )  # fmt: skip
        try:
            self._find(checkpoint, headers, rows, failures)
        except CheckpointError as error:
            failures.append(_named(error, checkpoint))
        in_order = [row_key(header) for each in headers for header in each]
        return Found([rows[key] for key in in_order if key in rows], failures)

    def _headers(self, checkpoint: Checkpoint) -> list[list[Row]]:
        """Return, for each task, what the row of each question says before its answer is known."""
        common: Row = {
            "checkpoint": str(checkpoint.path),
            "run": checkpoint.run.name if checkpoint.run else None,
            "model": check_model_name(checkpoint.model),
            "epoch": recorded_epoch(checkpoint.path),
            "precision": self.options.precision,
        }
        if checkpoint.trained_image_size is not None:
            common["image_size"] = checkpoint.settings["force_image_size"]
            common["trained_image_size"] = checkpoint.trained_image_size

        def header(question: Question) -> Row:
            digest = inputs_digest(checkpoint, self.options.precision, question.stamp, question.definition)
            return {**common, **question.fields, **digest}

        return [[header(question) for question in task.questions] for task in self.tasks]

    def _kept(self, checkpoint: Checkpoint, headers: Sequence[Sequence[Row]]) -> dict[RowKey, Row]:
        """Return the rows that are kept and still hold, under the checkpoint's present path."""
        if checkpoint.results_folder is None:
            return {}
        # Read for --again too: a broken file is told now, not when the new rows are added to it.
        kept = read_rows(checkpoint.results_folder)
        if self.options.again:
            return {}
        found = {}
        for header in (header for each in headers for header in each):
            row = kept.get(row_key(header), {})
            if all(row.get(mark) == header[mark] for mark in _MARKS):
                found[row_key(header)] = {**row, **header}
        return found

    def _find(
        self,
        checkpoint: Checkpoint,
        headers: Sequence[Sequence[Row]],
        rows: dict[RowKey, Row],
        failures: list[str],
    ) -> None:
        """Add what is missing to `rows`, saved after each task, and to `failures` the tasks that fail alone."""
        classifiers: Classifiers | None = None
        for place, (task, asked) in enumerate(zip(self.tasks, headers, strict=True)):
            wanted = [number for number, header in enumerate(asked) if row_key(header) not in rows]
            if not wanted or place in self.broken:
                self.progress.advance(self.bar, task.steps)
                continue
            self.progress.update(self.bar, description=f"{checkpoint.path.name} on {task.title}")
            classifiers = classifiers or self._classifiers(checkpoint)
            try:
                answers = task.answer(self._means(classifiers), wanted)
            except BenchmarkError as error:
                failures.append(_named(error, checkpoint))
                continue
            except DataError as error:
                failures.append(f"{error}; {task.title} was left out")
                self.broken.add(place)
                continue
            extra: Row = {"image_size": classifiers.loaded.image_size, "versions": _versions()}
            fresh = [
                {**asked[number], **answer.result, **extra}
                for number, answer in zip(wanted, answers, strict=True)
            ]
            if checkpoint.results_folder and self.options.save and self.processes.first:
                _save(checkpoint.results_folder, fresh, answers)
            for row, answer in zip(fresh, answers, strict=True):
                rows[row_key(row)] = row
                if answer.predictions is not None:
                    self.answers.add(row, answer.predictions)

    def _classifiers(self, checkpoint: Checkpoint) -> Classifiers:
        """Load the checkpoint; where it fails in one process, it fails in all."""
        built: list[Classifiers] = []

        def build() -> None:
            loaded = load_model(checkpoint, device=self.device, precision=self.options.precision)
            cache = EmbeddingCache(checkpoint, precision=self.options.precision, device=self.device)
            watch = partial(watch_on, self.progress)
            built.append(Classifiers(loaded, cache=None if self.options.again else cache, watch=watch))

        self.processes.collect(build)
        return built[0]

    def _means(self, classifiers: Classifiers) -> Means:
        return Means(
            classifiers,
            self.options.batch_size,
            self.options.worker_count,
            self.processes,
            advance=lambda steps: self.progress.advance(self.bar, steps),
            watch=partial(watch_on, self.progress),
        )


def _named(error: UserError, checkpoint: Checkpoint) -> str:
    path = str(checkpoint.path)
    return str(error) if path in str(error) else f"{path}: {error}"


def _save(folder: Path, rows: Sequence[Row], answers: Sequence[Scored]) -> None:
    """Keep predictions and rows in `folder`, and note in the rows where the predictions are."""
    try:
        for row, answer in zip(rows, answers, strict=True):
            if answer.predictions is not None:
                row["predictions"] = save_predictions(folder, row, answer.predictions)
                row["asked"] = answer.predictions.digest
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
