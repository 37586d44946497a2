"""What cleaning does to one sample: the filters, and what is written."""

import io
import json

import pytest
from PIL import Image

from openclip_linattn.data.clean.filters import assess
from openclip_linattn.data.clean.repair import repair
from openclip_linattn.data.clean.settings import Settings
from openclip_linattn.data.reading import RawSample
from openclip_linattn.errors import UserError


def image(width: int, height: int, kind: str = "JPEG", mode: str = "RGB", **options) -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, (width, height), 100).save(buffer, kind, **options)
    return buffer.getvalue()


def raw(fields=None, txt: bytes = b"a red square", jpg: bytes | None = None, **members) -> RawSample:
    content = {"jpg": jpg or image(30, 20), "txt": txt, "json": json.dumps(fields or {}).encode(), **members}
    return RawSample("k", {name: data for name, data in content.items() if data is not None})


FILTERED = {
    "NSFW": ({"drop_nsfw": ("NSFW", "UNSURE")}, {"NSFW": "unsure"}, "NSFW is UNSURE"),
    "NSFW kept": ({"drop_nsfw": ("NSFW",)}, {"NSFW": "UNLIKELY"}, None),
    "NSFW null": ({"drop_nsfw": ("NSFW", "NONE")}, {"NSFW": None}, None),
    "similarity": ({"min_similarity": 0.3}, {"similarity": 0.299}, "similarity under 0.3"),
    "similarity at the bound": ({"min_similarity": 0.3}, {"similarity": 0.3}, None),
    "similarity in words": ({"min_similarity": 0.3}, {"similarity": "0.2"}, "similarity under 0.3"),
    "similarity NaN": ({"min_similarity": 0.3}, {"similarity": float("nan")}, "similarity under 0.3"),
    "no similarity": ({"min_similarity": 0.3}, {"similarity": None}, None),
    "side": ({"min_side": 21}, {}, "shorter side under 21 px"),
    "side at the bound": ({"min_side": 20}, {}, None),
    "aspect": ({"max_aspect": 1.4}, {}, "aspect ratio over 1.4"),
    "aspect at the bound": ({"max_aspect": 1.5}, {}, None),
    "short caption": ({"min_caption": 13}, {}, "caption under 13 characters"),
    "short caption at the bound": ({"min_caption": 12}, {}, None),
    "long caption": ({"max_caption": 11}, {}, "caption over 11 characters"),
    "long caption at the bound": ({"max_caption": 12}, {}, None),
}


@pytest.mark.parametrize("case", FILTERED)
def test_filters_drop_what_is_beyond_their_bound(case):
    settings, fields, reason = FILTERED[case]
    finding = assess(raw(fields), Settings(**settings))
    assert finding.reason == reason
    assert finding.usable


def test_captions_are_measured_in_characters_without_blanks_around():
    sample = raw(txt="  façade\n".encode())
    assert assess(sample, Settings(min_caption=6, max_caption=6)).reason is None


def test_empty_captions_are_dropped_unless_wanted():
    sample = raw(txt=b" \n")
    assert assess(sample, Settings()).reason == "empty caption"
    assert assess(sample, Settings(keep_empty_captions=True)).reason is None


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ({"txt": None}, "missing caption"),
        ({"jpg": b"<html>"}, "not an image"),
        ({"txt": b"\xff"}, "caption not UTF-8"),
        ({"jpg": b"<html>", "json": b"{"}, "not an image"),
    ],
)
def test_what_training_cannot_decode_is_dropped_for_training_s_reason(members, reason):
    finding = assess(raw(**members), Settings())
    assert (finding.reason, finding.usable, finding.recovered) == (reason, False, False)


@pytest.mark.parametrize(
    "members", [{"json": b"{"}, {"cls": b"cat"}, {"png": b"<html>"}, {"json.gz": b"no gzip"}]
)
def test_a_pair_beside_a_broken_member_is_recovered(members):
    finding = assess(raw(**members), Settings())
    assert (finding.reason, finding.recovered) == (None, True)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"samples_per_shard": 10_001}, "Samples per shard"),
        ({"resize": 0}, "--resize"),
        ({"max_aspect": float("nan")}, "--max-aspect"),
        ({"min_similarity": 30}, "--min-similarity"),
        ({"min_caption": 5, "max_caption": 4}, "--min-caption"),
        ({"deduplicate": ""}, "--deduplicate"),
        ({"drop_nsfw": ("NSFW", "")}, "--drop-nsfw"),
    ],
)
def test_flags_out_of_range_are_refused_by_name(settings, word):
    with pytest.raises(UserError, match=word):
        Settings(**settings)


