"""Opens what an evaluation was asked for: sets for classification and retrieval, a probe, sets of clip_benchmark."""

from collections.abc import Sequence
from pathlib import Path

from openclip_linattn.errors import UserError
from openclip_linattn.zeroshot.benchmarks.names import check_names
from openclip_linattn.zeroshot.benchmarks.sets import Benchmarks
from openclip_linattn.zeroshot.options import EvaluationOptions
from openclip_linattn.zeroshot.retrieval.caption_files import CAPTION_SUFFIXES
from openclip_linattn.zeroshot.retrieval.opening import open_retrieval_set
from openclip_linattn.zeroshot.sets.dataset import RETRIEVAL_KIND, open_evaluation_set
from openclip_linattn.zeroshot.sets.kinds import EvaluationSet
from openclip_linattn.zeroshot.tasks import (
    PROBE,
    Task,
    benchmark_task,
    classification_task,
    probe_task,
    retrieval_task,
)
from openclip_linattn.zeroshot.watching import Watch


def open_tasks(data: Sequence[str | Path], options: EvaluationOptions, watch: Watch) -> list[Task]:
    """Open all sets; raises UserError for one that is wrong, and for options that none of them takes."""
    if not data and not options.benchmarks:
        raise UserError(
            "no evaluation set was named; give a folder of class folders or of tars with --data, or a set of "
            "clip_benchmark with --benchmark"
        )
    places = {source: _retrieval_place(source) for source in map(str, data)}
    captioned = [place for place in places.values() if place is not None]
    _refuse_useless(options, [source for source, place in places.items() if place is None], captioned)
    tasks = []
    for source, place in places.items():
        if place is None:
            tasks.append(_labelled_task(source, options, watch))
        else:
            images = options.images if Path(place).is_file() else None
            tasks.append(retrieval_task(open_retrieval_set(place, images=images)))
    tasks += _benchmark_tasks(options)
    return list({_name(task): task for task in tasks}.values())


def _name(task: Task) -> tuple[str, ...]:
    """Two ways to write one set's path are one task."""
    fields = [each.fields for each in task.questions]
    return (str(fields[0]["data"]), *(str(each["label_set"]) for each in fields))


def _retrieval_place(source: str) -> str | None:
    """Return the path of a set for retrieval; None where `source` is none."""
    kind, colon, place = source.partition(":")
    if colon and kind == RETRIEVAL_KIND:
        if not place:
            raise UserError(f"the evaluation set {source!r} names no path; give {RETRIEVAL_KIND}:PATH")
        return place
    path = Path(source)
    if path.suffix.lower() in CAPTION_SUFFIXES and path.is_file():
        return source
    folder = path if path.is_dir() else path.parent
    other = folder / "test" if (folder / "test").is_dir() else folder.resolve().parent
    mark = next((mark for each in (folder, other) if (mark := each / "dataset_type.txt").is_file()), None)
    says = mark.read_text(encoding="utf-8", errors="replace").split() if mark else []
    return source if [word.lower() for word in says] == [RETRIEVAL_KIND] else None


def _refuse_useless(options: EvaluationOptions, labelled: Sequence[str], captioned: Sequence[str]) -> None:
    for_labels = {
        "--label-set": options.label_sets,
        "--classes": options.classes,
        "--classnames": options.classnames,
        "--templates": options.templates,
    }
    for name, value in for_labels.items():
        if value and not labelled:
            raise UserError(f"{name} is for classification, and no set of --data is one; leave it out")
    if options.images is not None and not any(Path(place).is_file() for place in captioned):
        raise UserError("--images goes with a captions file, and no --data is one; leave it out")
    if options.probe is None:
        return
    if captioned:
        raise UserError(f"--probe needs classes to test on, and {captioned[0]} is a set for retrieval")
    if len(options.label_sets) > 1:
        raise UserError(
            f"--probe takes one label set, and --label-set names {len(options.label_sets)}; name one"
        )
    if len(labelled) != 1:
        raise UserError(f"--probe is tested on one set, and --data names {len(labelled)}; name one")


def _labelled_task(source: str, options: EvaluationOptions, watch: Watch) -> Task:
    if options.probe is None:
        return classification_task(_open(source, options, watch))
    train, test = _open(str(options.probe), options, watch), _open(source, options, watch)
    name = PROBE if options.shots is None else f"{PROBE}-{options.shots}-shot"
    if options.label_sets:
        name = f"{train.label_sets[0].name}/{name}"
    return probe_task(train, test, name=name, shots=options.shots)


def _open(source: str, options: EvaluationOptions, watch: Watch) -> EvaluationSet:
    return open_evaluation_set(
        source,
        label_sets=options.label_sets,
        classes=options.classes,
        classnames=options.classnames,
        templates=options.templates,
        watch=watch,
    )


def _benchmark_tasks(options: EvaluationOptions) -> list[Task]:
    if not options.benchmarks:
        return []
    assert options.benchmark_root is not None  # checked with the options
    wanted = Benchmarks(
        options.benchmarks,
        options.benchmark_root,
        batch_size=options.batch_size,
        workers=options.worker_count,
    )
    check_names(wanted.names)
    return [benchmark_task(name, wanted) for name in wanted.names]
