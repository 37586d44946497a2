import importlib.resources
import io
import logging
import os
from collections.abc import Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from PIL import Image
from torch import Tensor

from openclip_linattn.errors import UserError
from openclip_linattn.zeroshot.sets.dataset import open_evaluation_set
from openclip_linattn.zeroshot.sets.kinds import FolderSet
from openclip_linattn.zeroshot.sets.layouts import find_layout
from openclip_linattn.zeroshot.sets.reading import keyed_batches
from openclip_linattn.zeroshot.sets.streaming import DataError
from openclip_linattn.zeroshot.sets.wnids import (
    imagenet1k_names,
    imagenet1k_wnids,
    imagenet21k_wnids,
    known_subset,
    synset_names,
)

WNIDS = imagenet1k_wnids()
TIMM = importlib.resources.files("timm.data") / "_info"


def make_folders(root: Path, names: Iterable[str], files: Iterable[str] = ("a.jpg",)) -> Path:
    """Class folders with empty files: opening a set decodes nothing."""
    for name in names:
        (root / name).mkdir(parents=True)
        for file in files:
            (root / name / file).touch()
    return root


def opened(source: object, **rest: Any) -> FolderSet:
    data = open_evaluation_set(str(source), **rest)
    assert isinstance(data, FolderSet)
    return data


def class_of(data: FolderSet, folder: str, label_set: int = 0) -> tuple[int, str]:
    index = data.columns[label_set][data.folders.names.index(folder)]
    return index, data.label_sets[label_set].classes[index]


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ImageNet-1K's folders with two images each; read only."""
    root = tmp_path_factory.mktemp("imagenet") / "imagenet" / "val"
    return make_folders(root, WNIDS, ("a.JPEG", "b.JPEG"))


def test_the_wnids_have_openclips_names_in_index_order(imagenet: Path) -> None:
    data = opened(imagenet)
    expected = {
        "n01440764": (0, "tench"),
        "n03126707": (517, "construction crane"),
        "n02012849": (134, "crane bird"),
        "n15075141": (999, "toilet paper"),
    }
    assert {wnid: class_of(data, wnid) for wnid in expected} == expected
    (labels,) = data.label_sets
    assert labels.classes == tuple(open_clip.IMAGENET_CLASSNAMES)
    assert [t.replace("{c}", "x") for t in labels.templates] == [
        template("x") for template in open_clip.OPENAI_IMAGENET_TEMPLATES
    ]


@pytest.mark.parametrize("prefix", ["", "imagenet1k:", "folder:"])
def test_imagenet_is_known_by_its_folders(imagenet: Path, prefix: str) -> None:
    data = opened(f"{prefix}{imagenet}")
    assert (data.name, data.source, data.n) == ("imagenet", str(imagenet), 2000)
    assert [each.name for each in data.label_sets] == ["imagenet1k"]
    assert data.place == "1000 class folder(s)"


def test_the_two_repeated_names_are_reported_once(imagenet: Path, caplog: pytest.LogCaptureFixture) -> None:
    opened(imagenet)
    (record,) = caplog.records
    assert "repeats class names (missile, sunglasses)" in record.getMessage()


def test_imagenet_v2_is_in_the_order_of_numbers(tmp_path: Path) -> None:
    data = opened(make_folders(tmp_path / "v2", map(str, range(1000))))
    assert data.folders.names[:3] == ("0", "1", "10")
    assert data.columns[0] == tuple(int(name) for name in data.folders.names)
    assert class_of(data, "10") == (10, imagenet1k_names()[10])
    assert data.label_sets[0].name == "imagenetv2"
    padded = opened(f"imagenetv2:{make_folders(tmp_path / 'padded', (f'{n:03d}' for n in range(1000)))}")
    assert padded.columns[0] == tuple(range(1000))


