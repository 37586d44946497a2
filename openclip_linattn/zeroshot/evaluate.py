"""Evaluates the checkpoints of training runs: zero-shot, retrieval, linear probe, and clip_benchmark's sets."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console

from openclip_linattn.errors import UserError
from openclip_linattn.zeroshot.bars import progress_bars, watch_on
from openclip_linattn.zeroshot.checkpoint_rows import Evaluation
from openclip_linattn.zeroshot.checkpoints import Checkpoint, find_checkpoints
from openclip_linattn.zeroshot.encoders.models import check_model_name, choose_device
from openclip_linattn.zeroshot.opening import open_tasks
from openclip_linattn.zeroshot.options import EvaluationOptions
from openclip_linattn.zeroshot.processes import Processes, joined
from openclip_linattn.zeroshot.resolutions import at_sizes
from openclip_linattn.zeroshot.results.answers import AnswerBook
from openclip_linattn.zeroshot.results.rows import Row, check_writable, write_json

__all__ = ["EvaluationError", "EvaluationOptions", "evaluate"]


class EvaluationError(UserError):
    """Some checkpoints or sets could not be evaluated; `rows` holds those of the others."""

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
    answers: AnswerBook | None = None,
) -> list[Row]:
    """Return one row per checkpoint, image size, data set and label set, in this order.

    `checkpoints` are as in `find_checkpoints`; `data` are sets as in `open_evaluation_set` and
    `open_retrieval_set`, known by what is there or by the kind `retrieval:`. Rows are saved after each set to
    zeroshot.jsonl beside their checkpoint, where it lies in a run folder, with the predictions; and all to `output`
    (JSON). `answers` hears what was found for every image. Notices and progress go to `console`; None is silent.
    Under torchrun the images are dealt to the processes, all of them return the rows, and the first alone writes and
    speaks. What can be checked is checked before the first model is built. Raises UserError for bad input, and, once
    the others are done, EvaluationError for checkpoints that do not load or give non-finite features, for sets with a
    sample that cannot be used, for sets of clip_benchmark that fail, and for an `output` that cannot be written.
    """
    options = options or EvaluationOptions()
    found = find_checkpoints(checkpoints, options.model)
    for checkpoint in found:
        check_model_name(checkpoint.model)
    if output is not None:
        check_writable(output)
    sized = [each for checkpoint in found for each in at_sizes(checkpoint, options.image_sizes)]
    with joined() as processes:
        rows, failures = _evaluate(
            sized, data, options, processes, console if processes.first else None, answers or AnswerBook()
        )
        if output is not None and processes.first:
            try:
                write_json(output, rows)
            except UserError as error:
                failures.append(str(error))
    if failures:
        raise EvaluationError("\n".join(failures), rows)
    return rows


def _evaluate(
    checkpoints: Sequence[Checkpoint],
    data: Sequence[str | Path],
    options: EvaluationOptions,
    processes: Processes,
    console: Console | None,
    answers: AnswerBook,
) -> tuple[list[Row], list[str]]:
    """Return the rows, and a sentence for whatever failed."""
    device = processes.device(choose_device(options.device))
    # A machine of fewer cores would divide a stream otherwise, and the shares would not make a whole.
    options = replace(options, workers=processes.by_first(lambda: options.worker_count))
    with progress_bars(console) as progress:
        tasks = open_tasks(data, options, partial(watch_on, progress))
        for each in tasks:
            progress.console.print(each.summary, markup=False, highlight=False, soft_wrap=True)
        bar = progress.add_task("evaluating", total=sum(each.steps for each in tasks) * len(checkpoints))
        run = Evaluation(options, tasks, device, processes, progress, bar, answers)
        results = [run.checkpoint(checkpoint) for checkpoint in checkpoints]
    rows = [row for result in results for row in result.rows]
    return rows, [failure for result in results for failure in result.failures]
