import json
from pathlib import Path

import pytest

from openclip_linattn.errors import UserError
from openclip_linattn.zeroshot.sets.labels import (
    LabelSet,
    as_format,
    read_label_sets,
    read_lines,
    read_templates,
)

TEMPLATE = ("a {c}",)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("a photo of a {c}.", "a photo of a cat."),
        ("a photo of a {}.", "a photo of a cat."),
        ("{c} beside {}", "cat beside cat"),
        ("{{c}} is {c}", "{c} is cat"),
        ("100% {} %s", "100% cat %s"),
    ],
)
def test_both_placeholders_are_filled(template: str, text: str) -> None:
    assert as_format(template).format("cat") == text


def test_braces_in_a_class_name_stay() -> None:
    assert as_format("a {c}").format("{x} cat") == "a {x} cat"


@pytest.mark.parametrize(
    ("template", "named"),
    [
        ("a {d}", "{d}"),
        ("a {0}", "{0}"),
        ("a {c!r}", "{c!r}"),
        ("a {c:>9}", "{c:>9}"),
        ("a {c.upper}", "{c.upper}"),
        ("a { c }", "{ c }"),
        ("a cat", "no placeholder"),
        ("a {c", "stray brace"),
        ("a c}", "stray brace"),
    ],
)
def test_a_wrong_template_is_named_with_its_line(tmp_path: Path, template: str, named: str) -> None:
    path = tmp_path / "templates.txt"
    path.write_text(f"a {{c}}\nthe {{}}\n{template}\n")
    with pytest.raises(UserError) as caught:
        read_templates(path)
    assert f"{path}: line 3" in str(caught.value)
    assert named in str(caught.value)


def test_templates_are_kept_as_written(tmp_path: Path) -> None:
    path = tmp_path / "templates.txt"
    path.write_bytes("﻿a {c}\r\n  the {} \r\n\r\n".encode())
    assert read_templates(path) == ["a {c}", "the {}"]


def test_a_blank_line_between_names_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "classnames.txt"
    path.write_text("cat\n \ndog\n")
    with pytest.raises(UserError, match="line 2 is blank"):
        read_lines(path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"", "is empty"), (b"\n\n", "is empty"), (b"caf\xe9\n", "not UTF-8"), (None, "cannot be read")],
    ids=["empty", "blank", "latin-1", "absent"],
)
def test_an_unreadable_names_file_is_named(tmp_path: Path, content: bytes | None, reason: str) -> None:
    path = tmp_path / "classnames.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=reason) as caught:
        read_lines(path)
    assert str(path) in str(caught.value)


def test_an_odd_line_separator_does_not_split_a_name(tmp_path: Path) -> None:
    path = tmp_path / "classnames.txt"
    path.write_text("cat\u2028fish\ndog\n", encoding="utf-8")
    assert len(read_lines(path)) == 2


def test_repeated_names_stay_separate_classes() -> None:
    cranes = LabelSet("imagenet", ("crane", "cat", "crane"), TEMPLATE)
    assert cranes.duplicates == ["crane"]
    assert [cranes.class_of({"cls": str(label).encode()}) for label in range(3)] == [0, 1, 2]


def test_repeated_names_are_refused_where_the_name_tells_the_class() -> None:
    with pytest.raises(UserError, match="repeats 'crane'"):
        LabelSet("birds", ("crane", "cat", "crane"), TEMPLATE, ("kind",))


def test_fields_are_joined_by_a_blank() -> None:
    pairs = LabelSet("pairs", ("red 1", "red 2"), TEMPLATE, ("color", "digit"))
    assert pairs.class_of({"json": b'{"digit": 2, "color": "red"}'}) == 1


@pytest.mark.parametrize(
    ("sample", "reason"),
    [
        ({"cls": b"2"}, "label 2 is out of range.*2 classes"),
        ({"cls": b"-1"}, "label -1 is out of range"),
        ({"cls": b"cat"}, "not a class index"),
        ({"cls": b"1.0"}, "not a class index"),
        ({"cls": b""}, "not a class index"),
        ({"jpg": b"", "txt": b""}, "no cls member.*jpg, txt"),
        ({"__key__": "a"}, "members seen: none"),
    ],
)
def test_a_bad_class_index_is_explained(sample: dict[str, bytes], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        LabelSet("animals", ("cat", "dog"), TEMPLATE).class_of(sample)


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"{", "cannot be read"),
        (b"\xff", "cannot be read"),
        (b"[]", "no field 'kind'"),
        (b'{"sort": "cat"}', "no field 'kind'"),
        (b'{"kind": "cow"}', "'cow' is not among the 2"),
        (b'{"kind": null}', "is None"),
        (b'{"kind": true}', "is True"),
        (b'{"kind": ["cat"]}', r"is \['cat'\]"),
    ],
)
def test_a_bad_json_label_is_explained(raw: bytes, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        LabelSet("animals", ("cat", "dog"), TEMPLATE, ("kind",)).class_of({"json": raw})


GOOD = {"classes": ["cat", "dog"], "templates": ["a {c}"]}


def test_label_sets_are_read_in_order(tmp_path: Path) -> None:
    path = tmp_path / "label_sets.json"
    path.write_text(json.dumps({"z": GOOD, "a": {**GOOD, "fields": ["kind"]}}))
    first, second = read_label_sets(path)
    assert (first.name, first.classes, first.templates, first.fields) == ("z", ("cat", "dog"), ("a {c}",), ())
    assert (second.name, second.fields) == ("a", ("kind",))


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ([], "must be an object"),
        ({"classes": ["cat", "dog"]}, "'templates' must be a list"),
        ({**GOOD, "classes": "cat"}, "'classes' must be a list"),
        ({**GOOD, "classes": ["cat", 3]}, "'classes' must be a list of strings"),
        ({**GOOD, "classes": ["cat"]}, "at least 2"),
        ({**GOOD, "classes": []}, "at least 2"),
        ({**GOOD, "classes": ["cat", " "]}, "class 1 is blank"),
        ({**GOOD, "templates": []}, "no template"),
        ({**GOOD, "templates": ["a {c}", "a {b}"]}, "template 1.*{b}"),
        ({**GOOD, "field": ["kind"]}, "unknown key 'field'"),
        ({**GOOD, "fields": None}, "'fields' must be a list"),
    ],
)
def test_a_bad_label_set_is_named(tmp_path: Path, entry: object, reason: str) -> None:
    path = tmp_path / "label_sets.json"
    path.write_text(json.dumps({"good": GOOD, "odd": entry}))
    with pytest.raises(UserError, match=reason) as caught:
        read_label_sets(path)
    assert str(path) in str(caught.value)
    assert "'odd'" in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "3"])
def test_a_file_that_is_no_object_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "label_sets.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"label_sets\.json"):
        read_label_sets(path)
