import gc
import io
import json
import os
import re
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import open_clip
import pytest
import torch
from clip_benchmark.datasets.builder import build_wds_dataset
from clip_benchmark.metrics import zeroshot_classification
from open_clip_train.zero_shot import run as openclip_zero_shot
from PIL import Image
from torch import Tensor

from openclip_linattn.errors import UserError
from openclip_linattn.zeroshot import tasks as tasks_module
from openclip_linattn.zeroshot.checkpoints import Checkpoint, find_checkpoints
from openclip_linattn.zeroshot.encoders import embeddings as embeddings_module
from openclip_linattn.zeroshot.encoders import encoding as encoding_module
from openclip_linattn.zeroshot.encoders.embeddings import class_embeddings
from openclip_linattn.zeroshot.encoders.models import LoadedModel, load_model
from openclip_linattn.zeroshot.evaluate import EvaluationError, EvaluationOptions, evaluate
from openclip_linattn.zeroshot.sets.dataset import open_evaluation_set
from openclip_linattn.zeroshot.sets.labels import LabelSet

# OpenCLIP's and clip_benchmark's accuracy turn arrays of one element into numbers.
NUMPY_SCALAR = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
PLAIN = EvaluationOptions(workers=0, save=False)


def options(**changes: Any) -> EvaluationOptions:
    return EvaluationOptions(**{"workers": 0, "save": False, **changes})


def read_samples(folder: Path) -> list[tuple[Image.Image, dict[str, Any], int]]:
    found = []
    for path in sorted((folder / "test").glob("*.tar")):
        with tarfile.open(path) as tar:
            content = {name: tar.extractfile(name).read() for name in tar.getnames()}  # type: ignore[union-attr]
        for key in sorted({name.split(".")[0] for name in content}):
            image = Image.open(io.BytesIO(content[f"{key}.png"])).convert("RGB")
            found.append((image, json.loads(content[f"{key}.json"]), int(content[f"{key}.cls"])))
    return found


def count_by_hand(
    loaded: LoadedModel, folder: Path, classes: list[str], fields: list[str], make: Any
) -> dict[str, Any]:
    """Score image by image and text by text, in plain Python."""
    unit: Callable[[Tensor], Tensor] = lambda x: x / x.norm()  # noqa: E731
    prompts = {name: [t.replace("{c}", name).replace("{}", name) for t in make.templates] for name in classes}
    with torch.no_grad():
        text = {
            name: unit(sum(unit(loaded.clip.encode_text(loaded.tokenizer([each]))[0]) for each in texts))
            for name, texts in prompts.items()
        }
        ranks: dict[str, list[int]] = {name: [] for name in classes}
        for image, values, _ in read_samples(folder):
            feature = loaded.clip.encode_image(loaded.transform(image)[None])[0]
            order = sorted(classes, key=lambda name: -float(feature @ text[name]))
            true = " ".join(values[field] for field in fields)
            ranks[true].append(order.index(true))
    every = [rank for each in ranks.values() for rank in each]
    return {
        "n": len(every),
        "top1": sum(rank == 0 for rank in every) / len(every),
        "top5": sum(rank < 5 for rank in every) / len(every),
        "per_class": [
            [name, len(each), sum(rank == 0 for rank in each) / len(each) if each else None]
            for name, each in ranks.items()
        ],
    }


@pytest.mark.parametrize("workers", [0, 2])
def test_the_counts_are_those_of_a_count_by_hand(
    loaded: LoadedModel, checkpoint: Path, data_folder: Path, make: Any, workers: int
) -> None:
    rows = evaluate([checkpoint], [data_folder], options(workers=workers, batch_size=7))
    pairs = [f"{color} {shape}" for color in make.colors for shape in make.shapes]
    wanted = [(pairs, ["color", "shape"]), (list(make.colors), ["color"]), (list(make.shapes), ["shape"])]
    assert len(rows) == len(wanted)
    for row, (classes, fields) in zip(rows, wanted, strict=True):
        expected = count_by_hand(loaded, data_folder, classes, fields, make)
        assert row["n"] == expected["n"] == 45
        assert row["top1"] == pytest.approx(expected["top1"], abs=1e-12)
        assert row["per_class"] == [[name, n, pytest.approx(rate)] for name, n, rate in expected["per_class"]]
        rates = [rate for _, n, rate in expected["per_class"] if n]
        assert row["mean_per_class"] == pytest.approx(sum(rates) / len(rates))
        assert ("top5" in row) == (len(classes) >= 5)
        if "top5" in row:
            assert row["top5"] == pytest.approx(expected["top5"])
            assert row["top1"] <= row["top5"] < 1