def test_a_subset_is_evaluated_over_the_classes_that_were_named(tmp_path: Path) -> None:
    root = make_folders(tmp_path / "some", WNIDS[10:13])
    everything, present = opened(root, classes="all"), opened(f"folder:{root}", classes="present")
    assert everything.columns == ((10, 11, 12),)
    assert present.columns == ((0, 1, 2),)
    assert (everything.label_sets[0].name, len(everything.label_sets[0].classes)) == ("imagenet1k", 1000)
    assert present.label_sets[0].name == "imagenet1k-present"
    assert present.label_sets[0].classes == imagenet1k_names()[10:13]


@pytest.mark.parametrize("letter", ["a", "r"])
def test_imagenet_a_and_r_are_evaluated_over_their_200_classes(tmp_path: Path, letter: str) -> None:
    wnids = (TIMM / f"imagenet_{letter}_synsets.txt").read_text().split()
    root = make_folders(tmp_path / "set", wnids)
    (labels,) = opened(root).label_sets
    assert (labels.name, len(labels.classes)) == (f"imagenet-{letter}", 200)
    assert labels.classes[0] == imagenet1k_names()[WNIDS.index(min(wnids))]
    assert opened(root, classes="all").label_sets[0].name == "imagenet1k"
    names = tmp_path / "mine.txt"
    names.write_text("".join(f"{wnid}\tname of {wnid}\n" for wnid in wnids))
    (own,) = opened(root, classnames=names).label_sets
    assert (own.name, own.classes[0]) == (f"mine-imagenet-{letter}", f"name of {min(wnids)}")


def test_one_class_less_than_imagenet_a_is_no_known_subset() -> None:
    wnids = (TIMM / "imagenet_a_synsets.txt").read_text().split()
    assert known_subset(frozenset(wnids)) == "imagenet-a"
    assert known_subset(frozenset(wnids[1:])) is None


GUARDS = {
    "numbers as ImageNet-1K": ("imagenet1k:", map(str, range(5)), {}, r"ImageNet-V2's layout.*imagenetv2:"),
    "wnids as ImageNet-V2": ("imagenetv2:", WNIDS[:5], {}, r"ImageNet-1K's layout.*imagenet1k:"),
    "a class missing": ("", WNIDS[:7] + WNIDS[8:], {}, rf"999 of the 1000.*{WNIDS[7]}.*--classes all or"),
    "a class of V2 missing": (
        "imagenetv2:",
        map(str, range(999)),
        {},
        "999 of the 1000.*first missing '999'",
    ),
    "a class of V2 twice": ("imagenetv2:", ["1", "01"], {}, "two folders for class 1"),
    "no class of V2": ("imagenetv2:", ["1", "1000"], {}, "'1000' is no class of ImageNet-V2"),
    "an extra folder": (
        "",
        (*WNIDS, "notes"),
        {},
        r"1 folder\(s\) are no class of ImageNet-1K, first 'notes'",
    ),
    "an extra synset": ("", (*WNIDS, "n00004475"), {}, "'n00004475'.*imagenet21k:"),
    "no synset": ("imagenet21k:", ["n00004475", "n99999999"], {}, "no synset.*'n99999999'"),
    "wrong number of names": ("", ["cat", "dog"], {"classnames": "a\nb\nc\n"}, "3 names, but there are 2"),
    "names in another order": ("", ["a_cat", "dog"], {"classnames": "Dog\na cat\n"}, "in another order"),
    "names half keyed": ("", ["cat", "dog"], {"classnames": "cat\tCat\nDog\n"}, "line 2 has no tab"),
    "a key twice": ("", ["cat", "dog"], {"classnames": "cat\tA\ncat\tB\n"}, "line 2 names 'cat' a second"),
    "a key missing": ("", ["cat", "dog"], {"classnames": "cat\tA\ncow\tB\n"}, "no line for 1 class.*'dog'"),
    "numbers without names": ("", map(str, range(11)), {}, "11 numbered folders.*--classnames"),
    "names by an unclear order": (
        "",
        ["1", "2", "10"],
        {"classnames": "a\nb\nc\n"},
        "order of numbered folders from '1' on is not clear",
    ),
    "one class": ("", ["cat"], {}, "has 1 class"),
    "unknown templates": (
        "",
        ["cat", "dog"],
        {"templates": "openai8"},
        "'openai8' are neither a file nor one",
    ),
}


