"""One evaluation for all tasks: which set is which task, the rows they give, and what is kept of them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from openclip_linattn.errors import UserError
from openclip_linattn.zeroshot.benchmarks.names import check_names
from openclip_linattn.zeroshot.encoders.models import LoadedModel
from openclip_linattn.zeroshot.evaluate import EvaluationError, EvaluationOptions, evaluate
from openclip_linattn.zeroshot.probe.scoring import score_probe
from openclip_linattn.zeroshot.results.intervals import wilson
from openclip_linattn.zeroshot.results.rows import row_key
from openclip_linattn.zeroshot.retrieval.opening import open_retrieval_set
from openclip_linattn.zeroshot.retrieval.scoring import score_retrieval
from openclip_linattn.zeroshot.sets.dataset import open_evaluation_set

# clip_benchmark leaves shards to be closed by the collector.
UNCLOSED = pytest.mark.filterwarnings(r"ignore:unclosed file .*\.tar'>:ResourceWarning")


def options(**changes: Any) -> EvaluationOptions:
    return EvaluationOptions(**{"workers": 0, "batch_size": 16, "save": False, **changes})


def kept(row: dict[str, Any]) -> dict[str, Any]:
    """The kept predictions of a row."""
    with np.load(Path(row["checkpoint"]).parent / row["predictions"]) as file:
        return dict(file)


def captioned(make: Any, count: int = 12) -> dict[str, dict[str, bytes]]:
    return {
        key: {"png": members["png"], "txt": f"first of {key}\nsecond of {key}".encode()}
        for key, members in make.samples(count).items()
    }


def tars(folder: Path, make: Any) -> Path:
    make.set(folder, captioned(make))
    (folder / "dataset_type.txt").write_text("retrieval\n")
    return folder


def coco(folder: Path, make: Any) -> Path:
    folder.mkdir()
    for key, members in captioned(make).items():
        (folder / f"{key}.png").write_bytes(members["png"])
    keys = list(captioned(make))
    path = folder / "captions.json"
    images = [{"id": number, "file_name": f"{key}.png"} for number, key in enumerate(keys)]
    annotations = [{"image_id": number, "caption": f"first of {key}"} for number, key in enumerate(keys)]
    path.write_text(json.dumps({"images": images, "annotations": annotations}))
    return path


@pytest.mark.parametrize("prefix", ["", "retrieval:"])
@pytest.mark.parametrize("write", [tars, coco])
def test_a_set_of_captions_gives_a_row_of_recalls(
    loaded: LoadedModel, run: Path, tmp_path: Path, make: Any, write: Callable[..., Path], prefix: str
) -> None:
    place = write(tmp_path / "said", make)
    path = run / "checkpoints" / "epoch_2.pt"
    (row,) = evaluate([path], [f"{prefix}{place}"], options(save=True))
    expected = score_retrieval(loaded, open_retrieval_set(place), batch_size=16)
    assert {key: row[key] for key in expected} == expected
    assert (row["task"], row["label_set"], row["data"]) == (
        "retrieval", "retrieval", open_retrieval_set(place).source,
    )  # fmt: skip
    assert [json.loads(line) for line in (path.parent / "zeroshot.jsonl").read_text().splitlines()] == [row]


@pytest.mark.parametrize("inside", ["", "test", "test/{0..1}.tar"])
def test_the_mark_of_retrieval_is_found_from_any_way_to_name_the_tars(
    checkpoint: Path, tmp_path: Path, make: Any, inside: str
) -> None:
    place = tars(tmp_path / "said", make) / inside
    (row,) = evaluate([checkpoint], [str(place)], options())
    assert row["images"] == 12


def test_a_set_within_a_set_for_retrieval_is_not_one(
    checkpoint: Path, tmp_path: Path, make: Any, data_folder: Path
) -> None:
    outer = tars(tmp_path / "said", make)
    inner = shutil.copytree(data_folder, outer / "figures")
    rows = evaluate([checkpoint], [inner], options())
    assert [row["label_set"] for row in rows] == ["color x shape", "color", "shape"]


def test_the_images_of_a_captions_file_can_lie_elsewhere(checkpoint: Path, tmp_path: Path, make: Any) -> None:
    path = coco(tmp_path / "said", make)
    moved = path.rename(tmp_path / "captions.json")
    elsewhere = (tmp_path / "said").rename(tmp_path / "a")
    (row,) = evaluate([checkpoint], [moved], options(images=elsewhere))
    assert row["images"] == 12


def test_rows_are_kept_when_the_captions_are_and_not_else(
    run: Path, tmp_path: Path, make: Any, builds: list[str]
) -> None:
    path = coco(tmp_path / "said", make)
    first = evaluate([run], [path], options(save=True))
    assert evaluate([run], [path], options(save=True)) == first
    assert builds == ["epoch_2.pt", "epoch_10.pt"]
    path.write_text(path.read_text().replace("first of 000003", "other"))
    evaluate([run], [path], options(save=True))
    assert len(builds) == 4


def probe_sets(tmp_path: Path, make: Any) -> tuple[Path, Path]:
    content = list(make.samples(80).items())
    return (
        make.set(tmp_path / "train", dict(content[:50])),
        make.set(tmp_path / "test", dict(content[50:])),
    )


def test_a_probe_is_trained_on_one_set_and_tested_on_the_other(
    loaded: LoadedModel, run: Path, tmp_path: Path, make: Any, builds: list[str]
) -> None:
    train, test = probe_sets(tmp_path, make)
    path = run / "checkpoints" / "epoch_2.pt"
    wanted = options(save=True, probe=train, label_sets=["color"])
    (row,) = evaluate([path], [test], wanted)
    opened = [open_evaluation_set(folder, label_sets=["color"]) for folder in (train, test)]
    expected = score_probe(loaded, *opened, batch_size=16).result
    assert {key: row[key] for key in expected} == json.loads(json.dumps(expected))
    assert (row["label_set"], row["train_data"]) == ("color/probe", str(train / "test"))
    few = options(save=True, probe=train, label_sets=["color"], shots=2)
    (other,) = evaluate([path], [test], few)
    assert (other["label_set"], other["n_train"]) == ("color/probe-2-shot", 8)
    assert evaluate([path], [test], wanted) == [row]
    assert len(builds) == 2
    assert evaluate([path], [test], options(probe=train))[0]["label_set"] == "probe"


def test_probes_of_two_training_sets_have_rows_of_their_own(
    run: Path, tmp_path: Path, make: Any, builds: list[str]
) -> None:
    first, test = probe_sets(tmp_path, make)
    second = make.set(tmp_path / "fewer", dict(list(make.samples(40).items())))
    path = run / "checkpoints" / "epoch_2.pt"

    def probed(train: Path) -> list[dict[str, Any]]:
        return evaluate([path], [test], options(save=True, probe=train, label_sets=["color"]))

    rows = [probed(first), probed(second)]
    assert [row["train_data"] for (row,) in rows] == [str(first / "test"), str(second / "test")]
    assert rows[0][0]["predictions"] != rows[1][0]["predictions"]
    assert [probed(first), probed(second)] == rows
    assert len(builds) == 2
    assert len((path.parent / "zeroshot.jsonl").read_text().splitlines()) == 2


def test_rows_that_have_no_training_set_keep_the_names_of_their_predictions() -> None:
    row = {"checkpoint": "/logs/a/checkpoints/epoch_1.pt", "data": "/sets/x", "label_set": "color"}
    assert row_key(row) == ("epoch_1.pt", "/sets/x", "color", None)
    resized = {**row, "image_size": 64, "trained_image_size": 32}
    assert row_key(resized) == ("epoch_1.pt", "/sets/x", "color", 64)


@UNCLOSED
def test_sets_of_clip_benchmark_that_fail_leave_the_others(
    run: Path, data_folder: Path, builds: list[str]
) -> None:
    wanted = options(
        save=True,
        benchmarks=["cifar10", "wds/figures"],
        benchmark_root=str(data_folder),
        label_sets=["color"],
    )
    path = run / "checkpoints" / "epoch_2.pt"
    with pytest.raises(EvaluationError, match=r"epoch_2\.pt: cifar10: the data is not all in") as caught:
        evaluate([path], [data_folder], wanted)
    ours, theirs = caught.value.rows
    assert (ours["dataset"], ours["label_set"]) == ("figures", "color")
    assert (theirs["dataset"], theirs["label_set"]) == ("wds/figures", "clip_benchmark")
    assert theirs["n"] == 45
    alone = options(save=True, benchmarks=["wds/figures"], benchmark_root=str(data_folder))
    assert evaluate([path], [], alone) == [theirs]
    assert builds == ["epoch_2.pt"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("cifar11", r"knows no set or collection 'cifar11'.*the closest are .*cifar10"),
        ("figures", r"knows no set or collection 'figures'.*a folder of tars is wds/NAME"),
    ],
)
def test_a_name_that_clip_benchmark_does_not_know_is_told_before_a_model_is_built(
    checkpoint: Path, data_folder: Path, builds: list[str], name: str, reason: str
) -> None:
    wanted = options(benchmarks=["wds/figures", name], benchmark_root=str(data_folder))
    with pytest.raises(UserError, match=reason):
        evaluate([checkpoint], [], wanted)
    assert builds == []


def test_every_set_of_clip_benchmark_is_known() -> None:
    from clip_benchmark.datasets.builder import dataset_collection

    check_names([name for group in dataset_collection.values() for name in group])
    check_names(
        ["imagenet1k-unverified", "sun397", "stl10", "renderedsst2", "voc2007_multilabel", "imagenet-o"]
    )
    check_names(
        ["imagenet-w", "babel_imagenet", "caltech101", "dummy", "wds/mine", "tfds/x", "winoground", "xtd10"]
    )


@UNCLOSED
def test_a_set_of_clip_benchmark_is_named_by_its_whole_path(
    run: Path, data_folder: Path, builds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run / "checkpoints" / "epoch_2.pt"
    wanted = {"save": True, "benchmarks": ["wds/figures"]}
    rows = evaluate([path], [], options(**wanted, benchmark_root=str(data_folder)))
    assert rows[0]["data"] == f"wds/figures@{data_folder}"
    monkeypatch.chdir(data_folder.parent)
    assert evaluate([path], [], options(**wanted, benchmark_root="{dataset}")) == rows
    assert builds == ["epoch_2.pt"]


def test_a_model_that_diverged_keeps_the_rows_before_it(
    run: Path, data_folder: Path, tmp_path: Path, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from openclip_linattn.zeroshot.checkpoints import CheckpointError

    def refuse(*_: object, **__: object) -> None:
        raise CheckpointError("its image features are not finite")

    monkeypatch.setattr("openclip_linattn.zeroshot.tasks.score_retrieval", refuse)
    said = tars(tmp_path / "said", make)
    with pytest.raises(EvaluationError, match="not finite") as caught:
        evaluate([run], [data_folder, said], options(save=True, label_sets=["color"]))
    assert [(row["epoch"], row["dataset"]) for row in caught.value.rows] == [(2, "figures"), (10, "figures")]
    assert len((run / "checkpoints" / "zeroshot.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"label_sets": ["color"]}, "--label-set is for classification"),
        ({"classes": "all"}, "--classes is for classification"),
        ({"classnames": "names.txt"}, "--classnames is for classification"),
        ({"templates": "one"}, "--templates is for classification"),
        ({"images": Path("images")}, "--images goes with a captions file"),
        ({"probe": "train"}, "--probe needs classes to test on"),
    ],
)
def test_options_that_no_set_takes_are_refused(
    checkpoint: Path, tmp_path: Path, make: Any, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UserError, match=reason):
        evaluate([checkpoint], [tars(tmp_path / "said", make)], options(**changes))


def test_a_probe_is_tested_on_one_set(checkpoint: Path, data_folder: Path, tmp_path: Path) -> None:
    other = shutil.copytree(data_folder, tmp_path / "other")
    with pytest.raises(UserError, match="--probe is tested on one set, and --data names 2"):
        evaluate([checkpoint], [data_folder, other], options(probe=data_folder))
    with pytest.raises(UserError, match="--probe takes one label set, and --label-set names 2"):
        evaluate([checkpoint], [other], options(probe=data_folder, label_sets=["color", "shape"]))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"benchmarks": ["cifar10"]}, "--benchmark needs --benchmark-root"),
        ({"benchmark_root": "."}, "--benchmark-root was given without --benchmark"),
        ({"shots": 1}, "--shots is for a linear probe"),
        ({"image_sizes": [32, 0]}, "the image size is 0"),
    ],
)
def test_options_without_their_companions_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        options(**changes)


def test_rows_have_intervals_and_a_speed(checkpoint: Path, data_folder: Path) -> None:
    (row,) = evaluate([checkpoint], [data_folder], options(label_sets=["color x shape"]))
    assert row["top1_interval"] == list(wilson(round(row["top1"] * 45), 45))
    assert row["top5_interval"] == list(wilson(round(row["top5"] * 45), 45))
    low, high = row["mean_per_class_interval"]
    assert low <= row["mean_per_class"] <= high
    assert row["images_per_s"] > 0


def test_a_row_lists_a_thousand_classes_at_most(
    checkpoint: Path, data_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("openclip_linattn.zeroshot.results.accuracy.MOST_LISTED", 7)
    rows = evaluate([checkpoint], [data_folder], options())
    assert ["per_class" in row for row in rows] == [False, True, True]


def test_other_image_sizes_have_rows_of_their_own(run: Path, data_folder: Path, builds: list[str]) -> None:
    path = run / "checkpoints" / "epoch_2.pt"
    color = {"label_sets": ["color x shape"], "save": True}
    (native,) = evaluate([path], [data_folder], options(**color))
    rows = evaluate([path], [data_folder], options(**color, image_sizes=[32, 64, 16]))
    assert [row["image_size"] for row in rows] == [32, 64, 16]
    assert [row.get("trained_image_size") for row in rows] == [None, 32, 32]
    assert rows[0] == native
    assert not np.array_equal(kept(rows[1])["best"], kept(native)["best"])
    assert len(builds) == 3
    assert evaluate([path], [data_folder], options(**color, image_sizes=[64])) == [rows[1]]
    assert evaluate([path], [data_folder], options(**color)) == [native]
    assert len(builds) == 3


def test_another_image_size_is_that_of_the_plain_model_resized(
    run: Path, data_folder: Path, make: Any
) -> None:
    import open_clip

    from openclip_linattn.zeroshot.encoders.embeddings import Classifiers
    from openclip_linattn.zeroshot.score import score

    model, _, transform = open_clip.create_model_and_transforms(
        make.model, pretrained=str(run / "checkpoints" / "epoch_2.pt"), force_image_size=64
    )
    resized = LoadedModel(
        model.eval(), open_clip.get_tokenizer(make.model), transform, torch.device("cpu"), "fp32"
    )
    data = open_evaluation_set(data_folder)
    (expected,) = score(Classifiers(resized), data, data.label_sets[:1], batch_size=16, workers=0)
    row = evaluate([run], [data_folder], options(image_sizes=[64], save=True))[0]
    assert {key: row[key] for key in expected.result} == expected.result
    assert np.array_equal(kept(row)["best"], expected.predictions.best)


def test_a_run_that_forced_its_size_was_trained_there(run: Path, data_folder: Path) -> None:
    params = run / "params.txt"
    params.write_text(params.read_text().replace("force_image_size: None", "force_image_size: 64"))
    path = run / "checkpoints" / "epoch_2.pt"
    rows = evaluate([path], [data_folder], options(label_sets=["color"], image_sizes=[32, 64]))
    assert [row.get("trained_image_size") for row in rows] == [64, None]


def test_an_image_smaller_than_a_patch_is_the_checkpoints_failure(
    checkpoint: Path, data_folder: Path
) -> None:
    with pytest.raises(EvaluationError, match=r"epoch_2\.pt does not load as .* at 8 px: "):
        evaluate([checkpoint], [data_folder], options(image_sizes=[8]))
