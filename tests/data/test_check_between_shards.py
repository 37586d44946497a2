"""Keys at the edges of shards, keys that come up twice, and shards that are the same."""

import io
from pathlib import Path

import pytest
from PIL import Image

from openclip_linattn.data.checks.between_shards import find_overlap, joined_suffixes, mixes
from openclip_linattn.data.checks.check import check
from openclip_linattn.data.checks.shard_keys import ContentDigest, KeyTracker
from openclip_linattn.data.checks.shard_report import ShardReport, check_shard


def openclip_samples(paths: list[Path]) -> list[dict]:
    """The samples of the shards, in this order, up to OpenCLIP's image transform."""
    wds = pytest.importorskip("webdataset")
    from open_clip_train.data import (
        filter_no_caption_or_no_image,
        log_and_continue,
        tarfile_to_samples_nothrow,
    )

    return list(
        wds.DataPipeline(
            wds.SimpleShardList([str(path) for path in paths]),
            tarfile_to_samples_nothrow,
            wds.select(filter_no_caption_or_no_image),
            wds.decode("pilrgb", handler=log_and_continue),
            wds.rename(image="jpg;png;jpeg;webp", text="txt"),
        )
    )


def members(key: str, suffixes: str, number: int) -> list[tuple[str, bytes]]:
    """Members of a sample whose image is of one color, `number`, which its caption names."""
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), (number, 0, 0)).save(buffer, "PNG")
    text = str(number).encode()
    content = {"txt": text, "json": b"{}"}
    return [(f"{key}.{suffix}", content.get(suffix, buffer.getvalue())) for suffix in suffixes.split()]


def mixed(samples: list[dict]) -> bool:
    """Whether some image stands beside the caption of another."""
    return any(str(sample["image"].getpixel((0, 0))[0]) != sample["text"] for sample in samples)


MEETINGS = [
    ("png json", "json txt png", "apart"),
    ("png", "json txt png", "mixing"),
    ("png json", "txt json png", "mixing"),
    ("txt", "png txt json", "mixing"),
    ("txt json", "jpg txt json", "mixing"),
    ("txt png", "jpg txt json", "mixing"),
    ("txt jpg", "png txt json", "joining"),
    ("png txt", "json png txt", "joining"),
    ("png txt json", "png txt json", "apart"),
    ("json", "png txt json", "joining"),
    ("json", "png", "joining"),
]


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("last", "first", "kind"), MEETINGS)
def test_openclip_mixes_captions_exactly_where_it_is_said(last, first, kind, tmp_path, make_tar):
    ends = make_tar(tmp_path / "0.tar", [*members("000", "png txt", 1), *members("k", last, 2)])
    starts = make_tar(tmp_path / "1.tar", [*members("k", first, 3), *members("001", "png txt", 4)])
    report = check(str(tmp_path))
    overlap = report.overlap
    found = {"mixing": overlap.mixing, "joining": overlap.joining, "apart": overlap.apart}
    assert {name: meetings.pairs for name, meetings in found.items()} == {
        name: int(name == kind) for name in found
    }
    assert found[kind].examples == [("0.tar", "1.tar", "k")]
    assert any("0.tar and 1.tar, k" in text for text in (report.errors + report.warnings))
    assert bool(report.errors) == (kind == "mixing")
    assert mixed(openclip_samples([ends, starts])) == (kind == "mixing")
    assert not mixed(openclip_samples([starts, ends]))


def test_the_order_of_the_shards_does_not_matter(tmp_path, make_tar):
    make_tar(tmp_path / "0.tar", [*members("k", "json txt png", 3), *members("000", "png txt", 4)])
    make_tar(tmp_path / "1.tar", [*members("001", "png txt", 1), *members("k", "png", 2)])
    (error,) = check(str(tmp_path)).errors
    assert "1 pair of shards (such as 1.tar and 0.tar, k)" in error
    assert "the image of the one beside the caption of the other" in error


def test_a_shard_does_not_meet_itself(tmp_path, make_tar):
    make_tar(tmp_path / "0.tar", members("k", "txt png json", 1))
    assert check(str(tmp_path)).problems == []