@pytest.mark.parametrize("case", GUARDS)
def test_a_layout_that_does_not_fit_is_refused(tmp_path: Path, case: str) -> None:
    prefix, names, options, reason = GUARDS[case]
    root = make_folders(tmp_path / "set", names)
    if "classnames" in options:
        path = tmp_path / "names.txt"
        path.write_text(options["classnames"])
        options = {"classnames": path}
    with pytest.raises(UserError, match=reason) as caught:
        open_evaluation_set(f"{prefix}{root}", **options)
    if case not in ("one class", "unknown templates"):
        assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("files", "given", "reason"),
    [
        (["ILSVRC2012_val_00000001.JPEG"], ".", "without class folders.*ground truth"),
        (["x.png", "y.png"], ".", r"2 image\(s\) but no class folders"),
        (
            ["n01440764/x.JPEG", "n01443537/y.JPEG"],
            "n01440764",
            "the folder of one class; name the folder above",
        ),
        (["train/cat/x.png", "val/cat/x.png"], ".", r"no class folders but train, val; name the one.*/val"),
        (["cat/x.png", "dog/deep/y.png"], ".", "dog/deep is a folder inside a class folder"),
        (["cat/notes.txt", "dog/notes.txt"], ".", r"its 2 folder\(s\) hold no image"),
        (["notes.txt"], ".", "holds no tar and no class folder"),
        (["cat/x.png", "dog/notes.txt"], ".", "1 class folder.*first 'dog'.*--classes present"),
    ],
)
def test_a_folder_one_too_high_or_too_deep_gets_a_hint(
    tmp_path: Path, files: list[str], given: str, reason: str
) -> None:
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    with pytest.raises(UserError, match=reason) as caught:
        open_evaluation_set(tmp_path / given)
    assert str(tmp_path) in str(caught.value)


def test_many_folders_without_an_image_are_refused(tmp_path: Path) -> None:
    root = make_folders(tmp_path / "set", map(chr, range(97, 122)), ["notes.txt"])
    with pytest.raises(UserError, match=r"holds no image: its 25 folder\(s\) are empty"):
        open_evaluation_set(root)


def test_an_unknown_kind_is_refused_with_the_known() -> None:
    with pytest.raises(UserError, match="no kind 'imagenet'; known are imagenet1k, imagenetv2"):
        open_evaluation_set("imagenet:/data")
    with pytest.raises(UserError, match="names no path"):
        open_evaluation_set("imagenet1k:")


def test_a_path_with_a_colon_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_folders(tmp_path / "pets:new", ["cat", "dog"])
    monkeypatch.chdir(tmp_path)
    assert opened("pets:new").n == opened("folder:pets:new").n == 2


def test_an_empty_class_is_left_out_when_told_so(tmp_path: Path) -> None:
    root = make_folders(tmp_path / "set", ["cat", "dog", "eel"])
    (root / "dog" / "a.jpg").unlink()
    data = opened(root, classes="present")
    assert data.label_sets[0].classes == ("cat", "eel")
    assert data.columns == ((0, -1, 1),)