def test_image_and_caption_keep_their_bytes():
    sample = raw({"url": "u", "key": "old", "similarity": 0.5}, txt=b" two  words\x00 ")
    repaired = repair(sample, "000000001", None)
    members = dict(repaired.members)
    assert list(members) == ["000000001.jpg", "000000001.txt", "000000001.json"]
    assert members["000000001.jpg"] == sample.members["jpg"]
    assert members["000000001.txt"] == sample.members["txt"]
    assert json.loads(members["000000001.json"]) == {
        "url": "u",
        "key": "000000001",
        "similarity": 0.5,
        "original_key": "k",
    }
    assert not repaired.json_made


@pytest.mark.parametrize("broken", [None, b"{", b"[1]", b"null", b"[" * 100_000, b"\xff"])
def test_a_json_that_is_no_object_is_made_anew(broken):
    repaired = repair(raw(json=broken), "000000001", None)
    record = json.loads(repaired.members[2][1])
    assert record == {"caption": "a red square", "key": "000000001", "original_key": "k"}
    assert repaired.json_made


def test_numbers_that_are_no_json_become_null_and_the_first_key_stays():
    text = b'{"a": NaN, "b": [1e999, -Infinity, 0.5], "original_key": "first"}'
    record = json.loads(repair(raw(json=text), "000000001", None).members[2][1])
    assert record == {"a": None, "b": [None, None, 0.5], "original_key": "first", "key": "000000001"}


def test_members_that_training_does_not_use_are_left_out():
    repaired = repair(raw(png=image(5, 5, "PNG"), cls=b"3"), "000000001", None)
    assert [name for name, _ in repaired.members] == ["000000001.jpg", "000000001.txt", "000000001.json"]
    assert repaired.left_out == ["png", "cls"]


@pytest.mark.parametrize(("suffix", "written"), [("jpeg", "jpg"), ("png", "png"), ("webp", "webp")])
def test_the_image_keeps_its_kind(suffix, written):
    members = {"jpg": None, suffix: image(5, 5, "PNG")}
    sample = RawSample("k", {**raw().members, **members})
    del sample.members["jpg"]
    assert repair(sample, "000000001", None).members[0] == (f"000000001.{written}", members[suffix])


@pytest.mark.parametrize(
    ("size", "expected"),
    [((40, 20), (20, 10)), ((20, 40), (10, 20)), ((30, 11), (27, 10)), ((900, 11), (818, 10))],
)
def test_large_images_are_shrunk_to_their_shorter_side(size, expected):
    repaired = repair(raw({"width": 1, "original_width": 2}, jpg=image(*size)), "000000001", 10)
    with Image.open(io.BytesIO(repaired.members[0][1])) as shrunk:
        assert (shrunk.size, shrunk.format, shrunk.mode) == (expected, "JPEG", "RGB")
    record = json.loads(repaired.members[2][1])
    assert (record["width"], record["height"], record["original_width"]) == (*expected, 2)
    assert repaired.resized


def test_small_images_keep_their_bytes():
    sample = raw(jpg=image(40, 10))
    repaired = repair(sample, "000000001", 10)
    assert repaired.members[0][1] == sample.members["jpg"]
    assert not repaired.resized


def test_an_image_that_would_be_too_long_for_a_jpeg_keeps_its_bytes():
    strip = image(20, 131_002, "PNG", "1")
    assert repair(raw(jpg=strip), "000000001", 10).members[0][1] == strip
    fitting = repair(raw(jpg=image(20, 131_000, "PNG", "1")), "000000001", 10)
    assert json.loads(fitting.members[2][1])["height"] == 65_500


def test_a_shrunk_image_is_jpeg_without_the_tags_that_training_ignores():
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    sample = raw(jpg=image(40, 20, exif=exif, icc_profile=b"profile"))
    with Image.open(io.BytesIO(repair(sample, "000000001", 10).members[0][1])) as shrunk:
        assert shrunk.size == (20, 10)
        assert not shrunk.getexif()
        assert "icc_profile" not in shrunk.info
    png = RawSample("k", {"png": image(40, 20, "PNG", "L"), "txt": b"x"})
    name, data = repair(png, "000000001", 10).members[0]
    assert name == "000000001.jpg"
    assert data[:2] == b"\xff\xd8"
