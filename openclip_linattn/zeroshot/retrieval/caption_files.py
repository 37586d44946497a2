"""Reads the caption files of COCO, of Karpathy's splits and of Flickr into {image name: captions}."""

import csv
import re
from collections import Counter
from pathlib import Path
from typing import Any

from openclip_linattn.errors import UserError
from openclip_linattn.files import read_json

Captions = dict[str, list[str]]

CAPTION_SUFFIXES = (".json", ".csv", ".token", ".txt")
_FORMS = (
    re.compile(r"(?P<name>[^\t#]+)#\d+\t(?P<caption>.*)"),  # Flickr's own: 1000092795.jpg#0<TAB>Two men ...
    # Some rows of the comma-separated file that goes round lack the second bar.
    re.compile(r"(?P<name>[^|]+\.\w+)\s*\|\s*\d+\s*\|?\s*(?P<caption>.*)"),
    re.compile(r"(?P<name>[^,]+\.(?:jpe?g|png|webp)),(?P<caption>.*)", re.IGNORECASE),
)


def read_caption_file(path: Path, split: str) -> Captions:
    """Return the captions of each image of a caption file, images in the order of the file.

    Known are COCO's captions JSON (images, annotations), Karpathy's JSON (images with split and sentences;
    only there `split` chooses, and "train" takes "restval" in), and Flickr's text forms: `name.jpg#0<TAB>caption`,
    `name.jpg| 0| caption` and `name.jpg,caption`. An image of a JSON file may have no caption.
    Raises UserError for another form, a bad line, a repeated image, a caption of an absent image and an
    unknown split.
    """
    if path.suffix.lower() == ".json":
        return _read_json_captions(path, split)
    return _read_rows(path)


def _read_json_captions(path: Path, split: str) -> Captions:
    content = read_json(path)
    images = content.get("images") if isinstance(content, dict) else None
    if not isinstance(images, list) or not images:
        raise UserError(
            f"{path} has no list 'images'; it is neither COCO's captions nor one of Karpathy's splits"
        )
    try:
        if "annotations" in content:
            return _coco(path, images, content["annotations"])
        return _karpathy(path, images, split)
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} is neither COCO's captions (images with id and file_name, annotations with image_id and "
            f"caption) nor one of Karpathy's splits (images with filename, split and sentences): {error!r}"
        ) from error


def _coco(path: Path, images: list[Any], annotations: list[Any]) -> Captions:
    names = {image["id"]: str(image["file_name"]) for image in images}
    if len(names) < len(images):
        raise UserError(
            f"{path} lists {len(images)} images with {len(names)} different ids; ids must not repeat"
        )
    captions: Captions = {name: [] for name in names.values()}
    if len(captions) < len(names):
        raise UserError(f"{path} names a file for two images; {len(names)} images have {len(captions)} files")
    for annotation in annotations:
        if annotation["image_id"] not in names:
            raise UserError(
                f"{path} has a caption for image {annotation['image_id']!r}, which is not among its "
                f"{len(names)} images; take both from one split"
            )
        captions[names[annotation["image_id"]]].append(str(annotation["caption"]))
    return captions


def _karpathy(path: Path, images: list[Any], split: str) -> Captions:
    wanted = {split, "restval"} if split == "train" else {split}
    chosen = [image for image in images if image["split"] in wanted]
    if not chosen:
        counts = Counter(str(image["split"]) for image in images)
        known = ", ".join(f"{name} ({count} images)" for name, count in counts.items())
        raise UserError(f"{path} has no split {split!r}; it has {known}")
    captions = {_file(image): [str(sentence["raw"]) for sentence in image["sentences"]] for image in chosen}
    if len(captions) < len(chosen):
        raise UserError(f"{path} names a file twice in split {split!r}; each image must stand there once")
    return captions


def _file(image: dict[str, Any]) -> str:
    folder = image.get("filepath")
    return f"{folder}/{image['filename']}" if folder else str(image["filename"])


def _read_rows(path: Path) -> Captions:
    lines = _numbered_lines(path)
    if lines and not _form(lines[0][1]):
        lines = lines[1:]  # a line of headings
    form = _form(lines[0][1]) if lines else None
    if form is None:
        raise UserError(
            f"{path} is no caption file: its first lines have none of the forms 'name.jpg#0<TAB>caption', "
            "'name.jpg| 0| caption' and 'name.jpg,caption'"
        )
    captions: Captions = {}
    for number, line in lines:
        match = form.fullmatch(line)
        if match is None:
            raise UserError(f"{path}: line {number} has not the form of the lines above it: {line[:60]!r}")
        captions.setdefault(match["name"].strip(), []).append(_unquoted(match["caption"].strip()))
    return captions


def _form(line: str) -> re.Pattern[str] | None:
    return next((form for form in _FORMS if form.fullmatch(line)), None)


def _unquoted(caption: str) -> str:
    """Return the caption without the quotes that a CSV writer put around the whole of it."""
    if len(caption) > 1 and caption[0] == caption[-1] == '"':
        fields = next(csv.reader([caption]))
        if len(fields) == 1:
            return fields[0]
    return caption


def _numbered_lines(path: Path) -> list[tuple[int, str]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start}); convert it") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    lines = enumerate((line.strip("\r ") for line in text.split("\n")), start=1)
    return [(number, line) for number, line in lines if line]
