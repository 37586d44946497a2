import gc
import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from clip_benchmark.datasets.builder import build_wds_dataset, image_captions_collate_fn
from clip_benchmark.datasets.flickr import Flickr
from clip_benchmark.metrics import zeroshot_retrieval
from torch import Tensor
from torch.nn.functional import normalize

from openclip_linattn.errors import UserError
from openclip_linattn.zeroshot.checkpoints import CheckpointError, find_checkpoints
from openclip_linattn.zeroshot.encoders.models import LoadedModel, load_model
from openclip_linattn.zeroshot.retrieval import ranks
from openclip_linattn.zeroshot.retrieval.opening import open_retrieval_set
from openclip_linattn.zeroshot.retrieval.ranks import recall_hits
from openclip_linattn.zeroshot.retrieval.scoring import retrieval_result, score_retrieval
from openclip_linattn.zeroshot.sets.streaming import DataError

CPU = torch.device("cpu")
# webdataset's own opening of shards, which clip_benchmark uses, leaves them to be closed by the collector.
UNCLOSED = pytest.mark.filterwarnings(r"ignore:unclosed file .*\.tar'>:ResourceWarning")


def captioned(make: Any, count: int = 24) -> dict[str, dict[str, bytes]]:
    """`count` images with one to four captions each, all different."""
    content = make.samples(count, "jpg")
    for number, members in enumerate(content.values()):
        values = json.loads(members["json"])
        said = [f"number {number}, view {view}: {values['color']}" for view in range(1 + number % 4)]
        members["txt"] = "\n".join(said).encode()
        del members["cls"], members["json"]
    return content


def write_tars(folder: Path, content: dict[str, dict[str, bytes]], make: Any, shards: int = 2) -> Path:
    make.set(folder, content, shards)
    for name in ("classnames.txt", "label_sets.json", "zeroshot_classification_templates.txt"):
        (folder / name).unlink()
    (folder / "dataset_type.txt").write_text("retrieval\n")
    return folder


@pytest.fixture
def tars(tmp_path: Path, make: Any) -> Path:
    return write_tars(tmp_path / "captioned", captioned(make), make)


def theirs(loaded: LoadedModel, loader: Any) -> dict[str, float]:
    return zeroshot_retrieval.evaluate(  # type: ignore[no-any-return]
        loaded.clip, loader, loaded.tokenizer, "cpu", amp=False, recall_k_list=[1, 5, 10]
    )


def assert_equal_recalls(ours: dict[str, Any], found: dict[str, float]) -> None:
    for k in (1, 5, 10):
        assert ours[f"image_to_text_recall@{k}"] == pytest.approx(found[f"text_retrieval_recall@{k}"])
        assert ours[f"text_to_image_recall@{k}"] == pytest.approx(found[f"image_retrieval_recall@{k}"])


@UNCLOSED
def test_recalls_are_those_of_clip_benchmark_on_the_same_tars(loaded: LoadedModel, tars: Path) -> None:
    data = build_wds_dataset("captioned", loaded.transform, data_dir=str(tars))
    loader = torch.utils.data.DataLoader(data.batched(7), batch_size=None)
    found = theirs(loaded, loader)
    del data, loader
    gc.collect()
    advanced: list[int] = []
    opened = open_retrieval_set(tars)
    ours = score_retrieval(loaded, opened, batch_size=5, workers=2, advance=advanced.append)
    assert_equal_recalls(ours, found)
    assert (ours["task"], ours["images"], ours["texts"]) == ("retrieval", 24, 60)
    assert sum(advanced) == opened.steps == 24 + 60
    intervals = {name: value for name, value in ours.items() if name.endswith("_interval")}
    for name, (low, high) in intervals.items():
        assert low <= ours[name.removesuffix("_interval")] <= high
    assert len(intervals) == 6
    json.dumps(ours, allow_nan=False)


