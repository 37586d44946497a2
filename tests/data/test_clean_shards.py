"""Whole cleanings: nothing is lost, repeated or mixed, and the account adds up."""

import io
import json
import random
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from openclip_linattn.cli.data import app
from openclip_linattn.data.checks.check import check
from openclip_linattn.data.clean import passes, sealing
from openclip_linattn.data.clean.plan import ShardSummary
from openclip_linattn.data.clean.run import clean
from openclip_linattn.data.clean.sealing import Sealed
from openclip_linattn.data.clean.settings import Settings
from openclip_linattn.data.clean.workers import Unfinished
from openclip_linattn.data.clean.writing import cut
from openclip_linattn.data.layout import Part, write_index

EMPTY = Settings(keep_empty_captions=True)
LOST = {"cut image": "damaged image", "html": "not an image", "no caption": "missing caption"}
LOST |= {"latin-1": "caption not UTF-8", "empty": "empty caption"}
KEPT = ("good", "broken json", "upper case", "gray", "no json", "class in words")


@pytest.fixture
def member_sets(make_sample, make_image) -> Callable[[str, int], list[tuple[str, bytes]]]:
    """The members of sample `number`, which its image and its caption both tell, with one fault or oddity."""

    def build(kind: str, number: int) -> list[tuple[str, bytes]]:
        jpg, png = make_image(number), make_image(number, "PNG", "L")
        changes = {
            "good": {},
            "broken json": {"json": b"{'single': quotes}"},
            "upper case": {"jpg": None, "JPG": jpg},
            "gray": {"jpg": None, "png": png},
            "no json": {"json": None},
            "class in words": {"cls": b"cat"},
            "cut image": {"jpg": jpg[: len(jpg) // 2]},
            "html": {"jpg": b"<html>not found</html>"},
            "no caption": {"txt": None},
            "latin-1": {"txt": "café".encode("latin-1")},
            "empty": {"txt": b""},
        }
        return make_sample(f"{number:09d}", number, **{"txt": f"number {number}".encode(), **changes[kind]})

    return build


@pytest.fixture
def case_set(tmp_path, member_sets, make_tar) -> Path:
    """Four shards of twenty: of 80 samples training uses 40, 8 of these without words, and 8 are recoverable."""
    kinds = [
        "cut image",
        "no caption",
        "broken json",
        "latin-1",
        "empty",
        "html",
        "gray",
        "upper case",
        "good",
        "good",
    ]
    for shard in range(4):
        members = [m for n in range(20) for m in member_sets(kinds[n % 10], shard * 10_000 + n)]
        make_tar(tmp_path / "case" / f"{shard:05d}.tar", members)
    return tmp_path / "case"


def read(folder: Path) -> list[dict[str, bytes]]:
    """Members by suffix of each sample in the shards of `folder`, in order; asserts keys by the layout."""
    samples: dict[str, dict[str, bytes]] = {}
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as tar:
            for info in tar:
                key, _, suffix = info.name.partition(".")
                assert key.startswith(path.stem)
                content = tar.extractfile(info)
                assert content is not None
                assert suffix not in samples.setdefault(key, {})
                samples[key][suffix] = content.read()
        keys = [key for key in samples if key.startswith(path.stem)]
        assert keys == [f"{path.stem}{place:04d}" for place in range(len(keys))]
    return list(samples.values())


def numbers(folder: Path) -> list[int]:
    """Numbers of the samples by their captions, each checked against the image and the json beside it."""
    found = []
    for sample in read(folder):
        number = int(sample["txt"].split()[1])
        image = next(data for suffix, data in sample.items() if suffix in ("jpg", "png"))
        with Image.open(io.BytesIO(image)) as picture:
            color = np.asarray(picture.convert("RGB")).reshape(-1, 3).mean(axis=0)
        wanted = np.array([number * 37 % 256, number * 91 % 256, number * 13 % 256])
        if "png" in sample:
            wanted = np.full(3, wanted @ [0.299, 0.587, 0.114])
        assert np.abs(color - wanted).max() < 4
        assert json.loads(sample["json"])["original_key"] == f"{number:09d}"
        found.append(number)
    return found


def openclip_captions(folder: Path) -> list[str]:
    """Captions that OpenCLIP's own reading gives, up to its image transform."""
    wds = pytest.importorskip("webdataset")
    from open_clip_train import data

    pipeline = wds.DataPipeline(
        wds.SimpleShardList([str(path) for path in sorted(folder.glob("*.tar"))]),
        data.tarfile_to_samples_nothrow,
        wds.select(data.filter_no_caption_or_no_image),
        wds.decode("pilrgb", handler=data.log_and_continue),
        wds.rename(image="jpg;png;jpeg;webp", text="txt"),
    )
    return [sample["text"] for sample in pipeline]


@pytest.mark.parametrize(("settings", "out"), [(Settings(samples_per_shard=9), 40), (EMPTY, 48)])
def test_the_case_set_gives_its_usable_and_recoverable_samples(settings, out, case_set, tmp_path):
    account = clean(str(case_set), tmp_path / "out", settings).account
    lost = {"caption not UTF-8": 8, "damaged image": 8, "missing caption": 8, "not an image": 8}
    assert account["dropped"] == (lost if out == 48 else {**lost, "empty caption": 8})
    assert (account["in"], account["out"], account["recovered"], account["json_made"]) == (80, out, 8, 8)
    assert account["filters"] == settings.to_json()
    assert json.loads((tmp_path / "out" / "account.json").read_text()) == account
    assert len(read(tmp_path / "out")) == out


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_openclip_reads_exactly_the_kept_samples_and_the_check_finds_nothing(case_set, tmp_path):
    clean(str(case_set), tmp_path / "out", Settings(samples_per_shard=9), workers=2)
    kept = [shard * 10_000 + n for shard in range(4) for n in range(20) if n % 10 in (2, 6, 7, 8, 9)]
    assert numbers(tmp_path / "out") == kept
    assert openclip_captions(tmp_path / "out") == [f"number {number}" for number in kept]
    report = check(str(tmp_path / "out"))
    assert report.problems == []
    assert report.usable == 40


def test_the_layout_beside_the_tars_is_that_of_the_drawn_sets(good_set, tmp_path):
    clean(str(good_set), tmp_path / "out", Settings(samples_per_shard=10))
    part = Part(tmp_path / "drawn", 40, 10, make=lambda number: pytest.fail("nothing is drawn"))
    part.folder.mkdir()
    write_index(part)
    for path in part.folder.iterdir():
        assert (tmp_path / "out" / path.name).read_text() == path.read_text()


@pytest.mark.parametrize(
    ("kept", "per_shard"), [(0, 5), (1, 5), (5, 5), (6, 5), (99, 10), (101, 10), (40_003, 10_000)]
)
def test_shards_are_as_few_as_can_be_and_even(kept, per_shard):
    bounds = cut(kept, per_shard)
    sizes = np.diff(bounds)
    assert bounds[0] == 0
    assert bounds[-1] == kept
    assert len(sizes) == -(-kept // per_shard)
    assert kept == 0 or sizes.max() - sizes.min() <= 1
    assert kept == 0 or sizes.max() <= per_shard


@pytest.mark.parametrize("seed", range(12))
def test_any_mixture_of_faults_is_accounted_for_to_the_sample(seed, tmp_path, member_sets, make_tar):
    chance = random.Random(seed)
    kept, lost, number = [], [], 0
    for shard in range(chance.randrange(2, 6)):
        members = []
        for _ in range(chance.choice([0, 1, 2, 7, 13]) if shard else 4):
            kind = chance.choice((*KEPT, *LOST)) if number else "good"
            (kept if kind in KEPT else lost).append((number, LOST.get(kind)))
            members += member_sets(kind, number)
            number += 1
        make_tar(tmp_path / "in" / f"{shard}.tar", members, chance.choice(["w", "w:gz"]))
    settings = Settings(samples_per_shard=chance.randrange(1, 9))
    account = clean(str(tmp_path / "in"), tmp_path / "out", settings).account
    assert account["in"] == number
    assert account["in"] == account["out"] + sum(account["dropped"].values())
    reasons = [reason for _, reason in lost]
    assert account["dropped"] == {reason: reasons.count(reason) for reason in reasons}
    assert numbers(tmp_path / "out") == [place for place, _ in kept]
    sizes = json.loads((tmp_path / "out" / "sizes.json").read_text())
    assert list(sizes.values()) == np.diff(cut(len(kept), settings.samples_per_shard)).tolist()


def test_several_processes_write_the_same_bytes(case_set, tmp_path):
    settings = Settings(samples_per_shard=3, resize=10)
    for workers in (1, 2):
        clean(str(case_set), tmp_path / str(workers), settings, workers=workers)
    names = sorted(path.name for path in (tmp_path / "1").iterdir())
    assert len([name for name in names if name.endswith(".tar")]) == 14
    assert names == sorted(path.name for path in (tmp_path / "2").iterdir())
    for name in names:
        if name != ".clean":
            assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()


@pytest.mark.parametrize("field", ["url", "caption", "image"])
def test_the_first_of_equal_samples_is_kept(field, tmp_path, make_sample, make_tar, make_image):
    def members(number: int, of: int):
        equal = {
            "url": {"json": json.dumps({"url": f"https://{of}"}).encode()},
            "caption": {"txt": (" " * (number % 3) + f"number {of}\n").encode()},
            "image": {"jpg": make_image(of)},
        }
        return make_sample(f"{number:09d}", number, **equal[field])

    chance = random.Random(3)
    of = [chance.randrange(20) for _ in range(60)]
    for shard in range(6):
        content = [m for n in range(shard * 10, shard * 10 + 10) for m in members(n, of[n])]
        make_tar(tmp_path / "in" / f"{shard}.tar", content)
    account = clean(str(tmp_path / "in"), tmp_path / "out", Settings(deduplicate=field)).account
    first = [n for n in range(60) if of[n] not in of[:n]]
    assert account["dropped"] == {f"duplicate {field}": 60 - len(first)}
    keys = [json.loads(sample["json"])["original_key"] for sample in read(tmp_path / "out")]
    assert keys == [f"{n:09d}" for n in first]


@pytest.mark.parametrize("chunk", [1, 2, 3, 100])
def test_repeats_are_found_over_the_joints_of_the_parts(chunk, monkeypatch):
    monkeypatch.setattr(sealing, "_CHUNK", chunk)
    hashes = np.array([7, 0, 7, 2**64 - 1, 0, 7, 5, 2**64 - 1], np.uint64)
    assert sealing.repeats(hashes).tolist() == [2, 5, 7]
    assert sealing.repeats(hashes[:0]).tolist() == []


def test_a_sample_without_the_field_is_kept_and_counted(tmp_path, make_sample, make_tar):
    jsons = [{"similarity": 0.4, "url": "a"}, {"url": "a"}, {"similarity": 0.1}, {"similarity": 0.5}]
    members = [
        m for n, value in enumerate(jsons) for m in make_sample(f"{n}", n, json=json.dumps(value).encode())
    ]
    make_tar(tmp_path / "in" / "0.tar", members)
    settings = Settings(min_similarity=0.3, deduplicate="url")
    account = clean(str(tmp_path / "in"), tmp_path / "out", settings).account
    assert account["dropped"] == {"duplicate url": 1, "similarity under 0.3": 1}
    assert account["without_field"] == {"url": 2, "similarity": 1}


def test_a_field_is_looked_for_in_the_first_shards_only(good_set, captionless_set, tmp_path, make_tar):
    for number in range(passes.MAX_TRIED - 2):
        make_tar(captionless_set / f"{number + 2:05d}.tar", [])
    source = f"{captionless_set}::{good_set}/00000.tar"
    account = clean(source, tmp_path / "out", Settings(min_similarity=0.3)).account
    assert account["without_field"] == {"similarity": 10}


@pytest.mark.parametrize(
    ("pending", "outputs", "inputs", "workers", "longest"),
    [
        (40_000, 40_000, 40_000, 1, 8),
        (40, 40_000, 40_000, 4, 2),
        (3, 3, 9, 16, 1),
        (5_000, 5_000, 50, 1, 625),
    ],
)
def test_runs_are_short_enough_to_show_progress(pending, outputs, inputs, workers, longest):
    sealed = Sealed("", [ShardSummary("", None)] * inputs)
    assert passes.longest_run(pending, outputs, sealed, workers) == longest


def test_a_cut_shard_gives_what_it_has_and_is_named(case_set, tmp_path):
    path = case_set / "00002.tar"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2 + 700])
    (case_set / "00003.tar").write_bytes(b"")
    account = clean(str(case_set), tmp_path / "out", Settings()).account
    assert account["in"] == account["out"] + sum(account["dropped"].values()) < 60
    faults = [(Path(fault["shard"]).name, fault["fault"].split(":")[0]) for fault in account["faults"]]
    assert faults == [("00002.tar", "is cut short"), ("00003.tar", "is empty (0 bytes)")]
    assert check(str(tmp_path / "out")).problems == []


def test_shards_from_commands_are_cleaned_like_files(case_set, tmp_path):
    pattern = f"pipe:cat {case_set}/{{00000..00003}}.tar"
    clean(str(case_set), tmp_path / "files", Settings(samples_per_shard=7))
    clean(pattern, tmp_path / "pipes", Settings(samples_per_shard=7), workers=2)
    for path in (tmp_path / "files").glob("*.tar"):
        assert path.read_bytes() == (tmp_path / "pipes" / path.name).read_bytes()


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_command_prints_the_account_and_says_when_all_is_done(case_set, tmp_path):
    first = run("clean", case_set, tmp_path / "out", "--workers", 1)
    assert first.exit_code == 0, first.output
    words = " ".join(first.output.split())
    assert "damaged image │ 8 │ 10 %" in words
    assert "8 jsons made anew" in words
    assert "40 samples in 1 shard" in words
    stamp = (tmp_path / "out" / "00000.tar").stat().st_mtime_ns
    again = run("clean", case_set, tmp_path / "out", "--workers", 1)
    assert again.exit_code == 0
    assert "was complete already: 40 samples" in " ".join(again.output.split())
    assert (tmp_path / "out" / "00000.tar").stat().st_mtime_ns == stamp


def test_json_is_all_that_stands_on_standard_output(case_set, tmp_path):
    result = run("clean", case_set, tmp_path / "out", "--json")
    assert json.loads(result.stdout)["out"] == 40


def test_work_that_failed_ends_with_status_1(case_set, tmp_path, monkeypatch):
    def fail(*arguments, **options):
        raise Unfinished("A sentence.")

    monkeypatch.setattr("openclip_linattn.cli.data.clean.clean", fail)
    result = run("clean", case_set, tmp_path / "out")
    assert (result.exit_code, result.stderr) == (1, "error: A sentence.\n")
