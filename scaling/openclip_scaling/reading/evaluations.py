"""Reads what evaluations left in a run's checkpoints folder: results.jsonl and zeroshot.jsonl."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from openclip_scaling.reading.logs import EvalRecord

Metrics = dict[str, float]
# OpenCLIP's own names, and the ones used in tables.
_RENAMED = {"clip_val_loss": "val_loss"}
_NOT_METRICS = {"epoch", "num_samples"}
_ZEROSHOT_METRICS = re.compile(
    r"(top|acc|recall|map|average_precision|loss|balanced|mean_per_class)", re.IGNORECASE
)
_CHECKPOINT_EPOCH = re.compile(r"epoch_(\d+)\.\w+$")
_PRINTED_PRECISION = 6e-5  # out.log prints four decimals


def read_json_lines(path: Path, notices: list[str]) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file (none if it is absent); other lines go to the notices."""
    if not path.is_file():
        return []
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict):
            rows.append(row)
        else:
            notices.append(f"{path.name} line {number} is cut or not a JSON object and is left out")
    return rows


def validation_metrics(
    results: Sequence[Mapping[str, Any]], printed: Sequence[EvalRecord], notices: list[str]
) -> dict[int, Metrics]:
    """Metrics by finished epoch, from the rows of results.jsonl and the evaluations printed in out.log.

    results.jsonl has full precision and wins over the log; a later row of one epoch wins over an earlier one.
    """
    logged, logged_again = _merged((record.epoch, renamed(record.metrics)) for record in printed)
    rows = [
        (epoch, renamed(_numbers(row))) for epoch, row in zip(_epochs(results, printed), results, strict=True)
    ]
    lost = [epoch for epoch, _ in rows if epoch is None]
    notices.extend(
        "a row of results.jsonl has no epoch and matches no evaluation in out.log; it is left out"
        for _ in lost
    )
    written, written_again = _merged((epoch, row) for epoch, row in rows if epoch is not None)
    differing = [epoch for epoch, row in written.items() if differ(row, logged.get(epoch, {}))]
    for text, epochs in (
        ("results.jsonl and out.log have other values for epoch {}; results.jsonl is used", differing),
        ("results.jsonl has more than one row for epoch {}; the later row is used", written_again),
        (
            "out.log has more than one evaluation of epoch {}; the later one is used",
            logged_again - written.keys(),
        ),
    ):
        if epochs:
            notices.append(text.format(", ".join(map(str, sorted(epochs)))))
    return {epoch: {**logged.get(epoch, {}), **written.get(epoch, {})} for epoch in [*logged, *written]}


def _merged(rows: Iterable[tuple[int, Metrics]]) -> tuple[dict[int, Metrics], set[int]]:
    """Metrics by epoch, the later of two winning, and the epochs that have a metric twice."""
    merged: dict[int, Metrics] = {}
    again = set()
    for epoch, metrics in rows:
        known = merged.setdefault(epoch, {})
        if known.keys() & metrics.keys():
            again.add(epoch)
        known.update(metrics)
    return merged, again


def _numbers(row: Mapping[str, Any]) -> Metrics:
    pairs = ((k, v) for k, v in row.items() if isinstance(v, (int, float)) and not isinstance(v, bool))
    return {key: float(value) for key, value in pairs if key not in _NOT_METRICS}


def differ(metrics: Metrics, others: Metrics) -> bool:
    """Whether a metric that both have differs by more than the four decimals of out.log and 32 bits can tell."""
    return any(not _equal(metrics[name], others[name]) for name in metrics.keys() & others.keys())


def _equal(a: float, b: float) -> bool:
    if not (math.isfinite(a) and math.isfinite(b)):
        return a == b or (math.isnan(a) and math.isnan(b))
    return abs(a - b) < _PRINTED_PRECISION + 1e-6 * abs(a)


def renamed(metrics: Mapping[str, float]) -> Metrics:
    """Metrics by the names of the table, without what is none."""
    return {_RENAMED.get(key, key): value for key, value in metrics.items() if key not in _NOT_METRICS}


def _epochs(results: Sequence[Mapping[str, Any]], printed: Sequence[EvalRecord]) -> list[int | None]:
    """The epoch of every row; where a row has none (only --imagenet-val was set) it is found in the log."""
    epochs: list[int | None] = []
    position = 0
    for row in results:
        given = row.get("epoch")
        if isinstance(given, (int, float)) and math.isfinite(given):
            epochs.append(int(given))
            continue
        found = next((i for i in range(position, len(printed)) if _same(row, printed[i])), None)
        epochs.append(None if found is None else printed[found].epoch)
        position = position if found is None else found + 1
    return epochs


def _same(row: Mapping[str, Any], record: EvalRecord) -> bool:
    numbers = _numbers(row)
    shared = numbers.keys() & record.metrics.keys()
    return bool(shared) and not differ(numbers, record.metrics)


def zeroshot_metrics(rows: Sequence[Mapping[str, Any]], notices: list[str]) -> dict[int, Metrics]:
    """Results by epoch, under the names of `_prefix` and the metric; later rows win."""
    trained_on = _training_sets(rows)
    by_epoch: dict[int, Metrics] = {}
    seen: set[tuple[int, str]] = set()
    for row in rows:
        epoch = _zeroshot_epoch(row)
        if epoch is None:
            checkpoint = row.get("checkpoint")
            notices.append(f"zeroshot.jsonl: the epoch of {checkpoint!r} is not known; its row is left out")
            continue
        prefix = _prefix(row, trained_on)
        if (epoch, prefix) in seen:
            notices.append(
                f"zeroshot.jsonl has more than one row for epoch {epoch}, {prefix}; the later row is used"
            )
        seen.add((epoch, prefix))
        values = {k: v for k, v in _numbers(row).items() if _ZEROSHOT_METRICS.search(k)}
        by_epoch.setdefault(epoch, {}).update({f"{prefix}/{key}": value for key, value in values.items()})
    return by_epoch


def _training_sets(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """What the training sets of probes are called, by path: by their names, or by their paths where two share one."""
    probes = [row for row in rows if row.get("train_data")]
    names = {str(row["train_data"]): str(row.get("train_dataset") or row["train_data"]) for row in probes}
    count = Counter(names.values())
    return {path: name if count[name] == 1 else path for path, name in names.items()}


def _prefix(row: Mapping[str, Any], trained_on: Mapping[str, str]) -> str:
    """dataset/label_set, without the label set `retrieval`, which the recalls name themselves.

    What a probe was trained on follows, and the image size where it is not that of training: their metrics are others.
    """
    parts = [str(row[key]) for key in ("dataset", "label_set") if row.get(key) not in (None, "", "retrieval")]
    if row.get("train_data"):
        parts[-1:] = [f"{part} trained on {trained_on[str(row['train_data'])]}" for part in parts[-1:]]
    if row.get("trained_image_size") is not None:
        parts[-1:] = [f"{part}@{row.get('image_size')}px" for part in parts[-1:]]
    return "/".join(parts)


def _zeroshot_epoch(row: Mapping[str, Any]) -> int | None:
    given = row.get("epoch")
    if isinstance(given, (int, float)) and not isinstance(given, bool) and math.isfinite(given):
        return int(given)
    match = _CHECKPOINT_EPOCH.search(str(row.get("checkpoint", "")))
    return int(match[1]) if match else None
