"""Which images are looked at, and where their boxes lie after a model's preprocessing."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from openclip_linattn.analysis.images import Canvas, Picture, open_pictures
from openclip_linattn.analysis.voc_boxes import VocBoxes
from openclip_linattn.data.drawn.shapes import TEST, draw_sample
from openclip_linattn.data.layout import write_tar
from openclip_linattn.errors import UserError

XML = """<annotation><size><width>{width}</width><height>{height}</height></size>
<object><name>n1</name><bndbox><xmin>{xmin}</xmin><ymin>2</ymin><xmax>10</xmax><ymax>20</ymax></bndbox></object>
<object><bndbox><xmin>5</xmin><ymin>5</ymin><xmax>6</xmax><ymax>6</ymax></bndbox></object></annotation>"""


def write_xml(path: Path, *, width=40, height=20, xmin=1) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(XML.format(width=width, height=height, xmin=xmin))


def test_samples_are_spread_over_the_shards_with_labels_and_boxes(shapes):
    source = open_pictures(str(shapes))
    pictures = list(source.pictures(4))
    assert [picture.key for picture in pictures] == ["000000000", "000000008", "000000015", "000010007"]
    for picture, index in zip(pictures, (0, 8, 15, 23), strict=True):
        drawn = draw_sample(index, seed=0, image_size=48, split=TEST)
        assert picture.boxes == (tuple(drawn.attributes["bbox"]),)
        assert picture.labels[0] == drawn.label
        assert picture.image.size == (48, 48)
    assert len(list(source.pictures(1000))) == 24
    assert [each.name for each in source.label_sets] == ["color x shape", "color", "shape"]


def test_class_folders_give_their_labels_and_boxes_from_xml_files(tmp_path):
    root = tmp_path / "set"
    for name in ("ant", "bee"):
        (root / name).mkdir(parents=True)
        for number in range(3):
            Image.new("RGB", (40, 20), "red").save(root / name / f"{name}_{number}.png")
    write_xml(tmp_path / "xml" / "bee" / "bee_2.xml")
    source = open_pictures(str(root), boxes=tmp_path / "xml", templates="one")
    pictures = list(source.pictures(2))
    assert [(each.key, each.labels) for each in pictures] == [
        ("ant/ant_0.png", (0,)),
        ("bee/bee_2.png", (1,)),
    ]
    assert pictures[0].boxes == ()
    assert pictures[1].boxes == ((0, 1, 10, 20), (4, 4, 6, 6))


def test_image_files_need_no_labels(tmp_path):
    for number in range(3):
        Image.new("RGB", (8, 8)).save(tmp_path / f"{number}.png")
    (tmp_path / "note.txt").write_text("no image")
    (tmp_path / ".ipynb_checkpoints").mkdir()
    (tmp_path / ".thumbnails.png").mkdir()
    (tmp_path / "._0.png").write_text("macOS writes such files")
    assert [each.key for each in open_pictures(str(tmp_path)).pictures(9)] == ["0.png", "1.png", "2.png"]
    alone = open_pictures(str(tmp_path / "1.png"))
    assert ([each.key for each in alone.pictures(9)], alone.label_sets) == (["1.png"], ())
    (tmp_path / "2.png").write_text("broken")
    with pytest.raises(UserError, match=r"2\.png cannot be read as an image"):
        list(open_pictures(str(tmp_path)).pictures(3))
    with pytest.raises(UserError, match=r"the image .*cat\.jpg does not exist"):
        open_pictures(str(tmp_path / "cat.jpg"))


def test_boxes_of_a_resized_image_are_scaled_and_kept_inside(tmp_path):
    write_xml(tmp_path / "a.xml", xmin=0)
    boxes = VocBoxes(tmp_path)
    assert boxes.of("a", Image.new("RGB", (80, 20)))[0] == (0, 1, 20, 20)
    assert boxes.of("b", Image.new("RGB", (80, 20))) == ()


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("<annotation>", "no element found"),
        ("<annotation/>", "annotation has no size/width"),
        (XML.format(width=0, height=20, xmin=1), "size/width is 0"),
        (XML.format(width=40, height=20, xmin="x"), "could not convert"),
        (XML.format(width=40, height=20, xmin=11), r"the box from \(11, 2\) to \(10, 20\) ends before"),
        (XML.format(width=40, height=20, xmin=1).replace("ymax", "end"), "bndbox has no ymax"),
    ],
)
def test_an_annotation_that_is_wrong_is_named(tmp_path, text, what):
    (tmp_path / "a.xml").write_text(text)
    with pytest.raises(UserError, match=rf"a\.xml is no annotation in VOC's form: {what}"):
        VocBoxes(tmp_path).of("a", Image.new("RGB", (40, 20)))


def test_folders_without_annotations_are_refused(tmp_path):
    with pytest.raises(UserError, match="no folder"):
        VocBoxes(tmp_path / "none")
    with pytest.raises(UserError, match="no XML file"):
        VocBoxes(tmp_path).of("a", Image.new("RGB", (4, 4)))


@pytest.mark.parametrize("bbox", ["here", [1, 2, 3], [1, 2, 3, "4"], [5, 2, 4, 9]])
def test_a_box_in_a_json_that_is_wrong_is_named_with_its_sample(shapes, tmp_path, bbox):
    sample = dict(draw_sample(0, seed=0, image_size=48, split=TEST).members("k"))
    sample["k.json"] = json.dumps({**json.loads(sample["k.json"]), "bbox": bbox}).encode()
    (tmp_path / "classnames.txt").write_text((shapes / "classnames.txt").read_text())
    (tmp_path / "zeroshot_classification_templates.txt").write_text("a {c}\n")
    write_tar(tmp_path / "0.tar", sample.items())
    with pytest.raises(UserError, match=r"0\.tar: sample 'k': its bbox is .* must be"):
        list(open_pictures(str(tmp_path)).pictures(1))


def test_boxes_and_colours_go_through_the_preprocessing_of_the_model():
    """A 40 x 20 image is enlarged twofold and cropped to its middle 40 x 40 pixels."""
    transform = v2.Compose(
        [
            v2.Resize(40),
            v2.CenterCrop(40),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize([0.5, 0.4, 0.3], [0.2, 0.3, 0.4]),
        ]
    )
    canvas = Canvas(transform)
    pixels = np.random.default_rng(0).integers(0, 256, (20, 40, 3)).astype(np.uint8)
    image = Image.fromarray(pixels)
    plain = v2.Compose(transform.transforms[:-1])
    torch.testing.assert_close(canvas.colors(transform(image)), plain(image))
    inside = canvas.inside(Picture("k", image, boxes=((12, 3, 20, 10), (25, 15, 40, 20))))
    expected = torch.zeros(40, 40, dtype=torch.bool)
    expected[6:20, 4:20] = True
    expected[30:40, 30:40] = True
    assert torch.equal(inside, expected)
    assert not canvas.inside(Picture("k", image)).any()
    assert canvas.inside(Picture("k", image, boxes=((12.2, 3, 12.4, 3.3),))).sum() == 4, "a pixel at least"
