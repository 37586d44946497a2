"""Class names, prompt templates, and how a sample of an evaluation set tells its class."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from string import Formatter
from typing import Any

from openclip_linattn.errors import UserError

CLASS_NAMES_FILE = "classnames.txt"
TEMPLATES_FILE = "zeroshot_classification_templates.txt"
LABEL_SETS_FILE = "label_sets.json"

_PLACEHOLDERS = ("", "c")  # `{}` is OpenCLIP's form, `{c}` is clip_benchmark's
_LABEL_SET_KEYS = {"classes", "templates", "fields"}


def as_format(template: str) -> str:
    """Return `template` with its `{c}` or `{}` written as `{0}`, ready for `.format(class_name)`.

    Doubled braces stay literal braces. Raises UserError for any other placeholder, for none, and for a
    lone brace.
    """
    try:
        pieces = list(Formatter().parse(template))
    except ValueError as error:
        raise UserError(
            f"{template!r} has a stray brace ({error}); write {{c}} or {{}} once closed"
        ) from error
    parts = []
    for literal, name, spec, conversion in pieces:
        parts.append(literal.replace("{", "{{").replace("}", "}}"))
        if name is None:
            continue
        if name not in _PLACEHOLDERS or spec or conversion:
            shown = name + (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "")
            raise UserError(
                f"{template!r} has the placeholder {{{shown}}}; only {{c}} and {{}} stand for the class name"
            )
        parts.append("{0}")
    if "{0}" not in parts:
        raise UserError(f"{template!r} has no placeholder; write {{c}} or {{}} where the class name goes")
    return "".join(parts)


@dataclass(frozen=True)
class LabelSet:
    """One way to label an evaluation set: C class names, T templates, and where a sample keeps its class.

    With `fields`, a sample's class name is the values of these fields of its json member joined by a blank;
    without, its class index is its `cls` member. Results are kept by class index, never by name, because
    names may repeat (ImageNet has two cranes); only `fields` needs distinct names. A name may be empty, as that of the
    middle distance in clip_benchmark's clevr_closest_object_distance; who reads files refuses that.
    Raises UserError for fewer than two classes, no template and a wrong template.
    """

    name: str
    classes: tuple[str, ...]
    templates: tuple[str, ...]
    fields: tuple[str, ...] = ()
    _index: Mapping[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        where = f"label set {self.name!r}"
        if len(self.classes) < 2:
            raise UserError(f"{where} has {len(self.classes)} class; zero-shot needs at least 2")
        if not self.templates:
            raise UserError(f"{where} has no template; give at least one, such as 'a photo of a {{c}}'")
        for position, template in enumerate(self.templates):
            _check_template(template, f"{where}: template {position}")
        if self.fields and self.duplicates:
            raise UserError(
                f"{where} repeats {_some(self.duplicates)}; its json fields tell a class by its name, "
                "so names must differ"
            )
        index = {} if not self.fields else {name: i for i, name in enumerate(self.classes)}
        object.__setattr__(self, "_index", index)

    @property
    def duplicates(self) -> list[str]:
        """Class names that occur more than once, in order."""
        return [name for name, times in Counter(self.classes).items() if times > 1]

    @property
    def formats(self) -> tuple[str, ...]:
        """The templates in the form that `open_clip.build_zero_shot_classifier` takes."""
        return tuple(as_format(template) for template in self.templates)

    def class_of(self, sample: Mapping[str, Any]) -> int:
        """Return the class index of a sample (suffix -> bytes); raises UserError that says what is wrong."""
        return self._by_fields(sample) if self.fields else self._by_cls(sample)

    def _by_cls(self, sample: Mapping[str, Any]) -> int:
        raw = _member(sample, "cls", self.name)
        try:
            label = int(raw)
        except ValueError as error:
            raise UserError(f"its cls member is {raw[:40]!r}, not a class index") from error
        if not 0 <= label < len(self.classes):
            count = len(self.classes)
            raise UserError(
                f"its label {label} is out of range: "
                f"label set {self.name!r} has {count} classes (0 to {count - 1})"
            )
        return label

    def _by_fields(self, sample: Mapping[str, Any]) -> int:
        raw = _member(sample, "json", self.name)
        try:
            values = json.loads(raw)
        except ValueError as error:
            raise UserError(f"its json member cannot be read ({error})") from error
        name = " ".join(_field_value(values, key, self.name) for key in self.fields)
        if name not in self._index:
            raise UserError(
                f"its class {name!r} is not among the {len(self.classes)} of label set {self.name!r}"
            )
        return self._index[name]


def read_lines(path: Path) -> list[str]:
    """Return the stripped lines of a text file; blank lines at its end are left out.

    Raises UserError for a file that is absent, empty or not UTF-8, and for a blank line in the middle,
    because there a line's number is its class index.
    """
    lines = [line.strip() for line in _read_text(path).split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    if not lines:
        raise UserError(f"{path} is empty; it needs one entry per line")
    if "" in lines:
        raise UserError(
            f"{path}: line {lines.index('') + 1} is blank; write its entry, or remove the line if there is none "
            "(entries are counted by line)"
        )
    return lines


def read_templates(path: Path) -> list[str]:
    """Return the templates of a file, one per line; raises UserError naming the line of a wrong one."""
    templates = read_lines(path)
    for number, template in enumerate(templates, start=1):
        _check_template(template, f"{path}: line {number}")
    return templates


def read_label_sets(path: Path) -> list[LabelSet]:
    """Return the label sets of a label_sets.json.

    It maps a name to {"classes": [...], "templates": [...], "fields": [...]}, each a list of strings;
    without "fields" the class index is the sample's cls member. Raises UserError naming file, set and key.
    """
    try:
        entries = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    if not isinstance(entries, dict) or not entries:
        raise UserError(f"{path} must hold an object from label-set name to its classes and templates")
    return [_label_set(path, name, entry) for name, entry in entries.items()]


def _label_set(path: Path, name: str, entry: object) -> LabelSet:
    if not isinstance(entry, dict):
        raise UserError(
            f"{path}: label set {name!r} must be an object with the keys {sorted(_LABEL_SET_KEYS)}"
        )
    unknown = sorted(set(entry) - _LABEL_SET_KEYS)
    if unknown:
        raise UserError(
            f"{path}: label set {name!r} has the unknown key {unknown[0]!r}; known: {sorted(_LABEL_SET_KEYS)}"
        )
    lists = {}
    for key in ("classes", "templates", "fields"):
        value = entry.get(key, [] if key == "fields" else None)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise UserError(f"{path}: label set {name!r}: {key!r} must be a list of strings")
        lists[key] = tuple(value)
    blank = next((number for number, each in enumerate(lists["classes"]) if not each.strip()), None)
    if blank is not None:
        raise UserError(f"{path}: label set {name!r}: the name of class {blank} is blank; write it")
    try:
        return LabelSet(name, lists["classes"], lists["templates"], lists["fields"])
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def _check_template(template: str, where: str) -> None:
    try:
        as_format(template)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); convert it"
        ) from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error


def _member(sample: Mapping[str, Any], suffix: str, label_set: str) -> bytes:
    raw = sample.get(suffix)
    if not isinstance(raw, bytes):
        seen = ", ".join(key for key in sample if not key.startswith("__")) or "none"
        raise UserError(
            f"it has no {suffix} member, which label set {label_set!r} reads (members seen: {seen})"
        )
    return raw


def _field_value(values: object, key: str, label_set: str) -> str:
    if not isinstance(values, dict) or key not in values:
        raise UserError(f"its json member has no field {key!r}, which label set {label_set!r} reads")
    value = values[key]
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise UserError(f"its json field {key!r} is {value!r}; a class name needs a string or a whole number")
    return str(value)


def _some(names: list[str], most: int = 3) -> str:
    return ", ".join(repr(name) for name in names[:most]) + (" and others" if len(names) > most else "")