def test_imagenet_21k_is_evaluated_over_all_synsets_and_those_present(tmp_path: Path) -> None:
    wnids = [*imagenet21k_wnids()[:3], "n02084071"]
    data = opened(make_folders(tmp_path / "set", wnids))
    assert [(each.name, len(each.classes)) for each in data.label_sets] == [
        ("imagenet21k", 21_843),
        ("imagenet21k-present", 4),
    ]
    assert data.columns == ((0, 1, 2, imagenet21k_wnids().index("n02084071")), (0, 1, 2, 3))
    assert class_of(data, "n02084071") == (imagenet21k_wnids().index("n02084071"), "dog")
    assert class_of(data, "n02084071", 1) == (3, "dog")
    assert data.label_sets[0].templates == ("a photo of a {c}.",)
    for classes, name in (("all", "imagenet21k"), ("present", "imagenet21k-present")):
        assert [each.name for each in opened(data.source, classes=classes).label_sets] == [name]


def test_the_folders_of_winter_2021_are_its_classes() -> None:
    folders = imagenet21k_wnids()[:19_167]
    layout = find_layout(Path("winter"), folders)
    assert (layout.kind, layout.keys) == ("imagenet21k", folders)
    assert len(find_layout(Path("part"), folders[1:]).keys) == 21_843


def test_a_synset_of_imagenet_1k_that_google_lacks_is_added() -> None:
    layout = find_layout(Path("all"), ["n00004475", "n04399382"], "imagenet21k")
    assert len(layout.keys) == 21_844
    assert [layout.names[index] for index in layout.class_of] == ["organism", "teddy"]


def test_a_synset_is_named_by_its_first_lemma_unless_others_share_it() -> None:
    names = synset_names()
    assert (names["n01440764"], names["n02084071"]) == ("tench", "dog")
    assert names["n10499355"] == "queen, queen regnant, female monarch"
    assert len(names) == 21_844


def test_folders_that_name_their_classes(tmp_path: Path) -> None:
    root = make_folders(tmp_path / "pets", ["great_dane", "Abyssinian"])
    data = opened(root)
    assert data.label_sets[0].classes == ("Abyssinian", "great dane")
    assert data.label_sets[0].templates == ("a photo of a {c}.",)
    (root / "classnames.txt").write_text("cat\nbig dog\n")
    (root / "zeroshot_classification_templates.txt").write_text("my {}\n")
    own = opened(root).label_sets[0]
    assert (own.name, own.classes, own.templates) == ("classnames", ("cat", "big dog"), ("my {}",))
    assert opened(root, templates="simple7").label_sets[0].templates[0] == "itap of a {c}."


def test_a_folder_name_that_is_no_text_is_refused(tmp_path: Path) -> None:
    root = make_folders(tmp_path / "set", ["épée", "chat", os.fsdecode(b"\xe9t\xe9")])
    with pytest.raises(UserError, match=r"folder '\\udce9t\\udce9' is not UTF-8; rename it"):
        opened(root)


def test_names_may_be_keyed_by_folder(tmp_path: Path, imagenet: Path) -> None:
    path = tmp_path / "own names.txt"
    path.write_text("".join(f"{wnid}\tname {wnid}\n" for wnid in reversed(WNIDS)))
    data = opened(imagenet, classnames=path)
    assert class_of(data, "n03126707") == (517, "name n03126707")
    assert data.label_sets[0].name == "own names"
    some = make_folders(tmp_path / "some", WNIDS[:3])
    assert opened(some, classnames=path, classes="present").label_sets[0].name == "own names-present"


def test_names_by_line_may_be_those_of_the_folders_present(tmp_path: Path) -> None:
    root, path = make_folders(tmp_path / "some", WNIDS[5:8]), tmp_path / "names.txt"
    path.write_text("a\nb\nc\n")
    assert opened(root, classnames=path, classes="present").label_sets[0].classes == ("a", "b", "c")
    path.write_text("\n".join(f"name {number}" for number in range(1000)))
    labels = opened(root, classnames=path, classes="present").label_sets[0]
    assert labels.classes == ("name 5", "name 6", "name 7")