def random_features(seed: int, images: int, captions: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    owners = torch.repeat_interleave(torch.arange(images), torch.tensor(captions))
    left = normalize(torch.randn(images, 12, generator=rng), dim=1)
    right = normalize(left[owners] + 0.9 * torch.randn(len(owners), 12, generator=rng), dim=1)
    return left, right, owners


@pytest.mark.parametrize("blocks", [(1024, 8192), (7, 11), (1, 1)])
def test_blocks_of_any_size_give_what_clip_benchmark_counts(
    blocks: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "_IMAGES_PER_BLOCK", blocks[0])
    monkeypatch.setattr(ranks, "_TEXTS_PER_BLOCK", blocks[1])
    images, texts, owners = random_features(0, 40, [1 + number % 5 for number in range(40)])
    hits = recall_hits(images, texts, owners, (1, 5, 10), device=CPU)
    scores = texts @ images.T
    positive = torch.zeros_like(scores, dtype=torch.bool)
    positive[torch.arange(len(texts)), owners] = True
    for column, k in enumerate((1, 5, 10)):
        to_image = zeroshot_retrieval.recall_at_k(scores, positive, k) > 0
        to_text = zeroshot_retrieval.recall_at_k(scores.T, positive.T, k) > 0
        assert torch.equal(hits.texts[:, column].bool(), to_image)
        assert torch.equal(hits.images[:, column].bool(), to_text)
        assert 0.02 < hits.texts[:, column].mean() < 1
    assert set(hits.images.unique().tolist()) == set(hits.texts.unique().tolist()) == {0.0, 1.0}


def test_features_that_are_all_alike_retrieve_no_better_than_chance() -> None:
    same = normalize(torch.ones(20, 8), dim=1)
    result = retrieval_result(same, same.repeat_interleave(5, dim=0), [5] * 20, device=CPU)
    assert result["text_to_image_recall@5"] == pytest.approx(5 / 20)
    assert result["image_to_text_recall@1"] == pytest.approx(5 / 100)
    # None of the 5 among 10 of 100.
    miss = np.prod([(90 - i) / (100 - i) for i in range(5)])
    assert result["image_to_text_recall@10"] == pytest.approx(1 - miss)


def test_ties_count_as_the_mean_over_their_orders() -> None:
    rng = np.random.default_rng(2)
    basis = torch.eye(4)
    picked = torch.from_numpy(rng.integers(4, size=9))
    said = torch.from_numpy(rng.integers(4, size=18))
    owners = torch.arange(9).repeat_interleave(2)
    hits = recall_hits(basis[picked], basis[said], owners, (1, 5), device=CPU)
    orders: list[tuple[Tensor, Tensor]] = []
    for _ in range(4000):
        scores = basis[said] @ basis[picked].T + 1e-3 * torch.from_numpy(rng.random((18, 9))).float()
        best_images = scores.topk(5, dim=1).indices == owners[:, None]
        best_texts = owners[scores.T.topk(5, dim=1).indices] == torch.arange(9)[:, None]
        orders.append((best_images, best_texts))
    for column, k in enumerate((1, 5)):
        to_image = torch.stack([each[0][:, :k].any(dim=1) for each in orders]).double().mean(dim=0)
        to_text = torch.stack([each[1][:, :k].any(dim=1) for each in orders]).double().mean(dim=0)
        assert torch.allclose(hits.texts[:, column], to_image, atol=0.04)
        assert torch.allclose(hits.images[:, column], to_text, atol=0.04)


def test_a_caption_that_occurs_twice_is_encoded_once_and_counts_as_a_tie(
    loaded: LoadedModel, tmp_path: Path, make: Any
) -> None:
    content = captioned(make, 8)
    for members in content.values():
        members["txt"] = b"one and the same caption"
    data = open_retrieval_set(write_tars(tmp_path / "same", content, make))
    advanced: list[int] = []
    result = score_retrieval(loaded, data, advance=advanced.append)
    assert sum(advanced) == data.steps == 8 + 1
    assert result["image_to_text_recall@5"] == pytest.approx(5 / 8)
    assert "image_to_text_recall@10" not in result
    assert "text_to_image_recall@10_interval" not in result


def test_features_that_are_not_finite_are_refused(loaded: LoadedModel, tars: Path) -> None:
    with torch.no_grad():
        loaded.clip.text_projection.fill_(float("nan"))
    with pytest.raises(CheckpointError, match="text features on captioned are not finite"):
        score_retrieval(loaded, open_retrieval_set(tars))


@pytest.mark.parametrize("precision", ["amp_bf16", "pure_bf16"])
def test_other_precisions_retrieve_alike(checkpoint: Path, tars: Path, precision: str) -> None:
    model = load_model(find_checkpoints([checkpoint])[0], device=CPU, precision=precision)
    result = score_retrieval(model, open_retrieval_set(tars))
    assert 0 < result["image_to_text_recall@10"] <= 1


# Captions files


def write_images(folder: Path, make: Any, count: int = 24) -> list[tuple[str, list[str]]]:
    """Write `count` images; return (file name, captions)."""
    folder.mkdir(parents=True)
    pairs = []
    for key, members in captioned(make, count).items():
        (folder / f"{key}.jpg").write_bytes(members["jpg"])
        pairs.append((f"{key}.jpg", members["txt"].decode().splitlines()))
    return pairs


Pairs = list[tuple[str, list[str]]]


def coco(path: Path, pairs: Pairs) -> None:
    images = [{"id": 900 - number, "file_name": name} for number, (name, _) in enumerate(pairs)]
    said = [(900 - number, text) for number, (_, texts) in enumerate(pairs) for text in texts]
    path.write_text(
        json.dumps({"images": images, "annotations": [{"image_id": i, "caption": text} for i, text in said]})
    )


def karpathy(path: Path, pairs: Pairs) -> None:
    images = [
        {
            "filepath": "val2014",
            "filename": name,
            "split": "test",
            "sentences": [{"raw": text} for text in texts],
        }
        for name, texts in pairs
    ]
    others = [{**images[0], "filename": "other.jpg", "split": split} for split in ("train", "restval", "val")]
    path.write_text(json.dumps({"images": [*others, *images], "dataset": "coco"}))


def token(path: Path, pairs: Pairs) -> None:
    path.write_text("".join(f"{name}#{i}\t{text}\n" for name, texts in pairs for i, text in enumerate(texts)))


def bars(path: Path, pairs: Pairs) -> None:
    rows = [f"{name}| {i}| {text}" for name, texts in pairs for i, text in enumerate(texts)]
    rows[3] = rows[3].replace("| number", "  number")
    path.write_text("\n".join(["image_name| comment_number| comment", *rows, ""]))


def commas(path: Path, pairs: Pairs) -> None:
    rows = [f"{name},{text}" for name, texts in pairs for text in texts]
    rows[0] = rows[0].replace(",number 0, view 0: ", ',"number 0, view 0: ') + '"'
    path.write_text("\n".join(["image,caption", *rows]))


FORMS = {
    "annotations/captions_val2014.json": coco,
    "dataset_coco.json": karpathy,
    "results_20130124.token": token,
    "results.csv": bars,
    "flickr8k_test_karpathy.txt": commas,
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_of_captions_file_is_the_same_set(
    name: str, tmp_path: Path, make: Any, loaded: LoadedModel, tars: Path
) -> None:
    pairs = write_images(tmp_path / "set" / "val2014", make)
    path = tmp_path / "set" / name
    path.parent.mkdir(exist_ok=True)
    FORMS[name](path, pairs)
    data = open_retrieval_set(path)
    assert [
        (place.path.name, list(texts)) for place, texts in zip(data.images, data.captions, strict=True)
    ] == pairs
    assert (data.texts, data.name, data.source) == (60, path.stem, str(path))
    if name == "dataset_coco.json":
        shards = open_retrieval_set(tars)
        assert sorted(shards.captions) == sorted(data.captions)
        by_file, by_tar = score_retrieval(loaded, data), score_retrieval(loaded, shards)
        assert {key: by_file[key] for key in by_file if not key.endswith("_interval")} == {
            key: pytest.approx(value) for key, value in by_tar.items() if not key.endswith("_interval")
        }


def test_flickrs_set_of_clip_benchmark_agrees(loaded: LoadedModel, tmp_path: Path, make: Any) -> None:
    root = tmp_path / "flickr8k"
    pairs = write_images(root, make)
    path = root / "flickr8k_test_karpathy.txt"
    path.write_text(
        "\n".join(["image,caption", *(f"{name},{text}" for name, texts in pairs for text in texts)])
    )
    data = Flickr(str(root), str(path), loaded.transform)
    loader = torch.utils.data.DataLoader(data, batch_size=9, collate_fn=image_captions_collate_fn)
    assert_equal_recalls(score_retrieval(loaded, open_retrieval_set(path)), theirs(loaded, loader))


def test_a_split_of_karpathys_file_is_chosen_by_name(tmp_path: Path, make: Any) -> None:
    pairs = write_images(tmp_path / "images", make, 6)
    path = tmp_path / "dataset_flickr8k.json"
    karpathy(path, pairs)
    for name in ("other.jpg",):
        shutil.copy(tmp_path / "images" / pairs[0][0], tmp_path / "images" / name)
    assert len(open_retrieval_set(path, split="val").images) == 1
    with pytest.raises(
        UserError, match=re.escape("no split 'dev'; it has train (1 images), restval (1 images), val")
    ):
        open_retrieval_set(path, split="dev")
    with pytest.raises(UserError, match="names a file twice in split 'train'"):
        open_retrieval_set(path, split="train")


def test_the_folder_of_the_images_can_be_named(tmp_path: Path, make: Any) -> None:
    pairs = write_images(tmp_path / "far" / "away", make, 4)
    path = tmp_path / "here" / "captions.json"
    path.parent.mkdir()
    coco(path, pairs)
    with pytest.raises(
        UserError, match=r"000000\.jpg lies neither beside nor below .*captions\.json; name the folder"
    ):
        open_retrieval_set(path)
    assert len(open_retrieval_set(path, images=tmp_path / "far" / "away").images) == 4
    with pytest.raises(UserError, match=r"far holds no 000000\.jpg"):
        open_retrieval_set(path, images=tmp_path / "far")
    with pytest.raises(UserError, match="goes with a captions file"):
        open_retrieval_set(tmp_path, images=tmp_path / "far")


def test_the_stamp_changes_with_a_caption_and_with_an_image(tmp_path: Path, make: Any) -> None:
    pairs = write_images(tmp_path / "images", make, 4)
    path = tmp_path / "c.token"
    token(path, pairs)
    before = open_retrieval_set(path).stamp()
    assert open_retrieval_set(path).stamp() == before
    os.utime(tmp_path / "images" / "000002.jpg", (1, 1))
    touched = open_retrieval_set(path).stamp()
    token(path, [*pairs[:3], (pairs[3][0], ["other"])])
    assert len({before, touched, open_retrieval_set(path).stamp()}) == 3


def edited(change: Callable[[dict[str, Any]], object]) -> Callable[[Path, Pairs], None]:
    def write(path: Path, pairs: Pairs) -> None:
        coco(path, pairs)
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))

    return write


