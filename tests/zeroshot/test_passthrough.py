import gc
import io
import json
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from clip_benchmark.datasets.builder import build_wds_dataset
from clip_benchmark.datasets.sugar_crepe import SugarCrepe
from clip_benchmark.metrics import image_caption_selection, zeroshot_classification
from torch.utils.data import DataLoader
from webdataset import WebDataset

from openclip_linattn.data.drawn.shapes import write_shapes
from openclip_linattn.errors import UserError
from openclip_linattn.zeroshot.benchmarks import sets as benchmark_sets
from openclip_linattn.zeroshot.benchmarks.metrics import benchmark_result, encode_benchmark
from openclip_linattn.zeroshot.benchmarks.offline import NetworkRefused, no_network
from openclip_linattn.zeroshot.benchmarks.passthrough import BenchmarkError, mean_top1, run_benchmark
from openclip_linattn.zeroshot.benchmarks.sets import Benchmarks, BenchmarkSet
from openclip_linattn.zeroshot.checkpoints import CheckpointError
from openclip_linattn.zeroshot.encoders.embeddings import Classifiers
from openclip_linattn.zeroshot.encoders.models import LoadedModel
from openclip_linattn.zeroshot.results.intervals import wilson
from openclip_linattn.zeroshot.retrieval.opening import open_retrieval_set
from openclip_linattn.zeroshot.retrieval.scoring import score_retrieval
from openclip_linattn.zeroshot.score import score
from openclip_linattn.zeroshot.sets.dataset import open_evaluation_set