def test_numbered_folders_are_class_indices(tmp_path: Path) -> None:
    root, path = make_folders(tmp_path / "set", map(str, range(12))), tmp_path / "names.txt"
    path.write_text("\n".join("lkjihgfedcba"))
    data = opened(root, classnames=path)
    assert [class_of(data, str(number)) for number in (2, 10)] == [(2, "j"), (10, "b")]
    digits = make_folders(tmp_path / "digits", map(str, range(10)))
    assert opened(digits).label_sets[0].classes == tuple("0123456789")


@pytest.mark.parametrize("order", [sorted, reversed])
def test_imagenets_names_in_another_order_are_refused(tmp_path: Path, imagenet: Path, order: Any) -> None:
    path = tmp_path / "names.txt"
    path.write_text("\n".join(order(imagenet1k_names())))
    with pytest.raises(UserError, match=r"in another order: line 1 is .* class 0 is 'tench'"):
        open_evaluation_set(imagenet, classnames=path)


def test_a_thousand_other_names_by_alphabet_are_refused(tmp_path: Path, imagenet: Path) -> None:
    path = tmp_path / "names.txt"
    path.write_text("\n".join(f"name {number:03d}" for number in range(1000)))
    with pytest.raises(UserError, match="in alphabetical order"):
        open_evaluation_set(imagenet, classnames=path)


def test_a_thousand_names_of_another_set_may_be_in_alphabetical_order(tars: Path) -> None:
    (tars / "classnames.txt").write_text("\n".join(f"name {number:03d}" for number in range(1000)))
    assert open_evaluation_set(tars, templates="one").label_sets[0].classes[999] == "name 999"


def test_what_is_no_image_is_left_out_and_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = ["a.JPEG", "b.Png", "c.webp", "d.TIFF", ".hidden.jpg", "notes.txt", "Thumbs.db"]
    root = make_folders(tmp_path / "set", ["cat", "dog"], names)
    (root / "beside.jpg").touch()
    (root / ".cache").mkdir()
    data = opened(root)
    assert data.n == 8
    assert [data.folders.path(number) for number in range(4)] == [f"cat/{name}" for name in names[:4]]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 3
    assert "1 image(s) beside the class folders are left out, first beside.jpg" in said[0]
    assert "2 hidden file(s)" in said[1]
    assert "4 file(s) that are no images are left out, first cat/Thumbs.db" in said[2]


def test_links_count_as_what_they_point_to(tmp_path: Path) -> None:
    root = make_folders(tmp_path / "set", ["cat", "dog"])
    (root / "dog" / "b.jpg").symlink_to(root / "cat" / "a.jpg")
    (root / "eel").symlink_to(root / "cat")
    assert opened(root).n == 4
    (root / "dog" / "c.jpg").symlink_to(root / "nothing.jpg")
    with pytest.raises(UserError, match=r"c\.jpg cannot be read \(No such file.*mend the link"):
        open_evaluation_set(root)


@pytest.mark.parametrize("change", ["size", "name", "image"])
def test_the_stamp_changes_with_the_images(tmp_path: Path, change: str) -> None:
    root = make_folders(tmp_path / "set", ["cat", "dog"])
    before = opened(root).stamp()
    assert opened(root).stamp() == before
    image = root / "cat" / "a.jpg"
    if change == "size":
        image.write_bytes(b"x")
    elif change == "name":
        image.rename(root / "cat" / "b.jpg")
    else:
        (root / "cat" / "b.jpg").touch()
    assert opened(root).stamp() != before


def small(image: Image.Image) -> Tensor:
    assert image.mode == "RGB"
    return torch.tensor(list(image.resize((2, 2)).tobytes()), dtype=torch.float32)


@pytest.fixture
def photos(tmp_path: Path, make: Any) -> Path:
    """Seven images of two classes, of other modes than RGB too."""
    for number, sample in enumerate(make.samples(7).values()):
        path = tmp_path / "photos" / ("cat" if number < 3 else "dog") / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.open(io.BytesIO(sample["png"])).convert(("RGB", "L", "RGBA", "P")[number % 4]).save(path)
    return tmp_path / "photos"


