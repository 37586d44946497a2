"""What follows training: the evaluation of a run's checkpoints, and the report on all runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from openclip_linattn.errors import UserError
from openclip_linattn.files import write_text
from openclip_scaling.errors import UserError as ScalingError
from openclip_scaling.fitting.settings import Settings
from openclip_scaling.reading.runs import Collection, collect
from openclip_scaling.reporting.report import write_report


def evaluate_run(
    folder: Path,
    sets: Sequence[str | Path],
    *,
    device: str,
    batch_size: int = 128,
    precision: str = "fp32",
    keep_checkpoints: bool = True,
) -> None:
    """Evaluates every checkpoint of a run on the sets; those that have their rows already are passed over.

    Without `keep_checkpoints`, the earlier ones have done their work then and are deleted. Raises UserError for what
    cannot be evaluated.
    """
    import torch

    from openclip_linattn.zeroshot.checkpoints import find_checkpoints
    from openclip_linattn.zeroshot.evaluate import EvaluationOptions, evaluate

    if sets:
        shared = device == "cpu"  # with the runs that train on the other cores
        if shared:
            torch.set_num_threads(1)
        workers = 0 if shared else None
        options = EvaluationOptions(
            batch_size=batch_size, precision=precision, workers=workers, device=device
        )
        evaluate([folder], sets, options)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # the next run trains on this card
    if not keep_checkpoints:
        for checkpoint in find_checkpoints([folder])[:-1]:
            checkpoint.path.unlink()


def fit_and_report(
    folder: Path, runs: Sequence[Path], metrics: Sequence[str] | None, settings: Settings
) -> tuple[Path, Collection]:
    """Collects run folders, fits and compares the laws, and writes report.md, its pictures and checkpoints.csv.

    Returns the path of report.md and what was collected. Raises UserError where there is nothing to report.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        collection = collect(runs)
        collection.checkpoints.to_csv(folder / "checkpoints.csv", index=False)
        return write_report(folder, collection, list(metrics) if metrics else None, settings), collection
    except ScalingError as error:
        raise UserError(str(error)) from error


def introduce(report: Path, introduction: str) -> None:
    """Puts an introduction before a report, which becomes its chapter "Scaling"."""
    heading, _, text = report.read_text(encoding="utf-8").partition("\n")
    chapter = f"# Scaling\n{text}" if heading.startswith("# ") else f"{heading}\n{text}"
    write_text(report, f"{introduction}\n\n{chapter}")


def zeroshot_table(checkpoints: pd.DataFrame) -> str:
    """The last checkpoint of every run with its zero-shot accuracies, as a markdown table; empty without any."""
    columns = [str(key) for key in checkpoints.columns if str(key).endswith("/top1")]
    if not columns:
        return ""
    last: dict[str, dict[Any, Any]] = {}
    for row in checkpoints.sort_values("samples_seen").to_dict("records"):
        last[str(row["run"])] = row
    lines = ["| run | samples seen | " + " | ".join(columns) + " |", "|---" * (len(columns) + 2) + "|"]
    for run in sorted(last):
        cells = [f"{last[run][column]:.3f}" for column in columns]
        lines.append(f"| {run} | {last[run]['samples_seen']:,.0f} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