# clip_benchmark, and webdataset's own opening of shards, leave files to be closed by the collector.
pytestmark = [
    pytest.mark.filterwarnings(r"ignore:unclosed file .*\.(tar'>|json'):ResourceWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """Collects what a test leaves behind while its filters for warnings hold."""
    gc.freeze()  # makes the collection quick
    yield
    gc.collect()
    gc.unfreeze()


def run_benchmarks(loaded: LoadedModel, wanted: Benchmarks) -> SimpleNamespace:
    """The results of all sets that could be evaluated, and why the others could not."""
    rows, failures = [], {}
    for name in wanted.names:
        try:
            rows.append(run_benchmark(Classifiers(loaded), name, wanted))
        except BenchmarkError as error:
            failures[name] = str(error)
    return SimpleNamespace(rows=rows, failures=failures)


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sets") / "shapes"
    write_shapes(folder, 2, test_samples=50, image_size=32, samples_per_shard=20)
    return folder


@pytest.mark.parametrize("workers", [0, 5])
def test_a_webdataset_has_the_accuracy_that_our_own_evaluation_finds(
    loaded: LoadedModel, shapes: Path, workers: int
) -> None:
    found = run_benchmarks(loaded, Benchmarks(["wds/shapes"], str(shapes), batch_size=16, workers=workers))
    assert found.failures == {}
    (row,) = found.rows
    data = open_evaluation_set(shapes, label_sets=["color x shape"])
    (ours,) = score(Classifiers(loaded), data, data.label_sets, batch_size=16, workers=0)
    assert {key: row[key] for key in ours.result} == ours.result
    assert row["n"] == 50
    assert row["task"] == "classification"
    assert mean_top1(found.rows) == row["top1"]
    json.dumps(found.rows, allow_nan=False)


def theirs(loaded: LoadedModel, root: Path) -> dict[str, float]:
    data = build_wds_dataset(root.name, loaded.transform, data_dir=str(root))
    loader = DataLoader(data.batched(16), batch_size=None)
    loader.dataset.classes = data.classes  # type: ignore[attr-defined]
    return zeroshot_classification.evaluate(  # type: ignore[no-any-return]
        loaded.clip, loader, loaded.tokenizer, data.classes, data.templates, "cpu", amp=False
    )


def test_accuracies_are_those_of_clip_benchmark(loaded: LoadedModel, shapes: Path) -> None:
    (row,) = run_benchmarks(loaded, Benchmarks(["wds/shapes"], str(shapes))).rows
    expected = theirs(loaded, shapes)
    assert row["top1"] == pytest.approx(expected["acc1"])
    assert row["top5"] == pytest.approx(expected["acc5"])
    assert row["mean_per_class"] == pytest.approx(expected["mean_per_class_recall"])


def write_multilabel(root: Path, make: Any) -> None:
    """Images whose colors and shapes are their classes."""
    content = {}
    names = [*make.colors, *make.shapes]
    for key, members in make.samples(30).items():
        values = json.loads(members["json"])
        out = io.BytesIO()
        np.save(out, np.array([name in values.values() for name in names], dtype=np.int64))
        content[key] = {"png": members["png"], "npy": out.getvalue()}
    make.set(root, content)
    (root / "classnames.txt").write_text("\n".join(names))
    (root / "zeroshot_classification_templates.txt").write_text("a {c}")
    (root / "dataset_type.txt").write_text("multilabel")


def test_several_labels_per_image_have_a_mean_average_precision(
    loaded: LoadedModel, tmp_path: Path, make: Any
) -> None:
    write_multilabel(tmp_path / "many", make)
    found = run_benchmarks(loaded, Benchmarks(["wds/many"], str(tmp_path / "many")))
    assert found.failures == {}
    (row,) = found.rows
    expected = theirs(loaded, tmp_path / "many")
    assert row["mean_average_precision"] == pytest.approx(expected["mean_average_precision"])
    assert (row["n"], row["classes"], mean_top1(found.rows)) == (30, 6, None)


def test_a_retrieval_set_is_known_by_its_type_and_has_the_recalls_of_our_own_evaluation(
    loaded: LoadedModel, tmp_path: Path, make: Any
) -> None:
    content = {
        key: {"png": members["png"], "txt": f"{key} is the first\nthe second of {key}".encode()}
        for key, members in make.samples(20).items()
    }
    folder = make.set(tmp_path / "said", content)
    (folder / "dataset_type.txt").write_text("retrieval")
    found = run_benchmarks(loaded, Benchmarks(["wds/said"], str(tmp_path / "{dataset}")))
    assert found.failures == {}
    ours = score_retrieval(loaded, open_retrieval_set(folder))
    assert {key: found.rows[0][key] for key in ours if not key.endswith("_interval")} == {
        key: pytest.approx(value) for key, value in ours.items() if not key.endswith("_interval")
    }


def test_an_image_without_captions_is_told(loaded: LoadedModel, tmp_path: Path, make: Any) -> None:
    content = {key: {"png": v["png"], "txt": key.encode()} for key, v in make.samples(12).items()}
    content["000003"]["txt"] = b""
    folder = make.set(tmp_path / "said", content)
    (folder / "dataset_type.txt").write_text("retrieval")
    found = run_benchmarks(loaded, Benchmarks(["wds/said"], str(folder)))
    assert found.failures == {"wds/said": "wds/said: 1 of the 12 images of wds/said have no caption"}


def test_coco_as_clip_benchmark_lays_it_out_has_the_recalls_of_our_own_evaluation(
    loaded: LoadedModel, tmp_path: Path, make: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "val2014").mkdir()
    images, annotations = [], []
    for number, (key, members) in enumerate(make.samples(20).items()):
        (tmp_path / "val2014" / f"{key}.png").write_bytes(members["png"])
        images.append({"id": number, "file_name": f"{key}.png"})
        for text in (f"{key} is the first", f"the second of {key}"):
            annotations.append({"id": len(annotations), "image_id": number, "caption": text})
    captions = tmp_path / "coco_test_karpathy.json"
    captions.write_text(json.dumps({"images": images, "annotations": annotations}))
    found = run_benchmarks(loaded, Benchmarks(["mscoco_captions"], str(tmp_path), batch_size=6))
    assert found.failures == {}
    assert capsys.readouterr().out == ""
    ours = score_retrieval(loaded, open_retrieval_set(captions))
    assert {key: found.rows[0][key] for key in ours if not key.endswith("_interval")} == {
        key: pytest.approx(value) for key, value in ours.items() if not key.endswith("_interval")
    }


def test_a_set_on_disk_has_clip_benchmarks_class_names(
    loaded: LoadedModel, tmp_path: Path, make: Any
) -> None:
    for number, (key, members) in enumerate(make.samples(14).items()):
        folder = tmp_path / "fer2013" / "test" / str(number % 7)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{key}.png").write_bytes(members["png"])
    found = run_benchmarks(loaded, Benchmarks(["fer2013"], str(tmp_path / "{dataset_cleaned}"), workers=2))
    assert found.failures == {}
    (row,) = found.rows
    assert (row["n"], row["classes"]) == (14, 7)
    assert "happy" in [name for name, _, _ in row["per_class"]]
    assert row["top1"] <= row["top5"]


def test_caption_selection_is_that_of_clip_benchmark(loaded: LoadedModel, tmp_path: Path, make: Any) -> None:
    images = tmp_path / "val2017"
    images.mkdir()
    entries = {}
    for number, (key, members) in enumerate(make.samples(40).items()):
        (images / f"{key}.png").write_bytes(members["png"])
        said = {"caption": f"one {number}", "negative_caption": f"another {number} thing"}
        entries[str(number)] = {"filename": f"{key}.png", **said}
    (tmp_path / "swap_obj.json").write_text(json.dumps(entries))
    found = run_benchmarks(loaded, Benchmarks(["sugar_crepe/swap_obj"], str(tmp_path), batch_size=9))
    assert found.failures == {}
    data = SugarCrepe(str(images), str(tmp_path / "swap_obj.json"), loaded.transform)
    assert_equal_selection(found.rows[0], loaded, data)
    assert 0 < found.rows[0]["accuracy"] < 1


def assert_equal_selection(row: dict[str, Any], loaded: LoadedModel, data: Any) -> None:
    loader = DataLoader(data, batch_size=7, collate_fn=benchmark_sets.get_dataset_collate_fn("winoground"))
    expected = image_caption_selection.evaluate(loaded.clip, loader, loaded.tokenizer, "cpu", amp=False)
    assert row["task"] == "image_caption_selection"
    assert row["n"] == len(data)
    assert row["image_accuracy"] == pytest.approx(expected["image_acc"])
    assert row["text_accuracy"] == pytest.approx(expected["text_acc"])
    assert row["accuracy"] == pytest.approx(expected["acc"])
    for name in ("image_accuracy", "text_accuracy", "accuracy"):
        assert row[f"{name}_interval"] == list(wilson(round(row[name] * row["n"]), row["n"]))


def test_items_of_two_images_and_two_captions_are_selected_as_in_clip_benchmark(loaded: LoadedModel) -> None:
    rng = torch.Generator().manual_seed(0)
    items = [
        (torch.rand(2, 3, 32, 32, generator=rng), [f"left {number}", f"right {number} side"])
        for number in range(40)
    ]
    loader = DataLoader(items, batch_size=7, collate_fn=benchmark_sets.get_dataset_collate_fn("winoground"))  # type: ignore[arg-type]
    data = BenchmarkSet("pairs", "image_caption_selection", None, 40, iter(loader))
    classifiers = Classifiers(loaded)
    found = encode_benchmark(classifiers, data, advance=lambda _: None)
    row = benchmark_result(classifiers, data, found, batch_size=7)
    assert_equal_selection(row, loaded, items)
    assert 0 < row["image_accuracy"] < 1


def test_sets_that_fail_are_named_and_the_others_go_on(
    loaded: LoadedModel, shapes: Path, tmp_path: Path, make: Any
) -> None:
    few = make.set(tmp_path / "few", {k: {"png": v["png"], "cls": b"1"} for k, v in make.samples(4).items()})
    (few / "classnames.txt").write_text("red\ngreen\n")
    (tmp_path / "shapes").symlink_to(shapes)
    names = ["cifar10", "wds/shapes", "wds/none", "imagenet-a", "vtab/dmlab", "wds/few", "cifar11"]
    found = run_benchmarks(loaded, Benchmarks(names, str(tmp_path / "{dataset}")))
    assert len(found.rows) == 2
    assert "top5" not in found.rows[1]
    assert mean_top1(found.rows) == pytest.approx((found.rows[0]["top1"] + found.rows[1]["top1"]) / 2)
    expected = {
        "cifar10": f"cifar10: the data is not all in {tmp_path}/cifar10",
        "wds/none": f"wds/none: {tmp_path}/none/test/nshards.txt does not exist",
        "imagenet-a": "clip_benchmark would run 'wget https://people.eecs.berkeley.edu",
        "vtab/dmlab": "vtab/dmlab: ModuleNotFoundError",
        "cifar11": "cifar11: ValueError: Unsupported dataset: cifar11",
    }
    assert list(found.failures) == list(expected)
    for name, part in expected.items():
        assert part in found.failures[name]
    assert not (tmp_path / "cifar10").exists()


def test_a_number_of_shards_that_is_wrong_is_told(
    loaded: LoadedModel, data_folder: Path, tmp_path: Path, make: Any
) -> None:
    folder = make.set(tmp_path / "set", make.samples(6))
    (folder / "test" / "nshards.txt").write_text("1\n")
    found = run_benchmarks(loaded, Benchmarks(["wds/set"], str(folder)))
    assert "says 1 shard(s), but 2 tar(s) lie beside it" in found.failures["wds/set"]


@pytest.mark.parametrize(
    ("classes", "reason"),
    [
        ("red\ngreen\n", "labels of wds/set are from 0 to 7, and it has 2 class names"),
        (None, "Templates not specified"),
    ],
)
def test_class_names_that_do_not_fit_are_told(
    loaded: LoadedModel, tmp_path: Path, make: Any, classes: str | None, reason: str
) -> None:
    folder = make.set(tmp_path / "set", make.samples(30))
    if classes is None:
        (folder / "zeroshot_classification_templates.txt").unlink()
    else:
        (folder / "classnames.txt").write_text(classes)
    assert reason in run_benchmarks(loaded, Benchmarks(["wds/set"], str(folder))).failures["wds/set"]


def test_a_class_may_have_an_empty_name(loaded: LoadedModel, tmp_path: Path, make: Any) -> None:
    """As in clip_benchmark's clevr_closest_object_distance."""
    folder = make.set(tmp_path / "set", make.samples(20))
    names = folder / "classnames.txt"
    names.write_text(names.read_text().replace("green bar", ""))
    (row,) = run_benchmarks(loaded, Benchmarks(["wds/set"], str(folder))).rows
    assert [name for name, _, _ in row["per_class"]][2:5] == ["green disk", "", "blue disk"]


def test_a_faulty_image_in_a_worker_is_told_in_a_line(loaded: LoadedModel, tmp_path: Path, make: Any) -> None:
    content = make.samples(4)
    content["000002"]["png"] = b"none"
    folder = make.set(tmp_path / "set", content)
    reason = run_benchmarks(loaded, Benchmarks(["wds/set"], str(folder), workers=1)).failures["wds/set"]
    assert "\n" not in reason
    assert "000002" in reason or "cannot identify image" in reason


def test_a_builder_that_exits_stops_only_its_set(
    loaded: LoadedModel, shapes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = benchmark_sets.build_dataset

    def leave(dataset_name: str, **rest: Any) -> Any:
        return build(dataset_name=dataset_name, **rest) if dataset_name.startswith("wds/") else exit(1)

    monkeypatch.setattr(benchmark_sets, "build_dataset", leave)
    found = run_benchmarks(loaded, Benchmarks(["fer2013", "wds/shapes"], str(shapes)))
    assert found.failures == {"fer2013": "fer2013: SystemExit: 1"}
    assert len(found.rows) == 1


def test_a_diverged_model_stops_at_once(loaded: LoadedModel, shapes: Path) -> None:
    with torch.no_grad():
        loaded.clip.visual.proj.fill_(float("nan"))
    with pytest.raises(CheckpointError, match="image features on wds/shapes are not finite"):
        run_benchmarks(loaded, Benchmarks(["wds/shapes"], str(shapes)))


def test_a_set_that_changes_the_preprocessing_leaves_the_models_own_alone(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, shapes: Path
) -> None:
    steps = list(loaded.transform.transforms)  # type: ignore[attr-defined]

    def build(transform: Any, **_: Any) -> Any:
        transform.transforms.insert(0, None)
        raise UserError("enough")

    monkeypatch.setattr(benchmark_sets, "build_dataset", build)
    assert run_benchmarks(loaded, Benchmarks(["fer2013"], ".")).failures == {"fer2013": "fer2013: enough"}
    assert loaded.transform.transforms == steps  # type: ignore[attr-defined]


def test_names_come_from_collections_and_files_too(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("cifar10\n\n wds/shapes \nimagenetv2\n")
    wanted = Benchmarks(["imagenet_robustness", str(path), "cifar10"], ".")
    assert wanted.names == [
        *("imagenetv2", "imagenet_sketch", "imagenet-a", "imagenet-r", "objectnet"),
        *("cifar10", "wds/shapes"),
    ]
    assert len(Benchmarks(["vtab+"], ".").names) == 36
    with pytest.raises(UserError, match="no set of clip_benchmark was named"):
        _ = Benchmarks([], ".").names


def test_the_root_may_hold_the_name_of_the_set() -> None:
    assert Benchmarks([], "a/{dataset}/{dataset_cleaned}").folder("wds/vtab/dtd") == "a/vtab/dtd/vtab-dtd"
    for wrong in ("{data}", "{}", "{"):
        with pytest.raises(UserError, match="another placeholder"):
            Benchmarks([], wrong).folder("cifar10")


def test_an_address_is_read_where_it_is_the_root(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, make: Any
) -> None:
    make.tar(tmp_path / "0.tar", {})
    seen = []

    def build(**given: Any) -> Any:
        subprocess.run(["true"], check=True)
        seen.append(given["root"])
        empty = WebDataset(str(tmp_path / "0.tar"))
        empty.classes, empty.templates = ["a", "b"], ["a {c}"]
        return empty

    monkeypatch.setattr(benchmark_sets, "build_dataset", build)
    address = "https://huggingface.co/datasets/someone/wds_{dataset_cleaned}/tree/main"
    found = run_benchmarks(loaded, Benchmarks(["wds/vtab/dtd"], address))
    assert seen == ["https://huggingface.co/datasets/someone/wds_vtab-dtd/tree/main"]
    assert "0 of the 0 items of wds/vtab/dtd arrived" in found.failures["wds/vtab/dtd"]


def test_under_no_network_commands_and_connections_are_refused() -> None:
    with no_network():
        with pytest.raises(NetworkRefused, match="run 'wget x --output-document=y'"):
            subprocess.call("wget x --output-document=y", shell=True)
        with pytest.raises(NetworkRefused, match="run 'curl x'"):
            subprocess.run(["curl", "x"], check=False)
        with pytest.raises(NetworkRefused, match="connect to 'localhost'"):
            socket.create_connection(("localhost", 9))
        with socket.socket() as unconnected, pytest.raises(NetworkRefused, match="connect to"):
            unconnected.connect(("127.0.0.1", 9))
        other = []
        thread = threading.Thread(
            target=lambda: other.append(subprocess.run(["true"], check=True).returncode)
        )
        thread.start()
        thread.join()
        assert other == [0]
    assert subprocess.run(["true"], check=True).returncode == 0
