"""How well the small runs predict the large ones: fits without the largest runs, and their score."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from openclip_scaling.errors import UserError
from openclip_scaling.fitting.analysis import GroupFit, fitted, laws_of, remarks_on
from openclip_scaling.fitting.metrics import metric_named
from openclip_scaling.fitting.points import Points
from openclip_scaling.fitting.selections import last_of_each_run
from openclip_scaling.fitting.settings import Settings
from openclip_scaling.fitting.table import grouped_points


def held_out(frame: pd.DataFrame, settings: Settings, count: int) -> tuple[list[dict[str, Any]], list[str]]:
    """The last point of each of the `count` largest runs, predicted from the smaller ones; and what to know of it.

    Every group and law of the settings gives a row per run, JSON-ready: relative_error is predicted over observed,
    less 1, and inside says whether the interval of the curve holds the observed value. That interval is one of the
    law, without the scatter of a single run, so more than 5 % fall outside. Of a sweep of learning rates the runs at
    the best ones count. Raises UserError where no run can be spared.
    """
    if count < 1:
        raise UserError(f"--hold-out must be at least 1, not {count}.")
    laws = laws_of(settings)
    notices: list[str] = []
    metric = metric_named(settings.metric).on(frame, notices)
    fits: list[GroupFit] = []
    failures: list[str] = []
    rows: list[dict[str, Any]] = []
    for group, points in grouped_points(frame, settings, metric, notices).items():
        ends = last_of_each_run(points)
        if len(ends) <= count:
            runs = f"{len(ends)} run{'s are' if len(ends) > 1 else ' is'}"
            failures.append(f"{group}: {runs} too few to hold out {count}.")
            continue
        largest = ends.take(np.argsort(ends.size, kind="stable")[-count:].tolist())
        rest = points.take([row for row, run in enumerate(points.run) if run not in set(largest.run)])
        for law in laws:
            try:
                fits.append(fitted(group, rest, law, settings))
            except UserError as error:
                failures.append(f"{group}: no {law.name} fit: {error}")
                continue
            rows += _scored(fits[-1], largest)
    if not rows:
        raise UserError(f"No run could be held out. {' '.join(failures)}")
    return rows, [*remarks_on(fits), *notices, *failures]


def _scored(item: GroupFit, largest: Points) -> list[dict[str, Any]]:
    predicted, band = item.fit.predict(largest.x), item.boot.band(largest.x)
    rows = []
    for index, run in enumerate(largest.run):
        observed = float(largest.y[index])
        interval = None if band is None else (float(band[0][index]), float(band[1][index]))
        rows.append(
            {
                "group": item.group,
                "law": item.fit.law.name,
                "run": run,
                "scale": largest.x[index].tolist(),
                "observed": observed,
                "predicted": float(predicted[index]),
                "interval95": interval,
                "relative_error": float(predicted[index]) / observed - 1,
                "inside": None if interval is None else interval[0] <= observed <= interval[1],
                "reliable": item.boot.reliable,
            }
        )
    return rows