def test_all_pairs_are_counted_and_a_few_are_named(tmp_path, make_tar):
    for number in range(10):
        make_tar(tmp_path / f"{number}.tar", members("k", "txt png json", number))
    overlap = check(str(tmp_path)).overlap
    assert overlap.apart.pairs == 90
    assert overlap.apart.examples == [("0.tar", f"{number}.tar", "k") for number in (1, 2, 3)]


def test_a_shard_that_begins_with_the_same_key_otherwise_is_another(tmp_path, make_tar):
    # 0.tar begins and ends with k, but by other suffixes than its followers begin with.
    make_tar(tmp_path / "0.tar", [*members("k", "png txt", 1), *members("k", "txt png json", 2)])
    make_tar(tmp_path / "1.tar", members("k", "txt png json", 3))
    make_tar(tmp_path / "2.tar", members("k", "txt png json", 4))
    assert check(str(tmp_path)).overlap.apart.pairs == 6


def test_shards_of_one_name_are_told_apart_by_their_paths(good_set, tmp_path, make_tar, make_sample):
    other = tmp_path / "other"
    other.mkdir()
    (other / "00001.tar").write_bytes((good_set / "00001.tar").read_bytes())
    (other / "00009.tar").write_bytes(b"")
    report = check(f"{good_set}::{other}")
    assert report.overlap.duplicates == [[f"{good_set}/00001.tar", f"{other}/00001.tar"]]
    assert [shard.name for shard in report.shards if shard.label is None] == [
        "00000.tar",
        "00002.tar",
        "00003.tar",
        "00009.tar",
    ]
    assert "label" not in report.to_json()["shards"][1]


def test_a_shard_that_was_read_in_part_has_no_last_key(good_set):
    keys = check_shard(str(good_set / "00000.tar"), limit=3).keys
    assert (keys.first, keys.first_suffixes) == ("000000000", ["jpg", "txt", "json"])
    assert (keys.last, keys.high, keys.sketch) == (None, None, [])


def test_only_a_usable_sample_is_a_mixture():
    assert joined_suffixes(["jpg"], ["json", "txt", "jpg", "cls"]) == ["json", "txt"]
    assert mixes(["jpg"], ["json", "txt"])
    assert not mixes(["jpg"], ["json"])
    assert not mixes(["json"], ["jpg", "txt"])
    assert not mixes([], [])
    # OpenCLIP takes the jpg of two images, which is the earlier sample's, as its caption is.
    assert not mixes(["jpg", "txt"], ["png"])
    assert mixes(["png", "txt"], ["jpg"])


def test_the_same_samples_under_two_names_are_found_whatever_their_order(
    good_set, tmp_path, make_tar, make_sample
):
    samples = [make_sample(f"00001{n:04d}", n) for n in range(10)]
    make_tar(good_set / "copy.tar", [member for sample in samples[3:] + samples[:3] for member in sample])
    report = check(str(good_set))
    assert report.overlap.duplicates == [["copy.tar", "00001.tar"]]
    assert report.overlap.shared == 0
    assert [text for text in report.warnings if "copy.tar" in text] == [
        "copy.tar, 00001.tar hold the same samples (keys, captions and image sizes)."
    ]
    make_tar(good_set / "copy.tar", [m for sample in samples[:-1] for m in sample])
    assert check(str(good_set)).overlap.duplicates == []


def test_empty_shards_are_no_duplicates(tmp_path, make_tar):
    for name in ("0.tar", "1.tar"):
        make_tar(tmp_path / name, [])
    assert check(str(tmp_path)).overlap.duplicates == []


def test_a_digest_knows_key_caption_and_size():
    def digest(*samples: tuple[str, str | None, tuple[int, int] | None]) -> str:
        content = ContentDigest()
        for sample in samples:
            content.add(*sample)
        return content.hex()

    one, two = ("a", "x", (3, 4)), ("b", "y", None)
    assert digest(one, two) == digest(two, one)
    others = [
        (("c", "x", (3, 4)), two),
        (("a", "z", (3, 4)), two),
        (("a", "x", (4, 3)), two),
        (one,),
        (one, one),
        (),
    ]
    assert len({digest(one, two), *(digest(*other) for other in others)}) == 7


