"""A thousand drawn images in ImageNet's folders: our predictions are OpenCLIP's and clip_benchmark's."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import open_clip
import pytest
import torch
from clip_benchmark.metrics import zeroshot_classification
from open_clip import OPENAI_IMAGENET_TEMPLATES
from open_clip_train.zero_shot import accuracy as openclip_accuracy
from open_clip_train.zero_shot import run as openclip_zero_shot
from PIL import Image, ImageColor
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder

from openclip_linattn.zeroshot.encoders.embeddings import Classifiers
from openclip_linattn.zeroshot.encoders.features import image_features
from openclip_linattn.zeroshot.encoders.models import LoadedModel
from openclip_linattn.zeroshot.evaluate import EvaluationOptions, evaluate
from openclip_linattn.zeroshot.score import Scored, score
from openclip_linattn.zeroshot.sets.dataset import open_evaluation_set
from openclip_linattn.zeroshot.sets.drawn import write_imagenet_folders
from openclip_linattn.zeroshot.sets.labels import LabelSet
from openclip_linattn.zeroshot.sets.reading import keyed_batches
from openclip_linattn.zeroshot.sets.wnids import imagenet1k_names, imagenet21k_wnids
from openclip_scaling.reading.evaluations import read_json_lines, zeroshot_metrics

# OpenCLIP's and clip_benchmark's accuracy turn arrays of one element into numbers.
NUMPY_SCALAR = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
MODELS = ("ViT-T32-8-softmax", "ViT-T32-8-normlinear")
TEMPLATES = OPENAI_IMAGENET_TEMPLATES[:2]


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One drawn image in each of ImageNet's 1,000 class folders."""
    return write_imagenet_folders(tmp_path_factory.mktemp("drawn") / "imagenet")


@pytest.fixture(scope="module", params=MODELS)
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    return random_model(request.param, "fp32")


def random_model(name: str, precision: str) -> LoadedModel:
    torch.manual_seed(11)
    model, _, transform = open_clip.create_model_and_transforms(name, precision=precision)
    tokenizer = open_clip.get_tokenizer(name)
    return LoadedModel(model.eval(), tokenizer, transform, torch.device("cpu"), precision)


@pytest.fixture(scope="module")
def ours(loaded: LoadedModel, imagenet: Path, tmp_path_factory: pytest.TempPathFactory) -> Scored:
    path = tmp_path_factory.mktemp("templates") / "two.txt"
    path.write_text("".join(f"{each('{c}')}\n" for each in TEMPLATES))
    data = open_evaluation_set(imagenet, templates=path)
    (scored,) = score(Classifiers(loaded), data, data.label_sets, batch_size=128, workers=0)
    return scored


@pytest.fixture(scope="module")
def theirs(loaded: LoadedModel, imagenet: Path) -> ImageFolder:
    return ImageFolder(str(imagenet), transform=loaded.transform)


def openclip_classifier(loaded: LoadedModel) -> Tensor:
    return open_clip.build_zero_shot_classifier(
        loaded.clip,
        tokenizer=loaded.tokenizer,
        classnames=open_clip.IMAGENET_CLASSNAMES,
        templates=TEMPLATES,
    )


