"""Measures what conversion and distillation give at laptop size, and prints a table.

A trained softmax model is converted to linear attention; the result is evaluated as it is, trained on with the softmax
model as teacher (OpenCLIP's --distill-model), and trained on without it; and a model of the same attention is trained
from nothing. All see the same number of samples with the same recipe. What each chooses on held-out images is compared
with what the teacher chooses.

    python scripts/measure_distillation.py TEACHER_RUN DATA [--kind linear ...] [--work FOLDER] [--out FOLDER]
    python scripts/measure_distillation.py --table scripts/results/distill/distillation.json

DATA is the quickstart's folder of shapes and digits. The models are kept in the work folder, and used again; the
results are written anew after each.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from openclip_linattn.bench.machine import processor
from openclip_linattn.data.sources import as_pattern
from openclip_linattn.files import read_json, write_json
from openclip_linattn.zeroshot.checkpoints import Checkpoint, find_checkpoints
from openclip_linattn.zeroshot.encoders.embeddings import Classifiers
from openclip_linattn.zeroshot.encoders.encoding import encoded_batches
from openclip_linattn.zeroshot.encoders.models import load_model
from openclip_linattn.zeroshot.processes import ALONE
from openclip_linattn.zeroshot.sets.dataset import open_evaluation_set
from openclip_linattn.zeroshot.sets.kinds import EvaluationSet

QUESTIONS = ("color x shape", "digit")  # one label set of each of the two drawn sets


@dataclass(frozen=True)
class Answers:
    """What a model says to a set's images, in the order of their keys: features (n, embedding), classes (n,)."""

    features: Tensor
    chosen: Tensor
    truth: Tensor


@dataclass(frozen=True)
class Recipe:
    """What all trainings share; samples are image-text pairs."""

    samples: int
    batch_size: int = 128
    learning_rate: float = 1e-3
    warmup_steps: int = 20

    def flags(self, data: Path) -> list[str]:
        """The recipe in OpenCLIP's flags, on the quickstart's shapes and digits."""
        shards = f"{as_pattern(str(data / 'shapes'))}::{as_pattern(str(data / 'digits/train'))}"
        pairs = {
            "train-data": shards, "dataset-type": "webdataset", "train-num-samples": self.samples, "epochs": 1,
            "batch-size": self.batch_size, "lr": self.learning_rate, "warmup": self.warmup_steps, "workers": 1,
            "precision": "fp32", "seed": 0, "log-every-n-steps": 10,
        }  # fmt: skip
        return [part for key, value in pairs.items() for part in (f"--{key}", str(value))]


def answers(checkpoint: Checkpoint, data: EvaluationSet, question: str) -> Answers:
    """What the checkpoint's model says, by one label set of `data`."""
    loaded = load_model(checkpoint, device=torch.device("cpu"), precision="fp32")
    number = [each.name for each in data.label_sets].index(question)
    classifier = Classifiers(loaded).get(data.label_sets[number])
    keys: list[str] = []
    features, truth = [], []
    for part, batch in encoded_batches(
        loaded, data, batch_size=128, workers=0, processes=ALONE, advance=lambda _: None
    ):
        keys += batch.keys
        features.append(part)
        truth.append(batch.labels[:, number])
    order = torch.tensor(sorted(range(len(keys)), key=keys.__getitem__))
    found = torch.cat(features)[order]
    return Answers(found, (found @ classifier).argmax(1), torch.cat(truth)[order])


def compared(model: Answers, teacher: Answers) -> dict[str, float]:
    """Top-1, the share of images for which both choose one class, and the mean cosine of their image features."""
    return {
        "top1": (model.chosen == model.truth).double().mean().item(),
        "agreement": (model.chosen == teacher.chosen).double().mean().item(),
        "cosine": torch.cosine_similarity(model.features, teacher.features).mean().item(),
    }


def contestants(
    kind: str, teacher: Checkpoint, data: Path, work: Path, recipe: Recipe
) -> Iterator[tuple[str, int, Checkpoint, list[str]]]:
    """Makes the models of one kind, one after the other: what it is, samples it was trained on, file, command."""
    model = f"{teacher.model.removesuffix('-softmax')}-{kind}"
    convert = ["openclip_linattn.cli", "convert", str(teacher.path), "--model", teacher.model, "--to", kind]
    converted, plain = work / f"{kind}.pt", work / f"{kind}-not-rescaled.pt"
    for title, path, options in (
        ("converted, not rescaled", plain, ["--no-rescale"]),
        ("converted", converted, []),
    ):
        command = [*convert, *options, "--output", str(path)]
        if not path.exists():
            run(command)
        yield title, 0, Checkpoint(path, model), command
    taught = ["--distill-model", teacher.model, "--distill-pretrained", str(teacher.path)]
    trainings = {
        "converted, then distilled": ["--pretrained", str(converted), *taught],
        "from nothing": [],
        "converted, then trained without the teacher": ["--pretrained", str(converted)],
        "from nothing, with the teacher": taught,
        "converted, not rescaled, then distilled": ["--pretrained", str(plain), *taught],
    }
    for title, flags in trainings.items():
        name = f"{kind}-{title.replace(',', '').replace(' ', '-')}"
        shared = ["openclip_linattn.train", "--model", model, "--logs", str(work / "logs"), "--name", name]
        command = [*shared, *recipe.flags(data), *flags]
        folder = work / "logs" / name
        if not (folder / "checkpoints/epoch_1.pt").exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a run that was interrupted
            run(command)
        yield title, recipe.samples, find_checkpoints([folder])[-1], command


