import json
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import open_clip
import pytest
import torch

from openclip_linattn.errors import UserError
from openclip_linattn.zeroshot.checkpoints import CheckpointError, find_checkpoints
from openclip_linattn.zeroshot.encoders import embedding_cache, embeddings
from openclip_linattn.zeroshot.encoders.embedding_cache import EmbeddingCache
from openclip_linattn.zeroshot.encoders.embeddings import Classifiers, class_embeddings
from openclip_linattn.zeroshot.encoders.models import LoadedModel
from openclip_linattn.zeroshot.processes import Processes
from openclip_linattn.zeroshot.results.accuracy import accuracy
from openclip_linattn.zeroshot.results.predictions import Predictions, best_classes, gather
from openclip_linattn.zeroshot.sets.labels import LabelSet
from openclip_linattn.zeroshot.sets.templates import NAMED, find_templates

CPU = torch.device("cpu")
NAMES = tuple(open_clip.IMAGENET_CLASSNAMES[:25])


@pytest.fixture
def batches_of_texts(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many texts the model encoded at a time."""
    sizes: list[int] = []
    encode = loaded.clip.encode_text

    def counting(text: Any, **rest: Any) -> Any:
        sizes.append(len(text))
        return encode(text, **rest)

    monkeypatch.setattr(loaded.clip, "encode_text", counting)
    return sizes


@pytest.mark.parametrize(
    ("templates", "sizes"),
    [("openai80", [800, 800, 400]), ("simple7", [175]), ("one", [25])],
)
def test_texts_are_encoded_in_steps_and_equal_openclips(
    loaded: LoadedModel, templates: str, sizes: list[int], batches_of_texts: list[int]
) -> None:
    label_set = LabelSet("some", NAMES, NAMED[templates])
    heard: list[int] = []
    found = class_embeddings(loaded, label_set, heard.append)
    assert batches_of_texts == sizes
    assert sum(heard) == len(NAMES)
    theirs = open_clip.build_zero_shot_classifier(
        loaded.clip, loaded.tokenizer, NAMES, [t.replace("{c}", "{}") for t in NAMED[templates]]
    )
    assert torch.allclose(found, theirs, atol=1e-6)
    if templates == "openai80":
        assert torch.equal(found, theirs)


def test_more_templates_than_fit_a_step_still_work(loaded: LoadedModel, batches_of_texts: list[int]) -> None:
    label_set = LabelSet("some", NAMES[:2], tuple(f"{number} {{}}" for number in range(801)))
    assert class_embeddings(loaded, label_set).shape == (16, 2)
    assert batches_of_texts == [801, 801]


def test_a_part_of_the_classes_needs_no_text_of_its_own(
    loaded: LoadedModel, batches_of_texts: list[int]
) -> None:
    classifiers = Classifiers(loaded)
    every = classifiers.get(LabelSet("all", NAMES, NAMED["one"]))
    part = classifiers.get(LabelSet("part", (NAMES[7], NAMES[2]), NAMED["one"]))
    assert torch.equal(part, every[:, [7, 2]])
    assert batches_of_texts == [25]
    other = classifiers.get(LabelSet("part", (NAMES[7], NAMES[2]), ("a {}",)))
    assert not torch.equal(other, part)
    assert batches_of_texts == [25, 2]


def test_the_watch_hears_of_what_is_built(loaded: LoadedModel) -> None:
    heard: list[tuple[str, int, int]] = []

    @contextmanager
    def watch(title: str, total: int) -> Any:
        steps: list[int] = []
        yield steps.append
        heard.append((title, total, sum(steps)))

    classifiers = Classifiers(loaded, watch=watch)
    for _ in range(2):
        classifiers.get(LabelSet("animals", NAMES, NAMED["one"]))
    assert heard == [("texts of animals", 25, 25)]


LABELS = LabelSet("kept", NAMES, NAMED["one"])


@pytest.fixture
def cache(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., EmbeddingCache]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(embedding_cache, "MIN_TEXTS", 25)
    path = tmp_path / "epoch_1.pt"
    path.write_bytes(checkpoint.read_bytes())

    def make(precision: str = "fp32") -> EmbeddingCache:
        (found,) = find_checkpoints([path], "zeroshot-test-vit")
        return EmbeddingCache(found, precision=precision, device=CPU)

    return make


def only_file(tmp_path: Path) -> Path:
    (path,) = (tmp_path / "cache" / "openclip_linattn" / "class_embeddings").iterdir()
    return path


def test_embeddings_of_many_texts_are_kept_across_calls(
    loaded: LoadedModel, cache: Any, batches_of_texts: list[int]
) -> None:
    first = Classifiers(loaded, cache()).get(LABELS)
    second = Classifiers(loaded, cache()).get(LABELS)
    assert torch.equal(first, second)
    assert batches_of_texts == [25]


def test_few_texts_are_not_kept(loaded: LoadedModel, cache: Any, tmp_path: Path) -> None:
    Classifiers(loaded, cache()).get(LabelSet("few", NAMES[:24], NAMED["one"]))
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("change", ["classes", "templates", "precision"])
def test_other_inputs_have_files_of_their_own(cache: Any, change: str) -> None:
    cache().put(LABELS, torch.ones(16, 25))
    labels = {
        "classes": LabelSet("kept", NAMES[::-1], NAMED["one"]),
        "templates": LabelSet("kept", NAMES, ("the {}",)),
        "precision": LABELS,
    }[change]
    assert cache().get(LABELS) is not None
    assert cache("bf16" if change == "precision" else "fp32").get(labels) is None


def test_a_checkpoint_that_changed_replaces_what_was_kept(cache: Any, tmp_path: Path) -> None:
    cache().put(LABELS, torch.ones(16, 25))
    os.utime(tmp_path / "epoch_1.pt", (1, 1))
    assert cache().get(LABELS) is None
    cache().put(LABELS, torch.zeros(16, 25))
    assert torch.equal(cache().get(LABELS), torch.zeros(16, 25))
    only_file(tmp_path)


@pytest.mark.parametrize("damage", ["cut", "empty", "a flipped bit", "another form", "no archive"])
def test_a_damaged_file_is_built_anew(
    loaded: LoadedModel, cache: Any, tmp_path: Path, damage: str, batches_of_texts: list[int]
) -> None:
    whole = Classifiers(loaded, cache()).get(LABELS)
    path = only_file(tmp_path)
    content = bytearray(path.read_bytes())
    if damage == "a flipped bit":
        content[len(content) // 2] ^= 16
    elif damage == "another form":
        np.savez(path, other=np.zeros(3))
        content = bytearray(path.read_bytes())
    path.write_bytes({"cut": content[:900], "empty": b"", "no archive": b"<html>"}.get(damage, content))
    assert cache().get(LABELS) is None
    assert torch.equal(Classifiers(loaded, cache()).get(LABELS), whole)
    assert batches_of_texts == [25, 25]
    assert cache().get(LABELS) is not None


def test_a_cache_that_cannot_be_written_is_reported(
    loaded: LoadedModel, cache: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("a file in its place")
    with caplog.at_level(logging.WARNING):
        assert Classifiers(loaded, cache()).get(LABELS).shape == (16, 25)
    assert "were not kept" in caplog.text


def test_embeddings_that_are_not_finite_are_not_kept(
    loaded: LoadedModel, cache: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.nn.init.constant_(loaded.clip.text_projection, float("nan"))
    with pytest.raises(CheckpointError, match="text features of label set 'kept' are not finite"):
        Classifiers(loaded, cache()).get(LABELS)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("most", [1, 100, 2**25])
def test_the_best_classes_do_not_depend_on_the_parts(most: int) -> None:
    generator = torch.Generator().manual_seed(3)
    features, classifier = torch.randn(9, 16, generator=generator), torch.randn(16, 70, generator=generator)
    found = best_classes(features, classifier, most)
    order = (features @ classifier).argsort(dim=1, descending=True)[:, :5]
    assert torch.equal(found, order)
    assert best_classes(features, classifier[:, :3], most).shape == (9, 3)


def predictions(keys: str, labels: list[int], best: list[list[int]]) -> Predictions:
    return gather(list(keys), torch.tensor(labels), torch.tensor(best))


def test_predictions_stand_in_the_order_of_their_keys() -> None:
    found = predictions("cab", [2, 0, 1], [[2, 0], [1, 0], [1, 2]])
    assert found.keys == ("a", "b", "c")
    assert found.labels.tolist() == [0, 1, 2]
    assert found.right.tolist() == [False, True, True]
    assert found.right_in_top5 is None
    same = predictions("abc", [0, 1, 2], [[0, 1], [0, 1], [0, 1]])
    assert found.digest == same.digest
    assert found.digest != predictions("abc", [0, 1, 1], [[0, 1]] * 3).digest
    assert found.digest != predictions("abd", [0, 1, 2], [[0, 1]] * 3).digest


def test_accuracy_counts_by_index_not_by_name() -> None:
    labels = LabelSet("birds", ("crane", "crow", "crane", "gull", "owl", "emu"), ("a {}",))
    best = [[0, 1, 2, 3, 4], [2, 1, 0, 3, 4], [0, 1, 3, 4, 5], [5, 4, 3, 2, 1]]
    result = accuracy(predictions("abcd", [0, 0, 2, 1], best), labels)
    assert (result["n"], result["classes"], result["top1"], result["top5"]) == (4, 6, 0.25, 0.75)
    assert result["mean_per_class"] == pytest.approx((0.5 + 0 + 0) / 3)
    assert result["per_class"][:3] == [["crane", 2, 0.5], ["crow", 1, 0.0], ["crane", 1, 0.0]]
    assert result["per_class"][5] == ["emu", 0, None]
    json.dumps(result, allow_nan=False)


def test_templates_are_found_by_name_or_file(tmp_path: Path) -> None:
    assert {name: len(NAMED[name]) for name in NAMED} == {"openai80": 80, "simple7": 7, "one": 1}
    assert find_templates("one") == ("a photo of a {c}.",)
    path = tmp_path / "mine.txt"
    path.write_text("a {}\n")
    assert find_templates(path) == ("a {}",)
    with pytest.raises(UserError, match="'openai-80' are neither a file nor one of openai80, simple7, one"):
        find_templates("openai-80")


class OneAfterTheOther(Processes):
    """One of several processes, which are asked in turn: the last one has what all have found."""

    parts: ClassVar[list[Any]]

    def collect(self, work: Callable[[], Any]) -> list[Any]:
        self.parts.append(work())
        return self.parts


def test_texts_are_dealt_out_among_processes(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embeddings, "_TEXTS_PER_STEP", 6)  # three classes: nine steps for three processes
    label_set = LabelSet("some", NAMES, ("a {}", "the {}"))
    whole = class_embeddings(loaded, label_set)
    encoded: list[str] = []
    build = embeddings._by_openclip

    def counting(model: LoadedModel, names: Sequence[str], formats: Sequence[str]) -> torch.Tensor:
        encoded.extend(names)
        return build(model, names, formats)

    monkeypatch.setattr(embeddings, "_by_openclip", counting)
    OneAfterTheOther.parts = []
    for rank in range(3):
        found = class_embeddings(loaded, label_set, processes=OneAfterTheOther(rank, 3))
    assert encoded == [NAMES[i] for rank in range(3) for i in range(25) if i // 3 % 3 == rank]
    assert torch.equal(found, whole)