def test_class_embeddings_are_those_of_openclip(loaded: LoadedModel, make: Any) -> None:
    classes = [f"thing {number}" for number in range(23)]
    ours = class_embeddings(loaded, LabelSet("things", tuple(classes), make.templates))
    templates = [lambda name, t=t: t.replace("{c}", name).replace("{}", name) for t in make.templates]
    theirs = open_clip.build_zero_shot_classifier(loaded.clip, loaded.tokenizer, classes, templates)
    assert torch.equal(ours, theirs)
    assert torch.allclose(ours.norm(dim=0), torch.ones(23), atol=1e-6)


@NUMPY_SCALAR
def test_accuracies_are_those_of_openclip(loaded: LoadedModel, checkpoint: Path, data_folder: Path) -> None:
    (row,) = evaluate([checkpoint], [data_folder], options(label_sets=["color x shape"]))
    label_set = open_evaluation_set(data_folder).label_sets[0]
    images = torch.stack([loaded.transform(image) for image, _, _ in read_samples(data_folder)])
    labels = torch.tensor([label for _, _, label in read_samples(data_folder)])
    args = SimpleNamespace(device="cpu", precision="fp32", batch_size=16)
    batched = list(zip(images.split(16), labels.split(16), strict=True))
    top1, top5 = openclip_zero_shot(loaded.clip, class_embeddings(loaded, label_set), batched, args)
    assert (row["top1"], row["top5"]) == (pytest.approx(top1), pytest.approx(top5))


@NUMPY_SCALAR
# webdataset's own opening of shards, which clip_benchmark uses, leaves them to be closed by the collector.
@pytest.mark.filterwarnings(r"ignore:unclosed file .*\.tar'>:ResourceWarning")
def test_clip_benchmark_agrees_on_the_same_folder(
    loaded: LoadedModel, run: Path, data_folder: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(data_folder, tmp_path / "figures"))
    (folder / "label_sets.json").unlink()
    templates = folder / "zeroshot_classification_templates.txt"
    templates.write_text(templates.read_text().replace("{}", "{c}"))
    data = build_wds_dataset("figures", loaded.transform, data_dir=str(folder))
    loader = torch.utils.data.DataLoader(data.batched(16), batch_size=None)
    loader.dataset.classes = data.classes  # type: ignore[attr-defined]
    theirs = zeroshot_classification.evaluate(
        loaded.clip, loader, loaded.tokenizer, data.classes, data.templates, "cpu", amp=False
    )
    del data, loader
    gc.collect()
    (ours,) = evaluate([run / "checkpoints" / "epoch_2.pt"], [folder], PLAIN)
    assert ours["top1"] == pytest.approx(theirs["acc1"])
    assert ours["top5"] == pytest.approx(theirs["acc5"])
    assert ours["mean_per_class"] == pytest.approx(theirs["mean_per_class_recall"])


def test_the_row_says_what_was_evaluated(run_folder: Path, data_folder: Path, make: Any) -> None:
    rows = evaluate([run_folder], [data_folder], options(label_sets=["color"]))
    assert [row["epoch"] for row in rows] == [2, 10]
    row = rows[0]
    told = {key: row[key] for key in ("run", "model", "dataset", "data", "label_set", "classes", "precision")}
    assert told == {
        "run": "first",
        "model": make.model,
        "dataset": "figures",
        "data": str(data_folder / "test"),
        "label_set": "color",
        "classes": 4,
        "precision": "fp32",
    }
    assert row["checkpoint"] == str(run_folder / "checkpoints" / "epoch_2.pt")
    assert (row["image_size"], row["templates"]) == (32, 3)
    assert {"torch", "open_clip_torch", "openclip-linattn"} <= set(row["versions"])
    assert "top5" not in row
    json.dumps(rows, allow_nan=False)


