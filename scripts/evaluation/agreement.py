"""Agreement: our predictions, OpenCLIP's and clip_benchmark's image by image; bfloat16's accuracy and fp32's."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import open_clip
import torch
from clip_benchmark.metrics import zeroshot_classification as benchmark
from open_clip_train import zero_shot as stock
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder

from evaluation.models import random_model
from evaluation.report import write_report
from openclip_linattn.zeroshot.checkpoints import find_checkpoints
from openclip_linattn.zeroshot.encoders.embeddings import Classifiers
from openclip_linattn.zeroshot.encoders.models import LoadedModel
from openclip_linattn.zeroshot.evaluate import EvaluationOptions, evaluate
from openclip_linattn.zeroshot.results.answers import AnswerBook
from openclip_linattn.zeroshot.results.paired import compare
from openclip_linattn.zeroshot.score import score
from openclip_linattn.zeroshot.sets.dataset import open_evaluation_set
from openclip_linattn.zeroshot.sets.drawn import write_imagenet_folders
from openclip_linattn.zeroshot.sets.labels import LabelSet

_BATCH = 128


def measure(
    out: Path,
    *,
    models: Sequence[str],
    templates: str,
    per_class: int,
    runs: Sequence[Path],
    data: Sequence[str],
) -> Path:
    """Compare random `models` on drawn ImageNet folders, and the precisions of trained `runs` on `data`.

    Writes agreement.json.
    """
    with tempfile.TemporaryDirectory() as folder:
        root = write_imagenet_folders(Path(folder), per_class=per_class)
        libraries = [_libraries(random_model(name), name, root, templates) for name in models]
    content = {"templates": templates, "libraries": libraries, "precisions": _precisions(runs, data)}
    return write_report(out, "agreement", content)


def _libraries(loaded: LoadedModel, name: str, root: Path, templates: str) -> dict[str, Any]:
    data = open_evaluation_set(root, templates=templates)
    (label_set,) = data.label_sets
    (scored,) = score(Classifiers(loaded), data, data.label_sets, batch_size=_BATCH, workers=0)
    assert scored.predictions is not None
    folder = ImageFolder(str(root), transform=loaded.transform)
    loader = DataLoader(folder, batch_size=_BATCH)
    ours = torch.from_numpy(scored.predictions.best).long()
    row: dict[str, Any] = {
        "model": name,
        "n": scored.result["n"],
        "ours": {key: scored.result[key] for key in ("top1", "top5", "mean_per_class")},
        "distinct_answers": len(set(ours[:, 0].tolist())),
    }
    others = {
        "openclip": _openclip(loaded, label_set, loader),
        "clip_benchmark": _benchmark(loaded, label_set, loader),
    }
    for library, (best, metrics) in others.items():
        row[library] = {
            **metrics,
            "top1_differs": int((ours[:, 0] != best[:, 0]).sum()),
            "top5_differs": int((ours != best).any(dim=1).sum()),
        }
    return row


def _openclip(loaded: LoadedModel, label_set: LabelSet, loader: Any) -> tuple[Tensor, dict[str, float]]:
    """OpenCLIP's own evaluation, and the five best classes that it finds for every image."""
    classifier = open_clip.build_zero_shot_classifier(
        loaded.clip, loaded.tokenizer, label_set.classes, label_set.formats
    )
    chosen: list[Tensor] = []
    accuracy = stock.accuracy

    def watched(output: Tensor, target: Tensor, topk: tuple[int, ...]) -> list[float]:
        chosen.append(output.topk(5).indices)
        return accuracy(output, target, topk)

    args = SimpleNamespace(device="cpu", precision="fp32", batch_size=_BATCH)
    with patch.object(stock, "accuracy", watched):
        top1, top5 = stock.run(loaded.clip, classifier, loader, args)
    return torch.cat(chosen), {"top1": top1, "top5": top5}


def _benchmark(loaded: LoadedModel, label_set: LabelSet, loader: Any) -> tuple[Tensor, dict[str, float]]:
    """clip_benchmark's own evaluation, and the five best classes by the scores that it counts."""
    scores: list[Tensor] = []
    run = benchmark.run_classification

    def watched(*arguments: Any, **rest: Any) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = run(*arguments, **rest)
        scores.append(found[0])
        return found

    with patch.object(benchmark, "run_classification", watched):
        metrics = benchmark.evaluate(
            loaded.clip,
            loader,
            loaded.tokenizer,
            list(label_set.classes),
            list(label_set.templates),
            "cpu",
            amp=False,
        )
    names = {"top1": "acc1", "top5": "acc5", "mean_per_class": "mean_per_class_recall"}
    return scores[0].topk(5).indices, {name: float(metrics[theirs]) for name, theirs in names.items()}


def _precisions(runs: Sequence[Path], data: Sequence[str]) -> list[dict[str, Any]]:
    """Top-1 of the last checkpoint of every run in fp32 and in amp_bf16, with the images that one alone gets right."""
    checkpoints = [find_checkpoints([run])[-1].path for run in runs]
    found, books = [], []
    for precision in ("fp32", "amp_bf16"):
        books.append(AnswerBook())
        options = EvaluationOptions(precision=precision, save=False, again=True, batch_size=_BATCH)
        found.append(evaluate(checkpoints, data, options, answers=books[-1]) if runs else [])
    rows = []
    for plain, low in zip(*found, strict=True):
        apart = compare(books[0].of(plain, "fp32"), books[1].of(low, "amp_bf16"))
        rows.append(
            {
                "model": plain["model"],
                "run": plain["run"],
                "dataset": plain["dataset"],
                "label_set": plain["label_set"],
                "n": plain["n"],
                "fp32": plain["top1"],
                "amp_bf16": low["top1"],
                "only_fp32": apart.only_first,
                "only_amp_bf16": apart.only_second,
                "points": 100 * (low["top1"] - plain["top1"]),
            }
        )
    return rows
