"""Tells what the class folders of a set are: ImageNet-1K, ImageNet-V2, ImageNet-21K, or names of classes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from openclip_linattn.errors import UserError
from openclip_linattn.zeroshot.sets.wnids import (
    WINTER_2021_CLASSES,
    WNID,
    imagenet1k_names,
    imagenet1k_wnids,
    imagenet21k_wnids,
    synset_names,
)

KINDS = ("imagenet1k", "imagenetv2", "imagenet21k", "folder")


@dataclass(frozen=True)
class Layout:
    """All classes of a set by index: the folder and the usual name of each, and the class of each folder there.

    `closed` says that the classes are fixed, so that a class without a folder is an error unless one was
    told to go on; `templates` names the ones to use when none are given.
    """

    kind: str
    keys: tuple[str, ...]
    names: tuple[str, ...]
    class_of: tuple[int, ...]
    closed: bool
    templates: str


def find_layout(root: Path, folders: Sequence[str], kind: str | None = None) -> Layout:
    """Return the layout of the class folders `folders` of `root`, as `kind` says or as the names show.

    `folder` takes wnids for what they are, and any other folder for the name of its class. Raises UserError
    for folders that are not of the kind.
    """
    if kind is None or kind == "folder":
        kind = _guess(folders, versions=kind is None)
    makers: dict[str, Callable[[Path, Sequence[str]], Layout]] = {
        "imagenet1k": _imagenet1k,
        "imagenetv2": _imagenetv2,
        "imagenet21k": _imagenet21k,
        "folder": _plain_folders,
    }
    return makers[kind](root, folders)


def _guess(folders: Sequence[str], *, versions: bool) -> str:
    """Return the kind that most folders speak for; `versions` allows ImageNet-V2, whose folders are numbers."""
    if 2 * sum(name in _wnid_index() for name in folders) >= len(folders):
        return "imagenet1k"
    if 2 * sum(bool(WNID.fullmatch(name)) for name in folders) >= len(folders):
        return "imagenet21k"
    if versions and _are_numbers(folders) and sorted(map(int, folders)) == list(range(1000)):
        return "imagenetv2"
    return "folder"


def _imagenet1k(root: Path, folders: Sequence[str]) -> Layout:
    if _are_numbers(folders):
        raise UserError(
            f"{root} has numbered folders (first {folders[0]!r}), which is ImageNet-V2's layout; ImageNet-1K's "
            f"folders are wnids such as n01440764: give imagenetv2:{root} if that is what it is"
        )
    index = _wnid_index()
    extra = [name for name in folders if name not in index]
    if extra:
        larger = f"; as part of ImageNet-21K give imagenet21k:{root}" if extra[0] in synset_names() else ""
        raise UserError(
            f"{root}: {len(extra)} folder(s) are no class of ImageNet-1K, first {extra[0]!r}; "
            f"move them out of there{larger}"
        )
    class_of = tuple(index[name] for name in folders)
    return Layout("imagenet1k", imagenet1k_wnids(), imagenet1k_names(), class_of, True, "openai80")


def _imagenetv2(root: Path, folders: Sequence[str]) -> Layout:
    wnids = [name for name in folders if WNID.fullmatch(name)]
    if wnids:
        raise UserError(
            f"{root} has folders by wnid (first {wnids[0]}), which is ImageNet-1K's layout; ImageNet-V2's "
            f"folders are the numbers 0 to 999: give imagenet1k:{root} if that is what it is"
        )
    extra = [name for name in folders if not _are_numbers([name]) or int(name) > 999]
    if extra:
        raise UserError(
            f"{root}: folder {extra[0]!r} is no class of ImageNet-V2 (0 to 999); move it out of there"
        )
    class_of = tuple(int(name) for name in folders)
    if len(set(class_of)) < len(class_of):
        twice = next(number for number in class_of if class_of.count(number) > 1)
        raise UserError(f"{root} has two folders for class {twice}; keep one")
    keys = tuple(map(str, range(1000)))
    return Layout("imagenetv2", keys, imagenet1k_names(), class_of, True, "openai80")


def _imagenet21k(root: Path, folders: Sequence[str]) -> Layout:
    names = synset_names()
    unknown = [name for name in folders if name not in names]
    if unknown:
        raise UserError(
            f"{root}: {len(unknown)} folder(s) are no synset of ImageNet-21K, first {unknown[0]!r}; "
            "move them out of there"
        )
    # Of the release of 2021 no list is at hand, but all of its folders together are one.
    winter = len(folders) == WINTER_2021_CLASSES
    keys = tuple(folders) if winter else tuple(sorted({*imagenet21k_wnids(), *folders}))
    index = {wnid: number for number, wnid in enumerate(keys)}
    class_of = tuple(index[name] for name in folders)
    # With the 80 templates these are 1.7 million texts: more than a CPU encodes in a day.
    return Layout("imagenet21k", keys, tuple(names[wnid] for wnid in keys), class_of, False, "one")


def _plain_folders(root: Path, folders: Sequence[str]) -> Layout:
    odd = next((name for name in folders if not _is_text(name)), None)
    if odd is not None:
        raise UserError(
            f"{root}: the name of folder {odd!r} is not UTF-8; rename it, for it is its class's name"
        )
    keys = tuple(sorted(folders, key=int)) if _are_indices(folders) else tuple(folders)
    names = tuple(key.replace("_", " ") for key in keys)
    index = {key: number for number, key in enumerate(keys)}
    return Layout("folder", keys, names, tuple(index[name] for name in folders), False, "one")


@cache
def _wnid_index() -> dict[str, int]:
    return {wnid: index for index, wnid in enumerate(imagenet1k_wnids())}


def _is_text(name: str) -> bool:
    return name.encode(errors="ignore").decode() == name


def _are_numbers(folders: Sequence[str]) -> bool:
    return all(name.isascii() and name.isdecimal() for name in folders)


def _are_indices(folders: Sequence[str]) -> bool:
    return _are_numbers(folders) and sorted(map(int, folders)) == list(range(len(folders)))