def lines(*rows: str) -> Callable[[Path, Pairs], None]:
    return lambda path, _: path.write_text("\n".join(rows)) and None


WRONG: dict[str, tuple[str, Callable[[Path, Pairs], None], str]] = {
    "an image without captions": (
        "c.json",
        edited(lambda c: c["annotations"].pop(0)),
        r"1 of the 5 images of .*c\.json have no caption, first '000000\.jpg'",
    ),
    "a blank caption only": (
        "c.txt",
        lines("000000.jpg#0\ta", "000001.jpg#0\t "),
        r"1 of the 2 images of .*c\.txt have no caption, first '000001\.jpg'",
    ),
    "a caption of an absent image": (
        "c.json",
        edited(lambda c: c["annotations"].append({"image_id": 7, "caption": "x"})),
        "has a caption for image 7, which is not among its 5 images",
    ),
    "an id twice": (
        "c.json",
        edited(lambda c: c["images"].append(c["images"][0])),
        "lists 6 images with 5 different ids",
    ),
    "a file twice": (
        "c.json",
        edited(lambda c: c["images"].append({"id": 1, "file_name": "000000.jpg"})),
        "names a file for two images; 6 images have 5 files",
    ),
    "a missing image": (
        "c.json",
        edited(lambda c: c["images"][4].update(file_name="gone.jpg")),
        r"1 of the 5 images of .* do not exist, first .*gone\.jpg; fetch them",
    ),
    "other keys": ("c.json", edited(lambda c: c["images"][0].pop("file_name")), "neither COCO's.*KeyError"),
    "a list": ("c.json", lines("[1, 2]"), r"c\.json has no list 'images'"),
    "no JSON": ("c.json", lines("{"), r"c\.json is not valid JSON"),
    "other text": ("c.txt", lines("some", "words"), r"c\.txt is no caption file: .*name\.jpg,caption"),
    "an empty file": ("c.csv", lines("image,caption"), r"c\.csv is no caption file"),
    "a bad line": (
        "c.csv",
        lines("image,caption", "000000.jpg,a", "000001.jpg"),
        "line 3 has not the form.*000001",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_captions_file_is_told_in_a_sentence(case: str, tmp_path: Path, make: Any) -> None:
    name, write, reason = WRONG[case]
    pairs = write_images(tmp_path / "images", make, 5)
    write(tmp_path / name, pairs)
    with pytest.raises(UserError, match=reason):
        open_retrieval_set(tmp_path / name)


def test_a_captions_file_in_another_encoding_is_named(tmp_path: Path) -> None:
    path = tmp_path / "c.token"
    path.write_bytes(b"a.jpg#0\tcaf\xe9\n")
    with pytest.raises(UserError, match=r"c\.token is not UTF-8 text \(byte 11\)"):
        open_retrieval_set(path)


# Tars


def test_blank_captions_are_left_out_with_a_notice(
    tmp_path: Path, make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    content = captioned(make, 4)
    content["000001"]["txt"] = b"first\n\n  \nlast\n"
    with caplog.at_level(logging.WARNING):
        data = open_retrieval_set(write_tars(tmp_path / "set", content, make, shards=1))
    assert data.captions[1] == ("first", "last")
    assert "2 captions of" in caplog.text


def test_shards_with_captions_need_no_type_and_may_be_a_pattern(tars: Path) -> None:
    (tars / "dataset_type.txt").unlink()
    every = open_retrieval_set(tars)
    assert (every.name, every.source) == ("captioned", str(tars / "test"))
    assert open_retrieval_set(f"{tars}/test/{{0..1}}.tar").captions == every.captions
    assert len(open_retrieval_set(tars / "test" / "1.tar").images) == 12
    (tars / "test").rename(tars / "val")
    assert open_retrieval_set(tars, split="val").captions == every.captions


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:3000])


TARS: dict[str, tuple[Callable[[Path, Any], object], str]] = {
    "classification": (
        lambda folder, _: (folder / "dataset_type.txt").write_text("classification"),
        r"dataset_type\.txt says 'classification': this is no retrieval set",
    ),
    "one tar too few": (lambda folder, _: (folder / "test" / "1.tar").unlink(), "says 2 shard"),
    "a cut tar": (lambda folder, _: cut(folder / "test" / "1.tar"), r"1\.tar"),
    "a compressed tar": (
        lambda folder, _: (
            shutil.make_archive(str(folder / "test" / "1"), "gztar", folder, "dataset_type.txt")
            and (folder / "test" / "1.tar.gz").replace(folder / "test" / "1.tar")
        ),
        r"1\.tar is compressed",
    ),
    "no txt": (
        lambda folder, make: make.tar(folder / "test" / "1.tar", {"k": {"jpg": b"1", "cls": b"1"}}),
        r"1\.tar: sample 'k' has no txt member with captions; members seen: jpg, cls",
    ),
    "no image": (
        lambda folder, make: make.tar(folder / "test" / "1.tar", {"k": {"gif": b"1", "txt": b"1"}}),
        r"1\.tar: sample 'k' has no image .*members seen: gif, txt",
    ),
    "other encoding": (
        lambda folder, make: make.tar(folder / "test" / "1.tar", {"k": {"jpg": b"1", "txt": b"\xe9"}}),
        r"sample 'k': its txt is not UTF-8",
    ),
    "no caption": (
        lambda folder, make: make.tar(folder / "test" / "1.tar", {"k": {"jpg": b"1", "txt": b"\n"}}),
        r"1 of the 13 images of .* have no caption, first 'k'",
    ),
    "empty": (
        lambda folder, make: [make.tar(folder / "test" / f"{i}.tar", {}) for i in range(2)],
        r"captioned/test has no image",
    ),
}


@pytest.mark.parametrize("case", TARS)
def test_wrong_tars_are_told_in_a_sentence(case: str, tars: Path, make: Any) -> None:
    spoil, reason = TARS[case]
    spoil(tars, make)
    with pytest.raises(UserError, match=reason):
        open_retrieval_set(tars)


def test_a_folder_without_tars_points_to_its_captions_file(tmp_path: Path, make: Any) -> None:
    with pytest.raises(UserError, match="holds no tar and no captions file"):
        open_retrieval_set(tmp_path)
    coco(tmp_path / "captions.json", [])
    with pytest.raises(
        UserError, match=r"holds no tar; for a captions file name the file itself, such as .*captions\.json"
    ):
        open_retrieval_set(tmp_path)
    with pytest.raises(UserError, match=r"captions\.json has no list 'images'"):
        open_retrieval_set(tmp_path / "captions.json")


@pytest.mark.parametrize("workers", [0, 2])
def test_an_image_that_does_not_decode_is_named(
    loaded: LoadedModel, tars: Path, make: Any, workers: int
) -> None:
    make.tar(tars / "test" / "1.tar", {"k": {"jpg": b"none", "txt": b"a"}})
    with pytest.raises(DataError, match=r"1\.tar: image 'k': its jpg does not decode"):
        score_retrieval(loaded, open_retrieval_set(tars), workers=workers)


def test_a_tar_that_shrinks_after_it_was_opened_is_named(loaded: LoadedModel, tars: Path) -> None:
    data = open_retrieval_set(tars)
    cut(tars / "test" / "1.tar")
    with pytest.raises(DataError, match=r"1\.tar: image '\d+': its tar has become shorter"):
        score_retrieval(loaded, data)
