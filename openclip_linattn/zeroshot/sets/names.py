"""Files of class names: one per line in the order of the classes, or `key<TAB>name` in any order."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from openclip_linattn.errors import UserError
from openclip_linattn.zeroshot.sets.labels import read_lines
from openclip_linattn.zeroshot.sets.wnids import imagenet1k_names


def read_class_names(
    path: Path, keys: Sequence[str], known: Sequence[str], chosen: Sequence[int]
) -> tuple[str, ...]:
    """Return the names of the classes `chosen` out of those with `keys` (their folders), whose usual names are `known`.

    A file of plain names has a line for every class or for every chosen one, in their order; a file of
    `key<TAB>name` lines may hold more than is needed. Raises UserError for another number of lines, for a
    class without a line, and for names in another order.
    """
    lines = read_lines(path)
    tabbed = sum("\t" in line for line in lines)
    if tabbed == len(lines):
        return _by_key(path, lines, [keys[index] for index in chosen])
    if tabbed:
        number = next(number for number, line in enumerate(lines, start=1) if "\t" not in line)
        raise UserError(f"{path}: line {number} has no tab, others have; write FOLDER<TAB>NAME on every line")
    if len(lines) == len(keys):
        _check_by_line(path, lines, keys, known)
        return tuple(lines[index] for index in chosen)
    if len(lines) != len(chosen):
        raise UserError(
            f"{path} has {len(lines)} names, but there are {len(keys)} classes; one line per class"
        )
    _check_by_line(path, lines, [keys[index] for index in chosen], [known[index] for index in chosen])
    return tuple(lines)


def check_order(path: Path, names: Sequence[str], known: Sequence[str]) -> None:
    """Raise UserError where `names`, read from `path`, are the names that are `known`, in another order."""
    given, usual = [_plain(name) for name in names], [_plain(name) for name in known]
    if given != usual and Counter(given) == Counter(usual):
        line = next(i for i, (a, b) in enumerate(zip(given, usual, strict=True)) if a != b)
        raise UserError(
            f"{path} holds the names of the classes in another order: line {line + 1} is {names[line]!r} where "
            f"class {line} is {known[line]!r}; put the names into the order of the class indices"
        )


def _check_by_line(path: Path, names: Sequence[str], keys: Sequence[str], known: Sequence[str]) -> None:
    """Raise UserError where the lines of a file cannot be in the order of the classes, or the order is unclear."""
    check_order(path, names, known)
    plain = [_plain(name) for name in names]
    if tuple(known) == imagenet1k_names() and plain == sorted(plain):
        raise UserError(
            f"{path} is in alphabetical order, but ImageNet's classes are in the order of their wnids "
            f"(class 0 is {known[0]!r}, class 1 {known[1]!r}); put the names into that order"
        )
    if all(key.isdecimal() for key in keys) and sorted(keys, key=int) != list(keys):
        raise UserError(
            f"{path} has one name per line, but the order of numbered folders from {keys[0]!r} on is not clear; "
            "write FOLDER<TAB>NAME on every line"
        )


def _by_key(path: Path, lines: Sequence[str], wanted: Sequence[str]) -> tuple[str, ...]:
    names: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        key, name = (part.strip() for part in line.split("\t", 1))
        if key in names:
            raise UserError(f"{path}: line {number} names {key!r} a second time; keep one line per class")
        names[key] = name
    missing = [key for key in wanted if key not in names]
    if missing:
        raise UserError(f"{path} has no line for {len(missing)} class(es), first {missing[0]!r}; add them")
    return tuple(names[key] for key in wanted)


def _plain(name: str) -> str:
    return name.strip().lower().replace("_", " ")