@pytest.mark.parametrize("workers", [0, 2, 9])
def test_every_file_is_read_once_in_order_whatever_the_workers(photos: Path, workers: int) -> None:
    data = opened(photos)
    found = list(keyed_batches(data, small, batch_size=2, workers=workers))
    keys = [key for batch in found for key in batch.keys]
    assert keys == [f"cat/{n}.png" for n in range(3)] + [f"dog/{n}.png" for n in range(3, 7)]
    assert torch.cat([batch.labels for batch in found]).tolist() == [[0]] * 3 + [[1]] * 4
    expected = torch.stack([small(Image.open(photos / key).convert("RGB")) for key in keys])
    assert torch.equal(torch.cat([batch.images for batch in found]), expected)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("content", [b"", b"<html>", "cut", "gone"])
def test_a_file_that_does_not_decode_stops_by_name(photos: Path, workers: int, content: Any) -> None:
    data, path = opened(photos), photos / "dog" / "4.png"
    if content == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:200] if content == "cut" else content)
    with pytest.raises(DataError, match=r"dog/4\.png cannot be read as an image") as caught:
        list(keyed_batches(data, small, batch_size=2, workers=workers))
    assert "Traceback" not in str(caught.value)


@pytest.fixture
def tars(tmp_path: Path, make: Any) -> Path:
    folder = make.set(tmp_path / "wds", make.samples(6))
    for file in ("label_sets.json", "classnames.txt", "zeroshot_classification_templates.txt"):
        (folder / file).unlink()
    return Path(folder)


def test_tars_of_imagenet_need_no_names(tars: Path, tmp_path: Path) -> None:
    for kind in ("imagenet1k", "imagenetv2"):
        (labels,) = open_evaluation_set(f"{kind}:{tars}").label_sets
        assert (labels.name, labels.classes, len(labels.templates)) == (kind, imagenet1k_names(), 80)
    path = tmp_path / "names.txt"
    path.write_text("\n".join(f"{number} name" for number in reversed(range(1000))))
    (labels,) = open_evaluation_set(f"imagenet1k:{tars}", classnames=path, templates="one").label_sets
    assert (labels.name, labels.classes[0], len(labels.templates)) == ("names", "999 name", 1)


@pytest.mark.parametrize(
    ("kind", "names", "options", "reason"),
    [
        ("imagenet1k:", "\n".join(imagenet1k_names()[:-1]), {}, "999 names, but there are 1000"),
        ("imagenet1k:", "\n".join(sorted(imagenet1k_names())), {}, "in another order"),
        ("", "\n".join(sorted(imagenet1k_names())), {"templates": "one"}, "in another order"),
        ("", "0\tred\n1\tgreen\n", {"templates": "one"}, "line 1 has a tab"),
        ("imagenet21k:", None, {}, "leave imagenet21k: out"),
        ("folder:", None, {}, "leave folder: out"),
        ("imagenet1k:", None, {"classes": "present"}, "leave --classes out"),
    ],
)
def test_tars_that_do_not_fit_are_refused(
    tars: Path, kind: str, names: str | None, options: dict[str, str], reason: str
) -> None:
    if names is not None:
        (tars / "classnames.txt").write_text(names)
    with pytest.raises(UserError, match=reason) as caught:
        open_evaluation_set(f"{kind}{tars}", **options)
    assert str(tars) in str(caught.value)


def test_scanning_tells_its_progress(imagenet: Path) -> None:
    heard: list[tuple[str, int, int]] = []

    @contextmanager
    def watch(title: str, total: int) -> Any:
        steps: list[int] = []
        yield steps.append
        heard.append((title, total, sum(steps)))

    open_evaluation_set(imagenet, watch=watch)
    assert heard == [("listing val", 1000, 1000)]


def test_nothing_is_said_of_a_plain_set(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        opened(make_folders(tmp_path / "set", ["cat", "dog"]))
    assert caplog.records == []
