"""Opens evaluation sets: class folders or tars, by what is there or by a kind that is named."""

import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from openclip_linattn.errors import UserError
from openclip_linattn.zeroshot.sets.folder_sets import open_folder_set
from openclip_linattn.zeroshot.sets.kinds import EvaluationSet, FolderSet
from openclip_linattn.zeroshot.sets.layouts import KINDS
from openclip_linattn.zeroshot.sets.shard_sets import IMAGENET_KINDS, open_shard_set
from openclip_linattn.zeroshot.watching import Watch, unwatched

logger = logging.getLogger(__name__)

CLASS_CHOICES = ("all", "present")
RETRIEVAL_KIND = "retrieval"  # of sets that `retrieval_sets` opens


def open_evaluation_set(
    source: str | Path,
    *,
    label_sets: Sequence[str] = (),
    classes: str | None = None,
    classnames: Path | None = None,
    templates: str | Path | None = None,
    watch: Watch = unwatched,
) -> EvaluationSet:
    """Open `source`: PATH or KIND:PATH, PATH being a folder of class folders, or a folder or pattern of tars.

    A kind is one of `layouts.KINDS`; without one a folder of tars is a webdataset, and class folders are
    what their names show. `classes`, `classnames`, `templates` are as in `open_folder_set` and
    `open_shard_set`; `label_sets` keeps those of these names. `watch` shows what takes long. Raises
    UserError for whatever does not fit, with what to do.
    """
    kind, place = _split_kind(str(source))
    if not place:
        raise UserError(f"the evaluation set {str(source)!r} names no path; give [KIND:]PATH")
    if _has_tars(place):
        opened = _open_shards(place, kind, classes, classnames, templates, watch)
    else:
        opened = open_folder_set(
            Path(place).resolve(),
            kind=kind,
            classes=classes,
            classnames=classnames,
            templates=templates,
            watch=watch,
        )
    chosen = _select(opened, label_sets)
    _report_repeated_names(chosen)
    return chosen


def _split_kind(source: str) -> tuple[str | None, str]:
    kind, colon, place = source.partition(":")
    if colon and kind in KINDS:
        return kind, place
    if (
        colon
        and re.fullmatch(r"[a-z0-9_-]{3,}", kind)
        and kind != "pipe"
        and not place.startswith(("//", ":"))
        and not Path(source).exists()
    ):
        raise UserError(
            f"{source!r}: there is no kind {kind!r}; known are {', '.join((*KINDS, RETRIEVAL_KIND))}"
        )
    return None, source


def _has_tars(place: str) -> bool:
    path = Path(place)
    if not path.is_dir():
        return True  # a tar or a pattern, or nothing, which is said there
    return any(next(folder.glob("*.tar"), None) is not None for folder in (path, path / "test"))


def _open_shards(
    place: str,
    kind: str | None,
    classes: str | None,
    classnames: Path | None,
    templates: str | Path | None,
    watch: Watch,
) -> EvaluationSet:
    if kind is not None and kind not in IMAGENET_KINDS:
        raise UserError(
            f"{kind}:{place} names no folder of class folders; for tars leave {kind}: out and lay "
            "classnames.txt beside them"
        )
    if classes == "present":
        raise UserError(
            f"{place} is a webdataset, whose classes are those of its label sets; leave --classes out"
        )
    return open_shard_set(place, kind=kind, classnames=classnames, templates=templates, watch=watch)


def _select(opened: EvaluationSet, wanted: Sequence[str]) -> EvaluationSet:
    names = [each.name for each in opened.label_sets]
    for name in wanted:
        if name not in names:
            raise UserError(
                f"{opened.source} has no label set {name!r}; it has {', '.join(map(repr, names))}"
            )
    if not wanted:
        return opened
    kept = [number for number, name in enumerate(names) if name in wanted]
    label_sets = tuple(opened.label_sets[number] for number in kept)
    if isinstance(opened, FolderSet):
        return replace(
            opened, label_sets=label_sets, columns=tuple(opened.columns[number] for number in kept)
        )
    return replace(opened, label_sets=label_sets)


def _report_repeated_names(opened: EvaluationSet) -> None:
    reported: set[str] = set()
    for label_set in opened.label_sets:
        repeated = [name for name in label_set.duplicates if name not in reported]
        reported.update(repeated)
        if repeated:
            more = f" and {len(repeated) - 5} more" if len(repeated) > 5 else ""
            logger.warning(
                "label set %r of %s repeats class names (%s%s); they count as separate classes",
                label_set.name, opened.source, ", ".join(repeated[:5]), more,
            )  # fmt: skip
