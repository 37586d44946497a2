"""Finds the shards and the label sets of a webdataset evaluation set, and counts its images."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from openclip_linattn.errors import UserError
from openclip_linattn.zeroshot.labels import (
    CLASS_NAMES_FILE,
    LABEL_SETS_FILE,
    TEMPLATES_FILE,
    LabelSet,
    read_label_sets,
    read_lines,
    read_templates,
)
from openclip_linattn.zeroshot.shards import check_shard_count, count_samples, find_shards

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EvaluationSet:
    """An evaluation set whose shards were counted: `n` samples, each labelled by every label set.

    `name` is the folder's own name (for tables), `source` the full path or pattern (unique).
    """

    name: str
    source: str
    shards: tuple[Path, ...]
    n: int
    label_sets: tuple[LabelSet, ...]


def open_evaluation_set(
    source: str | Path,
    *,
    label_sets: Sequence[str] = (),
    classnames: Path | None = None,
    templates: Path | None = None,
) -> EvaluationSet:
    """Open `source`: a folder in clip_benchmark's layout, a folder of tars, or a brace pattern of tars.

    Label sets come from `classnames` (with the cls member), else from label_sets.json, else from
    classnames.txt; `templates` replaces the templates of them all; `label_sets` keeps those of these names.
    Only the headers of the tars are read. Raises UserError for a source, a shard count, a label set or a
    file of names that is wrong, and for a set without images.
    """
    where, shards = find_shards(str(source))
    home = _home(shards[0].parent)
    _refuse_other_tasks(home)
    if where.is_dir():
        check_shard_count(shards)
    chosen = _select(_label_sets(home, classnames, templates), label_sets, source)
    for label_set in chosen:
        if label_set.duplicates:
            logger.warning(
                "label set %r of %s repeats class names (%s); they count as separate classes",
                label_set.name, home, ", ".join(label_set.duplicates[:5]),
            )  # fmt: skip
    n = sum(count_samples(shard) for shard in shards)
    if n == 0:
        raise UserError(f"{source} holds no sample: its {len(shards)} tar(s) are empty")
    return EvaluationSet(_name(where, home), str(where), tuple(shards), n, tuple(chosen))


def _home(folder: Path) -> Path:
    """Return the folder that holds the class names: that of the tars, else the one above it."""
    marks = (LABEL_SETS_FILE, CLASS_NAMES_FILE, TEMPLATES_FILE, "dataset_type.txt")
    for candidate in (folder, folder.parent):
        if any((candidate / mark).is_file() for mark in marks):
            return candidate
    return folder.parent if folder.name == "test" else folder


def _name(where: Path, home: Path) -> str:
    inside = where.relative_to(home).as_posix() if where.is_relative_to(home) else where.name
    return home.name if inside in (".", "test") else f"{home.name}/{inside}"


def _refuse_other_tasks(home: Path) -> None:
    path = home / "dataset_type.txt"
    if path.is_file() and (kind := " ".join(read_lines(path)).lower()) != "classification":
        raise UserError(f"{path} says {kind!r}: only classification sets can be evaluated zero-shot here")


def _label_sets(home: Path, classnames: Path | None, templates: Path | None) -> list[LabelSet]:
    if classnames is None and (home / LABEL_SETS_FILE).is_file():
        found = read_label_sets(home / LABEL_SETS_FILE)
        if templates is None:
            return found
        replaced = tuple(read_templates(templates))
        return [LabelSet(each.name, each.classes, replaced, each.fields) for each in found]
    names = classnames or home / CLASS_NAMES_FILE
    if not names.is_file():
        raise UserError(
            f"no class names: {home} has neither {LABEL_SETS_FILE} nor {CLASS_NAMES_FILE}"
            if classnames is None
            else f"{names} does not exist; --classnames needs a text file with one class name per line"
        )
    prompts = templates or home / TEMPLATES_FILE
    if not prompts.is_file():
        raise UserError(
            f"no templates: {prompts} does not exist; write one per line there, such as 'a photo of a {{c}}'"
        )
    return [_from_files(names, prompts)]


def _from_files(names: Path, prompts: Path) -> LabelSet:
    try:
        return LabelSet(names.stem, tuple(read_lines(names)), tuple(read_templates(prompts)))
    except UserError as error:
        if str(error).startswith("label set"):  # what is wrong there is the list of names
            raise UserError(f"{names}: {error}") from error
        raise


def _select(found: list[LabelSet], wanted: Sequence[str], source: str | Path) -> list[LabelSet]:
    known = {each.name: each for each in found}
    for name in wanted:
        if name not in known:
            raise UserError(f"{source} has no label set {name!r}; it has {', '.join(map(repr, known))}")
    return [each for each in found if not wanted or each.name in wanted]