def test_images_and_shared_class_names_are_encoded_once(
    checkpoint: Path, data_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, texts = [], []
    features, embeddings = encoding_module.image_features, embeddings_module.class_embeddings
    monkeypatch.setattr(
        encoding_module, "image_features", lambda m, x: images.append(len(x)) or features(m, x)
    )
    monkeypatch.setattr(
        embeddings_module, "class_embeddings", lambda m, x, *a: texts.append(x.name) or embeddings(m, x, *a)
    )
    copy = shutil.copytree(data_folder, tmp_path / "copy")
    evaluate([checkpoint], [data_folder, copy], PLAIN)
    assert sum(images) == 2 * 45
    assert texts == ["color x shape", "color", "shape"]


def test_two_checkpoints_of_one_name_are_two_rows(tmp_path: Path, make: Any, data_folder: Path) -> None:
    paths = [make.checkpoint(tmp_path / f"lr 1e-3, wd {name}", 1, seed) for seed, name in enumerate("ab")]
    rows = evaluate(paths, [data_folder], options(label_sets=["color x shape"], save=True))
    assert [row["checkpoint"] for row in rows] == [str(path) for path in paths]
    assert rows[0]["per_class"] != rows[1]["per_class"]
    for path, row in zip(paths, rows, strict=True):
        assert [json.loads(line) for line in (path.parent / "zeroshot.jsonl").read_text().splitlines()] == [
            row
        ]


def saved(run: Path) -> list[dict[str, Any]]:
    lines = (run / "checkpoints" / "zeroshot.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_saved_rows_are_used_again(run: Path, data_folder: Path, builds: list[str]) -> None:
    first = evaluate([run], [data_folder], options(save=True, label_sets=["color"]))
    assert builds == ["epoch_2.pt", "epoch_10.pt"]
    assert evaluate([run], [data_folder], options(save=True, label_sets=["color"])) == first
    assert len(builds) == 2
    every = evaluate([run], [data_folder], options(save=True))
    assert len(builds) == 4
    assert [row for row in every if row["label_set"] == "color"] == first
    assert len(saved(run)) == len(every) == 6
    evaluate([run], [data_folder], options(save=True, again=True))
    assert len(builds) == 6
    assert len(saved(run)) == 6


def test_nothing_is_saved_unless_wanted(run: Path, data_folder: Path) -> None:
    evaluate([run], [data_folder], PLAIN)
    assert not (run / "checkpoints" / "zeroshot.jsonl").exists()


def test_an_overwritten_checkpoint_is_evaluated_anew(run: Path, data_folder: Path, make: Any) -> None:
    latest = run / "checkpoints" / "epoch_latest.pt"
    wanted = options(save=True, label_sets=["color x shape"])
    (before,) = evaluate([latest], [data_folder], wanted)
    shutil.copy(make.checkpoint(run.parent / "other", 1, seed=9), latest)
    (after,) = evaluate([latest], [data_folder], wanted)
    assert before["per_class"] != after["per_class"]
    assert saved(run) == [after]


@pytest.mark.parametrize("change", ["precision", "templates", "data"])
def test_a_row_of_other_inputs_is_not_used(
    run: Path, data_folder: Path, tmp_path: Path, change: str, builds: list[str]
) -> None:
    folder = Path(shutil.copytree(data_folder, tmp_path / "figures"))
    path = run / "checkpoints" / "epoch_2.pt"
    evaluate([path], [folder], options(save=True))
    changes: dict[str, Any] = {}
    if change == "precision":
        changes["precision"] = "bf16"
    elif change == "templates":
        changes["templates"] = tmp_path / "t.txt"
        changes["templates"].write_text("only {}\n")
    else:
        os.utime(folder / "test" / "1.tar", (1, 1))
    evaluate([path], [folder], options(save=True, **changes))
    assert len(builds) == 2
    assert len(saved(run)) == 3


def test_rows_follow_a_run_that_moves(run: Path, data_folder: Path, builds: list[str]) -> None:
    evaluate([run], [data_folder], options(save=True))
    moved = run.rename(run.with_name("moved"))
    rows = evaluate([moved], [data_folder], options(save=True))
    assert len(builds) == 2
    assert {row["run"] for row in rows} == {"moved"}
    assert all(Path(row["checkpoint"]).is_relative_to(moved) for row in rows)


def test_a_run_folder_that_cannot_be_written_keeps_the_rows(
    run: Path, data_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("openclip_linattn.zeroshot.checkpoint_rows.save_rows", refuse)
    assert len(evaluate([run], [data_folder], options(save=True))) == 6
    assert "were not saved" in caplog.text


def test_a_broken_results_file_is_named(run: Path, data_folder: Path) -> None:
    (run / "checkpoints" / "zeroshot.jsonl").write_text('{"checkpoint": "a"}\n')
    with pytest.raises(UserError, match=r"zeroshot\.jsonl: line 1 is not a result row"):
        evaluate([run], [data_folder], PLAIN)


@pytest.mark.parametrize("content", [b"{}\n", b"\xff\xfe\n"])
def test_a_broken_results_file_is_named_before_an_evaluation_anew(
    run: Path, data_folder: Path, builds: list[str], content: bytes
) -> None:
    (run / "checkpoints" / "zeroshot.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=r"zeroshot\.jsonl.* mend "):
        evaluate([run], [data_folder], options(save=True, again=True))
    assert builds == []


def test_an_output_that_cannot_be_written_leaves_the_rows(
    checkpoint: Path, data_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    output = tmp_path / "rows.json"
    monkeypatch.setattr("openclip_linattn.zeroshot.results.rows.write_text", full)
    with pytest.raises(EvaluationError, match=r"rows\.json cannot be written: No space left") as caught:
        evaluate([checkpoint], [data_folder], PLAIN, output=output)
    assert len(caught.value.rows) == 3
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(UserError, match=r"you may not write into"):
        evaluate([checkpoint], [data_folder], PLAIN, output=output)


def test_classes_of_tars_without_an_image_are_told(
    checkpoint: Path, tmp_path: Path, make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A heading in the file of names gives every image the name of the class before its own."""
    folder = make.set(tmp_path / "set", make.samples(45))
    (folder / "label_sets.json").unlink()
    evaluate([checkpoint], [folder], PLAIN)
    assert caplog.text == ""
    names = folder / "classnames.txt"
    names.write_text("name\n" + names.read_text())
    evaluate([checkpoint], [folder], PLAIN)
    assert (
        "1 of the 9 classes of label set 'classnames' have no image, first class 8, 'white bar'"
        in caplog.text
    )


def spoil(path: Path, key: str) -> None:
    content = torch.load(path, weights_only=True)
    content["state_dict"][key].fill_(float("nan"))
    torch.save(content, path)


@pytest.mark.parametrize(
    ("key", "what"), [("visual.proj", "image features"), ("text_projection", "text features")]
)
def test_a_diverged_checkpoint_is_named_and_the_others_go_on(
    run: Path, data_folder: Path, key: str, what: str, tmp_path: Path
) -> None:
    spoil(run / "checkpoints" / "epoch_2.pt", key)
    output = tmp_path / "all.json"
    with pytest.raises(EvaluationError, match=rf"epoch_2\.pt: its {what}.*not finite") as caught:
        evaluate([run], [data_folder], options(save=True), output=output)
    assert [row["epoch"] for row in caught.value.rows] == [10] * 3
    assert saved(run) == json.loads(output.read_text()) == caught.value.rows


def test_a_faulty_image_leaves_the_other_sets_and_checkpoints(
    run: Path, data_folder: Path, tmp_path: Path, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = make.samples(6)
    content["000003"]["png"] = b"none"
    faulty = make.set(tmp_path / "faulty", content)
    read: list[str] = []
    score = tasks_module.score
    monkeypatch.setattr(
        tasks_module, "score", lambda c, data, *a, **b: read.append(data.name) or score(c, data, *a, **b)
    )
    with pytest.raises(EvaluationError) as caught:
        evaluate([run], [faulty, data_folder], options(save=True, label_sets=["color"]))
    assert re.fullmatch(
        r".*1\.tar: sample '000003': its png does not decode .*; faulty was left out", str(caught.value)
    )
    assert [(row["epoch"], row["dataset"]) for row in caught.value.rows] == [(2, "figures"), (10, "figures")]
    assert saved(run) == caught.value.rows
    assert read == ["faulty", "figures", "figures"]


def test_a_checkpoint_that_is_deleted_meanwhile_is_named_and_the_others_go_on(
    run: Path, data_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(*named: Any) -> list[Checkpoint]:
        checkpoints = find_checkpoints(*named)
        (run / "checkpoints" / "epoch_2.pt").unlink()
        return checkpoints

    monkeypatch.setattr("openclip_linattn.zeroshot.evaluate.find_checkpoints", found)
    with pytest.raises(EvaluationError, match=r"epoch_2\.pt is no longer there") as caught:
        evaluate([run], [data_folder], options(label_sets=["color"]))
    assert [row["epoch"] for row in caught.value.rows] == [10]


def test_rows_of_a_set_that_is_damaged_now_are_kept(
    run: Path, data_folder: Path, tmp_path: Path, make: Any
) -> None:
    folder = Path(shutil.copytree(data_folder, tmp_path / "figures"))
    wanted = options(save=True, label_sets=["color"])
    first = evaluate([run / "checkpoints" / "epoch_2.pt"], [folder], wanted)
    path = folder / "test" / "0.tar"
    state = path.stat()
    content = path.read_bytes()
    path.write_bytes(content[:700] + bytes(200) + content[900:])
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    with pytest.raises(EvaluationError, match="figures was left out") as caught:
        evaluate([run], [folder], wanted)
    assert caught.value.rows == first


@pytest.mark.parametrize("precision", ["fp32", "amp_bf16", "pure_bf16"])
def test_image_features_are_float32_of_norm_one(checkpoint: Path, precision: str) -> None:
    model = load_model(find_checkpoints([checkpoint])[0], device=torch.device("cpu"), precision=precision)
    features = encoding_module.image_features(model, torch.rand(3, 3, 32, 32))
    assert features.dtype == torch.float32
    assert torch.allclose(features.norm(dim=1), torch.ones(3), atol=1e-6)


@pytest.mark.parametrize("precision", ["amp", "amp_bf16", "bf16", "pure_bf16", "fp16"])
def test_other_precisions_run(checkpoint: Path, data_folder: Path, precision: str) -> None:
    (row,) = evaluate([checkpoint], [data_folder], options(precision=precision, label_sets=["color x shape"]))
    assert row["n"] == 45
    assert row["precision"] == precision


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"batch_size": 0}, "batch size is 0"),
        ({"batch_size": 10**20}, "it must be from 1 to 1000000"),
        ({"workers": -1}, "workers is -1"),
        ({"precision": "fp8"}, "unknown precision 'fp8'.*amp_bf16"),
    ],
)
def test_bad_numbers_are_refused(wrong: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        EvaluationOptions(**wrong)


def test_what_can_be_checked_is_checked_before_a_model_is_built(
    run: Path, data_folder: Path, tmp_path: Path, builds: list[str], make: Any
) -> None:
    other = make.checkpoint(tmp_path / "other", 1, 0)
    (other.parent.parent / "params.txt").write_text("model: ViT-B-17\n")
    with pytest.raises(UserError, match="unknown model 'ViT-B-17'"):
        evaluate([run, other], [data_folder], PLAIN)
    with pytest.raises(UserError, match="do not exist"):
        evaluate([run], [data_folder, tmp_path / "nowhere"], PLAIN)
    with pytest.raises(UserError, match="no evaluation set"):
        evaluate([run], [], PLAIN)
    with pytest.raises(UserError, match="cannot be written"):
        evaluate([run], [data_folder], PLAIN, output=tmp_path / "no" / "rows.json")
    assert builds == []
