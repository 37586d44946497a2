"""Opens an evaluation set of tars (webdataset)."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from openclip_linattn.errors import UserError
from openclip_linattn.zeroshot.sets.kinds import ShardSet
from openclip_linattn.zeroshot.sets.labels import (
    CLASS_NAMES_FILE,
    LABEL_SETS_FILE,
    TEMPLATES_FILE,
    LabelSet,
    read_label_sets,
    read_lines,
)
from openclip_linattn.zeroshot.sets.names import check_order, read_class_names
from openclip_linattn.zeroshot.sets.shards import check_shard_count, count_samples, find_shards
from openclip_linattn.zeroshot.sets.templates import find_templates
from openclip_linattn.zeroshot.sets.wnids import imagenet1k_names, imagenet1k_wnids
from openclip_linattn.zeroshot.watching import Watch, unwatched

IMAGENET_KINDS = ("imagenet1k", "imagenetv2")  # the same 1,000 classes, the cls member being their index


def open_shard_set(
    source: str,
    *,
    kind: str | None = None,
    classnames: Path | None = None,
    templates: str | Path | None = None,
    watch: Watch = unwatched,
) -> ShardSet:
    """Open `source`: a folder in clip_benchmark's layout, a folder of tars, or a brace pattern of tars.

    Without a kind label sets come from `classnames` (with the cls member), else from label_sets.json, else
    from classnames.txt; with one of IMAGENET_KINDS the classes are ImageNet's. `templates` replaces those of
    them all. Only the headers of the tars are read. Raises UserError for a source, a shard count, a label
    set or a file of names that is wrong, and for a set without images.
    """
    where, shards = find_shards(source)
    home = _home(shards[0].parent)
    _refuse_other_tasks(home)
    if where.is_dir():
        check_shard_count(shards)
    if kind is None:
        label_sets = _label_sets(home, classnames, templates)
    else:
        label_sets = [_imagenet(kind, home, classnames, templates)]
    n = 0
    with watch(f"counting {_name(where, home)}", len(shards)) as advance:
        for shard in shards:
            n += count_samples(shard)
            advance(1)
    if n == 0:
        raise UserError(f"{source} holds no sample: its {len(shards)} tar(s) are empty")
    return ShardSet(_name(where, home), str(where), n, tuple(label_sets), shards=tuple(shards))


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
        raise UserError(
            f"{path} says {kind!r}: only sets for classification and retrieval can be evaluated here"
        )


def _imagenet(kind: str, home: Path, classnames: Path | None, templates: str | Path | None) -> LabelSet:
    """Return ImageNet's classes; names that lie beside the tars must be in the order of its indices too."""
    keys = imagenet1k_wnids() if kind == "imagenet1k" else tuple(map(str, range(1000)))
    names, name = imagenet1k_names(), kind
    own = home / CLASS_NAMES_FILE
    file = classnames or (own if own.is_file() else None)
    if file is not None:
        given = read_class_names(file, keys, names, range(len(keys)))
        names, name = (given, file.stem) if classnames else (names, kind)
    return LabelSet(name, names, find_templates(templates or "openai80"))


def _label_sets(home: Path, classnames: Path | None, templates: str | Path | None) -> list[LabelSet]:
    if classnames is None and (home / LABEL_SETS_FILE).is_file():
        found = read_label_sets(home / LABEL_SETS_FILE)
        if templates is None:
            return found
        prompts = find_templates(templates)
        return [replace(each, templates=prompts) for each in found]
    names = classnames or home / CLASS_NAMES_FILE
    if not names.is_file():
        raise UserError(
            f"no class names: {home} has neither {LABEL_SETS_FILE} nor {CLASS_NAMES_FILE}"
            if classnames is None
            else f"{names} does not exist; --classnames needs a text file with one class name per line"
        )
    own = home / TEMPLATES_FILE
    if templates is None and not own.is_file():
        raise UserError(
            f"no templates: {own} does not exist; write one per line there, such as 'a photo of a {{c}}', "
            "or name them with --templates"
        )
    return [_from_files(names, find_templates(templates or own))]


def _from_files(names: Path, prompts: Sequence[str]) -> LabelSet:
    lines = read_lines(names)
    tabbed = next((number for number, line in enumerate(lines, start=1) if "\t" in line), None)
    if tabbed is not None:
        raise UserError(
            f"{names}: line {tabbed} has a tab, but the samples of tars hold class indices and no folders; "
            "write one name per line, in the order of the indices"
        )
    check_order(names, lines, imagenet1k_names())
    try:
        return LabelSet(names.stem, tuple(lines), tuple(prompts))
    except UserError as error:  # templates were checked: what is wrong is the list of names
        raise UserError(f"{names}: {error}") from error
