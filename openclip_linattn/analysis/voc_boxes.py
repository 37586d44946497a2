"""Boxes from XML files in VOC's form, as ImageNet has them for its validation images."""

from functools import cached_property
from pathlib import Path
from xml.etree import ElementTree

from PIL import Image

from openclip_linattn.errors import UserError

Box = tuple[float, float, float, float]
"""x0, y0, x1, y1 in pixels, x1 and y1 exclusive."""


class VocBoxes:
    """The boxes in a folder of XML files, in folders of it too, found by an image's name without its suffix."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise UserError(f"{folder} is no folder; --boxes needs one with an XML file per image")
        self.folder = folder

    @cached_property
    def _files(self) -> dict[str, Path]:
        files = {path.stem: path for path in self.folder.rglob("*.xml")}
        if not files:
            raise UserError(f"{self.folder} holds no XML file; --boxes needs one per image")
        return files

    def of(self, name: str, image: Image.Image) -> tuple[Box, ...]:
        """The boxes of the image called `name`; none where no file is named so.

        VOC counts pixels from 1 and includes the last. Where the file states another size than the image has, as
        after a resize, the boxes are scaled. Raises UserError, naming the file, for one that is wrong.
        """
        path = self._files.get(name)
        if path is None:
            return ()
        try:
            root = ElementTree.parse(path).getroot()
            width, height = (float(_number(root, f"size/{side}")) for side in ("width", "height"))
            boxes = [_box(element) for element in root.iterfind("object/bndbox")]
        except (ElementTree.ParseError, ValueError) as error:
            raise UserError(f"{path} is no annotation in VOC's form: {error}") from error
        x, y = image.width / width, image.height / height
        return tuple(
            (max(0.0, (left - 1) * x), max(0.0, (top - 1) * y), right * x, bottom * y)
            for left, top, right, bottom in boxes
        )


def _box(element: ElementTree.Element) -> Box:
    """The four numbers as they stand in the file."""
    left, top, right, bottom = (_number(element, side) for side in ("xmin", "ymin", "xmax", "ymax"))
    if right < left or bottom < top:
        raise ValueError(f"the box from ({left:g}, {top:g}) to ({right:g}, {bottom:g}) ends before it begins")
    return left, top, right, bottom


def _number(element: ElementTree.Element, name: str) -> float:
    text = element.findtext(name)
    if text is None:
        raise ValueError(f"{element.tag} has no {name}")
    value = float(text)
    if name.startswith("size/") and value <= 0:
        raise ValueError(f"{name} is {text}")
    return value