@NUMPY_SCALAR
def test_every_prediction_is_openclips(
    loaded: LoadedModel, ours: Scored, theirs: ImageFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[list[int]] = []

    def accuracy(output: Tensor, target: Tensor, topk: tuple[int, ...]) -> list[float]:
        chosen.extend(output.topk(5).indices.tolist())
        return openclip_accuracy(output, target, topk)

    monkeypatch.setattr("open_clip_train.zero_shot.accuracy", accuracy)
    classifier = openclip_classifier(loaded)
    args = SimpleNamespace(device="cpu", precision="fp32", batch_size=128)
    top1, top5 = openclip_zero_shot(loaded.clip, classifier, DataLoader(theirs, batch_size=128), args)
    predictions = ours.predictions
    assert predictions.keys == tuple(str(Path(path).relative_to(theirs.root)) for path, _ in theirs.samples)
    assert predictions.labels.tolist() == theirs.targets == list(range(1000))
    assert predictions.best.tolist() == chosen
    assert (ours.result["n"], ours.result["top1"], ours.result["top5"]) == (1000, top1, top5)
    assert predictions.right.sum() == 1000 * top1
    assert predictions.right_in_top5.sum() == 1000 * top5
    assert len(set(predictions.best[:, 0].tolist())) > 3, "a model with one answer would agree by chance"


@NUMPY_SCALAR
def test_the_metrics_are_clip_benchmarks(loaded: LoadedModel, ours: Scored, theirs: ImageFolder) -> None:
    metrics = zeroshot_classification.evaluate(
        loaded.clip,
        DataLoader(theirs, batch_size=128),
        loaded.tokenizer,
        list(imagenet1k_names()),
        [each("{c}") for each in TEMPLATES],
        "cpu",
        amp=False,
    )
    assert ours.result["top1"] == metrics["acc1"]
    assert ours.result["top5"] == metrics["acc5"]
    assert ours.result["mean_per_class"] == pytest.approx(metrics["mean_per_class_recall"], abs=1e-12)


class Nearest(Classifiers):
    """Class embeddings that are the mean image features of the classes."""

    def __init__(self, loaded: LoadedModel, means: Tensor) -> None:
        super().__init__(loaded)
        self.means = means

    def get(self, label_set: LabelSet) -> Tensor:
        return self.means


def test_in_bfloat16_images_that_are_easily_told_apart_stay_so(tmp_path: Path) -> None:
    for index, color in enumerate(("red", "green", "blue", "white", "black")):
        for number in range(4):
            path = tmp_path / color / f"{number}.png"
            path.parent.mkdir(exist_ok=True)
            Image.new("RGB", (32, 32), ImageColor.getrgb(color)).effect_spread(index + number).save(path)
    data = open_evaluation_set(tmp_path)
    fp32 = random_model(MODELS[1], "fp32")
    images, labels, _ = next(keyed_batches(data, fp32.transform, batch_size=20, workers=0))
    features = image_features(fp32, images)
    means = torch.stack([features[labels[:, 0] == label].mean(dim=0) for label in range(5)], dim=1)
    means = means - means.mean(dim=1, keepdim=True)
    for precision in ("fp32", "amp_bf16"):
        classifiers = Nearest(random_model(MODELS[1], precision), means)
        (scored,) = score(classifiers, data, data.label_sets, batch_size=20, workers=0)
        assert scored.result["top1"] == 1.0, precision


@pytest.fixture
def checkpoint_of_a_run(tmp_path: Path) -> Path:
    torch.manual_seed(11)
    path = tmp_path / "run" / "checkpoints" / "epoch_1.pt"
    path.parent.mkdir(parents=True)
    torch.save({"epoch": 1, "state_dict": open_clip.create_model(MODELS[1]).state_dict()}, path)
    (tmp_path / "run" / "params.txt").write_text(f"model: {MODELS[1]}\n")
    return path


def test_a_row_says_what_was_evaluated_and_is_used_again(
    checkpoint_of_a_run: Path, imagenet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root = Path(shutil.copytree(imagenet, tmp_path / "imagenet"))
    options = EvaluationOptions(templates="one", workers=0, batch_size=128)
    (row,) = evaluate([checkpoint_of_a_run], [root], options)
    assert (row["dataset"], row["label_set"], row["n"], row["classes"]) == (
        "imagenet",
        "imagenet1k",
        1000,
        1000,
    )
    assert row["templates"] == 1
    assert len(row["per_class"]) == 1000
    assert evaluate([checkpoint_of_a_run], [root], options) == [row]
    saved = read_json_lines(checkpoint_of_a_run.parent / "zeroshot.jsonl", [])
    assert set(zeroshot_metrics(saved, [])[1]) == {
        f"imagenet/imagenet1k/{metric}" for metric in ("top1", "top5", "mean_per_class")
    }
    image = next((root / "n01440764").iterdir())
    image.write_bytes(image.read_bytes() + b"\0")
    (again,) = evaluate([checkpoint_of_a_run], [root], options)
    assert again["inputs"] != row["inputs"]


def test_imagenet_21k_gives_a_row_over_all_synsets_and_one_over_those_present(
    checkpoint_of_a_run: Path, imagenet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wnids = imagenet21k_wnids()[:400:2]
    monkeypatch.setattr(
        "openclip_linattn.zeroshot.sets.layouts.imagenet21k_wnids", lambda: imagenet21k_wnids()[:400]
    )
    root = tmp_path / "synsets"
    for wnid, source in zip(wnids, sorted(imagenet.iterdir())[:200], strict=True):
        shutil.copytree(source, root / wnid)
    every, present = evaluate(
        [checkpoint_of_a_run], [f"imagenet21k:{root}"], EvaluationOptions(workers=0, save=False)
    )
    assert [(row["label_set"], row["classes"], row["n"]) for row in (every, present)] == [
        ("imagenet21k", 400, 200),
        ("imagenet21k-present", 200, 200),
    ]
    assert every["top1"] <= present["top1"]
    assert sum(images for _, images, _ in every["per_class"]) == 200
