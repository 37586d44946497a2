"""Accuracy of trained checkpoints against resolution, as rows and as a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from evaluation.report import write_report
from openclip_linattn.cli.evaluate.titles import short_names
from openclip_linattn.zeroshot.checkpoints import find_checkpoints
from openclip_linattn.zeroshot.evaluate import EvaluationOptions, evaluate
from openclip_linattn.zeroshot.resolutions import image_tokens
from openclip_linattn.zeroshot.results.accuracy_picture import accuracy_picture
from openclip_linattn.zeroshot.results.looks import run_path
from openclip_scaling.pictures.plot import save_figure


def measure(
    out: Path, *, runs: Sequence[Path], data: Sequence[str], label_sets: Sequence[str], sizes: Sequence[int]
) -> Path:
    """Evaluate the last checkpoint of every run at each size; writes resolutions.json and resolutions.png."""
    checkpoints = [find_checkpoints([run])[-1].path for run in runs]
    options = EvaluationOptions(label_sets=label_sets, image_sizes=sizes, save=False, batch_size=128)
    rows = evaluate(checkpoints, data, options, console=Console(stderr=True))
    path = write_report(out, "resolutions", {"sizes": list(sizes), "rows": [_short(row) for row in rows]})
    names = short_names(str(run_path(row)) for row in rows)
    save_figure(accuracy_picture(rows, names), path.with_suffix(".png"))
    return path


def _short(row: dict[str, Any]) -> dict[str, Any]:
    size = row["image_size"]
    kept = ("model", "run", "epoch", "dataset", "label_set", "n", "top1", "top1_interval")
    return {
        **{key: row[key] for key in kept},
        "image_size": size,
        "trained_image_size": row.get("trained_image_size", size),
        "tokens": image_tokens(row["model"], size),
    }
