"""Reads one run folder: its manifest, log, evaluations and the cost of its model.

A run folder is OpenCLIP's own `<logs>/<name>/`. Its run.json is used where there is one; params.txt, out.log
and results.jsonl serve any other OpenCLIP run. Checkpoint files are not opened.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openclip_scaling.architecture import read_architecture
from openclip_scaling.errors import UserError
from openclip_scaling.evaluations import Metrics, read_json_lines, validation_metrics, zeroshot_metrics
from openclip_scaling.flops import ClipCost, clip_cost
from openclip_scaling.logs import Log, read_log, read_params
from openclip_scaling.trajectory import Trajectory, trace, whole_number

_LOG_NAMES = ("out.log", "out-0.log")
_RUN_FILES = (*_LOG_NAMES, "params.txt", "run.json")


@dataclass
class Run:
    """Everything read from one folder, before it becomes table rows."""

    name: str
    folder: Path
    manifest: Mapping[str, Any]
    params: Mapping[str, str]
    log: Log
    notices: list[str]
    trajectory: Trajectory = field(default_factory=Trajectory)
    metrics: dict[int, Metrics] = field(default_factory=dict)


def find_run_folders(sources: Iterable[Path]) -> list[Path]:
    """Run folders among and below `sources`, each once. Raises UserError where a source holds none."""
    found: dict[Path, None] = {}
    for source in sources:
        if not source.is_dir():
            raise UserError(f"{source} is not a folder; give run folders or a folder that holds them.")
        below = {path.parent for name in _RUN_FILES for path in source.rglob(name)}
        if not below:
            raise UserError(f"No OpenCLIP run (out.log, params.txt or run.json) in {source} or below it.")
        found.update(dict.fromkeys(sorted(folder.resolve() for folder in below)))
    return list(found)


def run_names(folders: Sequence[Path]) -> dict[Path, str]:
    """Folder names; where two are the same, as many parents as tell them apart."""
    names: dict[Path, str] = {}
    for folder in folders:
        depth = 1
        while any(other != folder and _tail(other, depth) == _tail(folder, depth) for other in folders):
            depth += 1
        names[folder] = _tail(folder, depth)
    return names


def _tail(folder: Path, depth: int) -> str:
    return "/".join(folder.parts[-depth:])


def read_run(folder: Path, name: str) -> Run:
    notices: list[str] = []
    manifest = _manifest(folder / "run.json", notices)
    path = next((folder / log for log in _LOG_NAMES if (folder / log).is_file()), None)
    log = read_log(path) if path else Log([], ["there is no out.log"])
    notices += log.notices
    params = read_params(folder / "params.txt") or (log.segments[-1].params if log.segments else {})
    run = Run(name, folder, manifest, params, log, notices)
    run.trajectory = trace(log, params)
    notices += run.trajectory.notices
    printed = [record for segment in log.segments for record in segment.evals]
    results = read_json_lines(folder / "checkpoints" / "results.jsonl", notices)
    run.metrics = validation_metrics(results, printed, notices)
    rows = read_json_lines(folder / "checkpoints" / "zeroshot.jsonl", notices)
    for epoch, values in zeroshot_metrics(rows, notices).items():
        run.metrics.setdefault(epoch, {}).update(values)
    return run


def _manifest(path: Path, notices: list[str]) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        manifest = None
    if not isinstance(manifest, dict):
        notices.append("run.json cannot be read as a JSON object and is not used")
        return {}
    return manifest


@dataclass(frozen=True)
class Cost:
    """Size and forward cost of a run's model, each None where it is not known."""

    attention: str | None = None
    text_attention: str | None = None
    image_parameters: int | None = None
    text_parameters: int | None = None
    parameters: int | None = None
    gmac: float | None = None
    train_gmac: float | None = None


def cost_of(run: Run) -> Cost:
    """From run.json where it says so, and otherwise by arithmetic from the printed model."""
    manifest = run.manifest
    counts = manifest.get("parameters")
    counts = counts if isinstance(counts, Mapping) else {"total": counts}
    gmac = manifest.get("gmac_per_pair")
    gmac = positive(gmac.get("total") if isinstance(gmac, Mapping) else gmac)
    counted = None if gmac is not None and manifest.get("attention") else _counted(run)
    if counted is None:
        if positive(run.params.get("force_patch_dropout")):
            run.notices.append("patch dropout was forced; its training compute is counted without it")
        return Cost(
            attention=text_or_none(manifest.get("attention")),
            text_attention=text_or_none(manifest.get("text_attention")),
            image_parameters=whole_number(counts.get("image")),
            text_parameters=whole_number(counts.get("text")),
            parameters=whole_number(counts.get("total")),
            gmac=gmac,
            train_gmac=gmac,
        )
    return Cost(
        attention=text_or_none(manifest.get("attention")) or counted.image_attention,
        text_attention=text_or_none(manifest.get("text_attention")) or counted.text_attention,
        image_parameters=whole_number(counts.get("image")) or counted.image_parameters,
        text_parameters=whole_number(counts.get("text")) or counted.text_parameters,
        parameters=whole_number(counts.get("total")) or counted.parameters,
        gmac=gmac or counted.gmac,
        train_gmac=gmac or counted.train_gmac,
    )


def _counted(run: Run) -> ClipCost | None:
    segment = next((s for s in reversed(run.log.segments) if s.model_repr), None)
    context = whole_number(run.params.get("force_context_length"))
    try:
        found = read_architecture(
            segment.model_repr if segment else "", segment.image_size if segment else None, context
        )
        dropout = positive(run.params.get("force_patch_dropout"))
        found.config["vision_cfg"]["patch_dropout"] = dropout or 0.0
        cost = clip_cost(found.config, found.image_attention, found.text_attention)
    except UserError as error:
        run.notices.append(f"its compute is not known: {str(error).rstrip('.')}")
        return None
    run.notices.extend(found.notices)
    return cost


def text_or_none(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def positive(value: Any) -> float | None:
    try:
        number = float(str(value))
    except ValueError:
        return None
    return number if math.isfinite(number) and number > 0 else None
