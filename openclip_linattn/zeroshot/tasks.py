"""What can be asked of a checkpoint: a task answers one or more questions, and an answer becomes a row."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openclip_linattn.zeroshot.benchmarks.passthrough import data_state, run_benchmark
from openclip_linattn.zeroshot.benchmarks.sets import Benchmarks
from openclip_linattn.zeroshot.encoders.embeddings import Classifiers
from openclip_linattn.zeroshot.probe.scoring import score_probe
from openclip_linattn.zeroshot.processes import ALONE, Processes
from openclip_linattn.zeroshot.retrieval.opening import RetrievalSet
from openclip_linattn.zeroshot.retrieval.scoring import score_retrieval
from openclip_linattn.zeroshot.score import Scored, score
from openclip_linattn.zeroshot.sets.kinds import EvaluationSet
from openclip_linattn.zeroshot.watching import Advance, Watch, unwatched

# Label sets in rows without one of their own.
RETRIEVAL, BENCHMARK, PROBE = "retrieval", "clip_benchmark", "probe"


@dataclass(frozen=True)
class Question:
    """One row to be: `fields` stand in it, of which data and label_set name it within its checkpoint.

    `stamp` changes when the data does; `definition` is what the answer depends on besides data and checkpoint.
    """

    fields: Mapping[str, Any]
    stamp: object
    definition: object


@dataclass(frozen=True)
class Means:
    """A loaded model and how to read images for it; `advance` hears of the task's steps, `watch` of the rest."""

    classifiers: Classifiers
    batch_size: int
    workers: int
    processes: Processes = ALONE
    advance: Advance = lambda _: None
    watch: Watch = unwatched

    @property
    def reading(self) -> dict[str, Any]:
        """What every function takes that reads images."""
        return {"batch_size": self.batch_size, "workers": self.workers, "processes": self.processes}


@dataclass(frozen=True)
class Task:
    """`answer` gives the answers to the questions of the given numbers; it raises CheckpointError and UserError.

    `title` and `steps` (of its progress) are for a bar, `summary` tells the reader what is asked.
    """

    title: str
    steps: int
    summary: str
    questions: Sequence[Question]
    answer: Callable[[Means, Sequence[int]], list[Scored]]


def classification_task(data: EvaluationSet) -> Task:
    """Zero-shot classification, a question for every label set; rows have images_per_s, without the texts."""

    def answer(means: Means, wanted: Sequence[int]) -> list[Scored]:
        label_sets = [data.label_sets[number] for number in wanted]
        for label_set in label_sets:
            means.classifiers.get(label_set, means.processes)
        start = time.perf_counter()
        scored = score(means.classifiers, data, label_sets, advance=means.advance, **means.reading)
        rate = {"images_per_s": round(data.n / (time.perf_counter() - start), 1)}
        return [Scored({**each.result, **rate}, each.predictions) for each in scored]

    stamp = data.stamp()
    questions = [
        Question(
            {
                "dataset": data.name,
                "data": data.source,
                "label_set": label_set.name,
                "templates": len(label_set.templates),
            },
            stamp,
            (label_set.classes, label_set.templates, label_set.fields),
        )
        for label_set in data.label_sets
    ]
    names = ", ".join(label_set.name for label_set in data.label_sets)
    summary = f"{data.name}: {data.n} images in {data.place}; labels: {names}"
    return Task(data.name, data.n, summary, questions, answer)


def retrieval_task(data: RetrievalSet) -> Task:
    """Recall in both directions between images and captions."""

    def answer(means: Means, _wanted: Sequence[int]) -> list[Scored]:
        loaded = means.classifiers.loaded
        return [Scored(score_retrieval(loaded, data, advance=means.advance, **means.reading))]

    fields = {"dataset": data.name, "data": data.source, "label_set": RETRIEVAL}
    summary = f"{data.name}: {len(data.images)} images with {data.texts} captions; retrieval"
    return Task(data.name, data.steps, summary, [Question(fields, data.stamp(), RETRIEVAL)], answer)


def probe_task(train: EvaluationSet, test: EvaluationSet, *, name: str, shots: int | None) -> Task:
    """A linear probe trained on one set and tested on the other; `name` stands for the label set."""

    def answer(means: Means, _wanted: Sequence[int]) -> list[Scored]:
        loaded = means.classifiers.loaded
        scored = score_probe(loaded, train, test, shots=shots, watch=means.watch, **means.reading)
        means.advance(test.n)
        return [scored]

    fields = {"dataset": test.name, "data": test.source, "label_set": name}
    fields |= {"train_dataset": train.name, "train_data": train.source}
    labels = [each.label_sets[0].classes for each in (train, test)]
    question = Question(fields, [train.stamp(), test.stamp()], [PROBE, train.source, shots, labels])
    summary = f"{test.name}: {test.n} images for a linear probe trained on {train.n} of {train.source}"
    return Task(test.name, test.n, summary, [question], answer)


def benchmark_task(name: str, wanted: Benchmarks) -> Task:
    """A set of clip_benchmark."""

    def answer(means: Means, _wanted: Sequence[int]) -> list[Scored]:
        result = run_benchmark(means.classifiers, name, wanted, processes=means.processes, watch=means.watch)
        means.advance(1)
        return [Scored(result)]

    root = wanted.folder(name)
    place = root if "://" in root else str(Path(root).resolve())
    fields = {"dataset": name, "data": f"{name}@{place}", "label_set": BENCHMARK, "split": wanted.split}
    question = Question(fields, data_state(root, wanted.split), [BENCHMARK, wanted.language])
    return Task(name, 1, f"{name}: from {root}, by clip_benchmark", [question], answer)
