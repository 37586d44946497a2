"""WordNet ids of ImageNet's classes and their names, from the lists that timm and OpenCLIP carry."""

import csv
import importlib.resources
import re
from collections import Counter
from functools import cache

from open_clip import IMAGENET_CLASSNAMES

WNID = re.compile(r"n\d{8}")
WINTER_2021_CLASSES = 19_167

# Subsets of ImageNet-1K's classes that are sets of their own: label-set name and timm's list of their wnids.
_SUBSETS = {"imagenet-a": "imagenet_a", "imagenet-r": "imagenet_r", "imagenet-mini": "mini_imagenet"}


@cache
def imagenet1k_wnids() -> tuple[str, ...]:
    """ImageNet-1K's 1,000 wnids by class index, which is their order as text."""
    return _lines("imagenet")


@cache
def imagenet1k_names() -> tuple[str, ...]:
    """OpenCLIP's name of each ImageNet-1K class by class index; 998 of the 1,000 are distinct."""
    return tuple(IMAGENET_CLASSNAMES)


@cache
def imagenet21k_wnids() -> tuple[str, ...]:
    """The 21,843 wnids of the ImageNet-21K that Google's models were trained on, in order."""
    return _lines("imagenet21k_goog")


@cache
def synset_names() -> dict[str, str]:
    """A name for each of the 21,844 wnids of ImageNet-21K and ImageNet-1K.

    It is the synset's first lemma; where several synsets share that one, it is all lemmas of each.
    """
    lines = _read("imagenet_synset_to_lemma.txt").splitlines()
    lemmas = dict(csv.reader(lines, delimiter="\t"))
    first = {wnid: entry.split(",")[0].strip() for wnid, entry in lemmas.items()}
    times = Counter(first.values())
    return {wnid: name if times[name] == 1 else lemmas[wnid] for wnid, name in first.items()}


def known_subset(wnids: frozenset[str]) -> str | None:
    """Return the name of the set whose classes are exactly `wnids`: imagenet-a, imagenet-r or imagenet-mini."""
    return next((name for name, file in _SUBSETS.items() if wnids == frozenset(_lines(file))), None)


def _lines(name: str) -> tuple[str, ...]:
    return tuple(_read(f"{name}_synsets.txt").split())


def _read(name: str) -> str:
    return (importlib.resources.files("timm.data") / "_info" / name).read_text(encoding="utf-8")