def run(command: Sequence[str]) -> None:
    """Runs a module of Python and shows what it says where it fails."""
    print(shlex.join(["python", "-m", *command]), file=sys.stderr)
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)


def measure(
    teacher: Checkpoint, data: Path, work: Path, out: Path, kinds: Sequence[str], recipe: Recipe
) -> Path:
    """Makes and compares all models, and writes the results after each; returns their path."""
    for folder in (work, out):
        folder.mkdir(parents=True, exist_ok=True)
    sets = {
        question: open_evaluation_set(data / name)
        for name, question in zip(("shapes", "digits"), QUESTIONS, strict=True)
    }
    asked = {question: answers(teacher, each, question) for question, each in sets.items()}
    itself = {question: compared(found, found) for question, found in asked.items()}
    rows: list[dict[str, Any]] = [
        {"attention": "softmax", "model": "the teacher", "samples": None, "results": itself}
    ]
    flags = [*(part for kind in kinds for part in ("--kind", kind)), "--samples", str(recipe.samples)]
    content = {
        "command": shlex.join(["python", "scripts/measure_distillation.py", "TEACHER", "DATA", *flags]),
        "teacher": teacher.model,
        "images": {question: len(found.truth) for question, found in asked.items()},
        "recipe": vars(recipe),
        "processor": processor(),
        "torch": torch.__version__,
        "rows": rows,
    }
    path = out / "distillation.json"
    for kind in kinds:
        for title, samples, checkpoint, command in contestants(kind, teacher, data, work, recipe):
            results = {
                question: compared(answers(checkpoint, each, question), asked[question])
                for question, each in sets.items()
            }
            row = {"attention": kind, "model": title, "samples": samples, "results": results}
            rows.append({**row, "command": _shown(command, teacher, data, work)})
            write_json(path, content)
    return path


def _shown(command: Sequence[str], teacher: Checkpoint, data: Path, work: Path) -> str:
    """The command with the places of this machine by name."""
    text = shlex.join(["python", "-m", *command])
    for place, name in ((teacher.path, "TEACHER"), (data, "DATA"), (work, "WORK")):
        text = text.replace(str(place), name)
    return text


def table(path: Path) -> str:
    """The results as a markdown table."""
    content = read_json(path)
    heads = [
        f"{question} {what}" for question in content["images"] for what in ("top-1", "same choice", "cosine")
    ]
    lines = [
        "| attention | model | samples | " + " | ".join(heads) + " |",
        "|---|---|---|" + "---|" * len(heads),
    ]
    for row in content["rows"]:
        numbers = [
            f"{row['results'][question][key]:.3f}"
            for question in content["images"]
            for key in ("top1", "agreement", "cosine")
        ]
        samples = "-" if row["samples"] is None else f"{row['samples']:,}"
        lines.append(f"| {row['attention']} | {row['model']} | {samples} | " + " | ".join(numbers) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measures, or only prints the table of what was measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("teacher", nargs="?", type=Path)
    parser.add_argument("data", nargs="?", type=Path)
    parser.add_argument("--work", type=Path, default=Path("distillation"))
    parser.add_argument("--out", type=Path, default=Path("scripts/results/distill"))
    parser.add_argument("--kind", action="append")
    parser.add_argument("--samples", type=int, default=16_384)
    parser.add_argument("--table", type=Path, metavar="JSON")
    args = parser.parse_args()
    if args.table is None:
        if args.teacher is None or args.data is None:
            parser.error("give the teacher's run and the folder of shapes and digits, or --table JSON")
        torch.set_num_threads(1)
        teacher = find_checkpoints([args.teacher])[-1]
        kinds = args.kind or ["normlinear"]
        args.table = measure(
            teacher, args.data.resolve(), args.work.resolve(), args.out, kinds, Recipe(args.samples)
        )
    print(table(args.table))


if __name__ == "__main__":
    main()
