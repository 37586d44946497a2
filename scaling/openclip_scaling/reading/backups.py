"""Where out.log is absent or cut: the same training as tensorboard or wandb kept it, and where the two differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from openclip_scaling.reading.evaluations import Metrics, differ, renamed
from openclip_scaling.reading.folders import Place
from openclip_scaling.reading.history import History, segment_of
from openclip_scaling.reading.logs import EvalRecord, Segment
from openclip_scaling.reading.tensorboard_events import read_events
from openclip_scaling.reading.trajectory import Curve, Trajectory, trace
from openclip_scaling.reading.wandb_files import read_export, read_output, read_summary

_LOSS_PRECISION = 1e-4  # out.log prints five digits


@dataclass(frozen=True)
class Backup:
    """A second account of a run: where it is from, its trajectory and its evaluations."""

    name: str
    trajectory: Trajectory
    evaluations: list[EvalRecord]

    @property
    def reach(self) -> tuple[int, int, int]:
        """How far it goes: epochs that are finished, samples, logged steps."""
        return _reach(self.trajectory)

    def reaches_beyond(self, trajectory: Trajectory) -> bool:
        """Whether it has more finished epochs or samples than another account."""
        return self.reach[:2] > _reach(trajectory)[:2]

    def fill_in(self, metrics: dict[int, Metrics], notices: list[str]) -> None:
        """Add the evaluations that are not known yet, and say where known ones are others."""
        added, differing = [], []
        for record in self.evaluations:
            known = metrics.setdefault(record.epoch, {})
            values = renamed(record.metrics)
            if differ(values, known):
                differing.append(record.epoch)
            if not values.keys() <= known.keys():
                added.append(record.epoch)
            metrics[record.epoch] = {**values, **known}
        if added:
            notices.append(f"evaluations of epoch {_listed(added)} are those of {self.name}")
        if differing:
            notices.append(
                f"{self.name} has other values than out.log and results.jsonl for the evaluation of epoch "
                f"{_listed(differing)}, which are used"
            )


def _listed(epochs: list[int]) -> str:
    return ", ".join(map(str, dict.fromkeys(epochs)))


def _reach(trajectory: Trajectory) -> tuple[int, int, int]:
    samples = int(trajectory.curve.samples[-1]) if len(trajectory.curve) else 0
    # An account that lacks epochs counts for less than one that has them, however far it goes.
    return len(trajectory.ends), samples, len(trajectory.curve)


def best_backup(
    place: Place, params: Mapping[str, str], manifest: Mapping[str, Any], notices: list[str]
) -> Backup | None:
    """The account that reaches furthest; of equal ones tensorboard's, then an export's, then wandb's console."""
    found = []
    for name, segments in _accounts(place, params, manifest, notices):
        records = [record for segment in segments for record in segment.evals]
        if records or any(len(segment.train) for segment in segments):
            found.append(Backup(name, trace(segments, params), records))
    return max(found, key=lambda backup: backup.reach, default=None)


def _accounts(
    place: Place, params: Mapping[str, str], manifest: Mapping[str, Any], notices: list[str]
) -> Iterator[tuple[str, list[Segment]]]:
    def segments(histories: list[History]) -> list[Segment]:
        return [segment_of(history, params, manifest, notices) for history in histories]

    yield "tensorboard", segments(read_events(place.folder, notices))
    yield "wandb's exported history", segments([read_export(place.folder, notices)])
    outputs = [log for folder in place.wandb if (log := read_output(folder))]
    notices += [notice for log in outputs for notice in log.notices]
    yield "wandb's output.log", [segment for log in outputs for segment in log.segments]
    if not any(len(segment.train) for log in outputs for segment in log.segments):
        yield "wandb's summary", segments([read_summary(folder, notices) for folder in place.wandb])


def note_differences(curve: Curve, backup: Backup, notices: list[str]) -> None:
    """Say where the log's losses are not those of the backup, at the steps that both have."""
    other = backup.trajectory.curve
    _, mine, theirs = np.intersect1d(curve.samples, other.samples, return_indices=True)
    losses, others = curve.loss[mine], other.loss[theirs]
    finite = np.isfinite(losses) & np.isfinite(others)
    apart = np.abs(losses[finite] - others[finite]) > _LOSS_PRECISION * (1 + np.abs(losses[finite]))
    if apart.any():
        notices.append(
            f"out.log and {backup.name} have other losses at {int(apart.sum())} of {len(mine)} steps that both have"
        )