def test_keys_of_one_shard_in_another_are_found(good_set, make_tar, make_sample):
    names = ["000000004", "000000555", "000010001"]
    make_tar(good_set / "other.tar", [m for n, key in enumerate(names) for m in make_sample(key, n + 100)])
    report = check(str(good_set))
    assert report.overlap.overlapping == 3
    assert (report.overlap.shared, report.overlap.sampled) == (2, 21)
    assert any("2 of 21 sampled keys" in text and "other.tar" in text for text in report.warnings)


def test_ranges_that_do_not_meet_prove_that_no_key_is_shared(good_set):
    overlap = check(str(good_set)).overlap
    assert (overlap.overlapping, overlap.sampled, overlap.shared) == (0, 0, 0)


def shard_of(name: str, low: int, high: int) -> ShardReport:
    tracker = KeyTracker()
    for number in range(low, high + 1):
        tracker.add(f"{number:06d}", ["jpg", "txt"])
    return ShardReport(name, samples=high - low + 1, keys=tracker.summary(complete=True), digest=name)


@pytest.mark.parametrize(
    ("ranges", "meeting"),
    [
        ([(0, 9), (10, 19)], set()),
        ([(0, 10), (10, 19)], {0, 1}),
        ([(10, 19), (0, 10)], {0, 1}),
        ([(0, 99), (10, 19), (30, 39), (100, 110)], {0, 1, 2}),
        ([(0, 20), (5, 6), (15, 40), (39, 50), (51, 60)], {0, 1, 2, 3}),
    ],
)
def test_overlapping_ranges(ranges, meeting):
    shards = [shard_of(f"{place}.tar", *ends) for place, ends in enumerate(ranges)]
    assert find_overlap(shards).overlapping == len(meeting)


def test_shards_that_share_half_of_their_keys_are_found_by_their_sketches():
    overlap = find_overlap([shard_of("0.tar", 0, 9999), shard_of("1.tar", 5000, 14999)])
    assert overlap.sampled <= 32
    assert overlap.shared >= 4
    assert overlap.sharing == ["0.tar", "1.tar"]


def test_written_twice_is_told_from_pulled_apart():
    tracker = KeyTracker()
    for key, suffixes in [
        ("a", "jpg txt json"),
        ("b", "jpg"),
        ("c", "jpg txt"),
        ("b", "txt"),
        ("a", "jpg txt json"),
        ("b", "json"),
        ("d", "txt"),
        ("c", "json txt"),
    ]:
        tracker.add(key, suffixes.split())
    assert (tracker.repeated, tracker.split) == (2, 1)


def test_both_are_counted_and_said(tmp_path, make_tar, make_sample):
    one, two, three = (make_sample(f"00{n}", n) for n in range(3))
    make_tar(tmp_path / "0.tar", [*one, *one, *two[:2], *three, *two[2:]])
    report = check(str(tmp_path))
    assert (report.shards[0].repeated_keys, report.shards[0].split_keys) == (1, 1)
    assert any("under a key of their own shard: 1." in text for text in report.warnings)
    assert any("Keys whose members are pulled apart" in text for text in report.warnings)


def test_a_shard_that_is_listed_twice_is_read_once_and_named(good_set):
    seen: list[str] = []
    shard = good_set / "00000.tar"
    report = check(
        f"{good_set}/{{00000..00001}}.tar::{shard}", watch=lambda report, kept: seen.append(report.name)
    )
    assert seen == ["00000.tar", "00001.tar"]
    assert (report.samples, report.total_shards, report.complete) == (20, 2, True)
    assert report.repeated == [str(shard)]
    assert any("1 shard is listed more than once" in text for text in report.warnings)


def test_names_in_other_encodings_have_digests(tmp_path, make_tar, make_sample):
    make_tar(
        tmp_path / "0.tar", [("caf\udce9." + name.split(".")[1], data) for name, data in make_sample("k")]
    )
    report = check(str(tmp_path))
    assert (report.usable, report.shards[0].keys.first) == (1, "caf\udce9")
