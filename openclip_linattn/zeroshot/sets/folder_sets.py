"""Opens an evaluation set of class folders."""

from dataclasses import dataclass
from pathlib import Path

from openclip_linattn.errors import UserError
from openclip_linattn.zeroshot.sets.folders import SPLITS, ClassFolders, list_class_folders, scan
from openclip_linattn.zeroshot.sets.kinds import FolderSet
from openclip_linattn.zeroshot.sets.labels import CLASS_NAMES_FILE, TEMPLATES_FILE, LabelSet
from openclip_linattn.zeroshot.sets.layouts import Layout, find_layout
from openclip_linattn.zeroshot.sets.names import read_class_names
from openclip_linattn.zeroshot.sets.templates import find_templates
from openclip_linattn.zeroshot.sets.wnids import known_subset
from openclip_linattn.zeroshot.watching import Watch, unwatched


@dataclass(frozen=True)
class _Choice:
    """A label set to make: its name and the classes in it, by index in the layout."""

    name: str
    classes: tuple[int, ...]


def open_folder_set(
    root: Path,
    *,
    kind: str | None = None,
    classes: str | None = None,
    classnames: Path | None = None,
    templates: str | Path | None = None,
    watch: Watch = unwatched,
) -> FolderSet:
    """Open the folder `root` of class folders as `kind` (one of `layouts.KINDS`; None: as its folders show).

    `classes` "all" evaluates over every class of the layout, "present" over those with images. Without it
    ImageNet-1K and V2 must be complete, except for the classes of ImageNet-A, R and Mini; ImageNet-21K is
    evaluated both ways; other folders are the classes. `classnames` and `templates` replace the usual ones.
    Raises UserError for folders, names or templates that do not fit.
    """
    found = list_class_folders(root)
    layout = find_layout(root, found, kind)
    names_file = classnames or _own_file(root, layout, CLASS_NAMES_FILE)
    if names_file is None and layout.kind == "folder":
        _refuse_numbers_as_names(root, layout)
    prompts = find_templates(templates or _own_file(root, layout, TEMPLATES_FILE) or layout.templates)
    folders = scan(root, found, watch)
    _refuse_empty(folders, classes)
    label_sets, columns = [], []
    for choice in _choices(folders, layout, classes):
        if names_file is None:
            names = tuple(layout.names[index] for index in choice.classes)
        else:
            names = read_class_names(names_file, layout.keys, layout.names, choice.classes)
        label_sets.append(LabelSet(_label_set_name(choice, layout, names_file), names, prompts))
        rank = {index: position for position, index in enumerate(choice.classes)}
        columns.append(tuple(rank.get(index, -1) for index in layout.class_of))
    return FolderSet(
        _name(root), str(root), len(folders.files), tuple(label_sets), folders=folders, columns=tuple(columns)
    )


def _own_file(root: Path, layout: Layout, name: str) -> Path | None:
    """Return the file of names or templates in `root`, which counts where the layout brings no names."""
    path = root / name
    return path if layout.kind == "folder" and path.is_file() else None


def _refuse_numbers_as_names(root: Path, layout: Layout) -> None:
    numbers = [key for key in layout.keys if key.isdecimal()]
    if len(numbers) == len(layout.keys) > 10:
        raise UserError(
            f"{root} has {len(numbers)} numbered folders, which name no class; give --classnames FILE with "
            f"the name of each, or imagenetv2:{root} if the numbers are ImageNet's class indices"
        )


def _refuse_empty(folders: ClassFolders, classes: str | None) -> None:
    if folders.empty and classes != "present":
        raise UserError(
            f"{folders.root}: {len(folders.empty)} class folder(s) hold no image, first {folders.empty[0]!r}; "
            "complete them, or leave their classes out with --classes present"
        )


def _choices(folders: ClassFolders, layout: Layout, classes: str | None) -> list[_Choice]:
    held = {index for index, count in zip(layout.class_of, folders.counts, strict=True) if count}
    everything = _Choice(layout.kind, tuple(range(len(layout.keys))))
    present = _Choice(f"{layout.kind}-present", tuple(sorted(held)))
    if len(held) == len(layout.keys) or classes == "all":
        return [everything]
    subset = known_subset(frozenset(layout.keys[index] for index in held))
    if layout.closed and subset:
        present = _Choice(subset, present.classes)
    if classes == "present" or (layout.closed and subset):
        return [present]
    if layout.closed:
        raise UserError(_incomplete(folders.root, layout, held))
    return [everything, present]


def _incomplete(root: Path, layout: Layout, held: set[int]) -> str:
    missing = next(key for index, key in enumerate(layout.keys) if index not in held)
    return (
        f"{root} holds {len(held)} of the {len(layout.keys)} class folders, first missing {missing!r}; complete "
        "the set, or say over which classes it is to be evaluated with --classes all or --classes present"
    )


def _label_set_name(choice: _Choice, layout: Layout, names_file: Path | None) -> str:
    """A file of names gives the label set its name; what the classes are stays readable in it."""
    if names_file is None:
        return choice.name
    part = choice.name.removeprefix(layout.kind)
    return names_file.stem + (f"-{part}" if part == choice.name else part)


def _name(root: Path) -> str:
    """Return the folder's name; a split of a set that stands alone there has the set's name."""
    return root.parent.name if root.name in SPLITS and root.parent.name else root.name
