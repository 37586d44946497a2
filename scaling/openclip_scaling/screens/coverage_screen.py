"""The command that checks the printed intervals on simulated runs, with its table, JSON and picture."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated

import pandas as pd
import typer
from matplotlib.figure import Figure

from openclip_scaling.errors import UserError
from openclip_scaling.fitting.coverage import RUNS, SCENARIOS, study
from openclip_scaling.fitting.uncertainty import LEVEL, MINIMUM_RUNS
from openclip_scaling.pictures.plot import COLORS, MARKERS, save_figure
from openclip_scaling.reading.runs import write_atomically
from openclip_scaling.reporting.as_json import json_ready, records
from openclip_scaling.screens.shared import AsJson, print_json, stderr, stdout, table_of


def coverage_command(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder for coverage.json and coverage.png.")
    ] = None,
    sets: Annotated[int, typer.Option("--sets", help="Simulated sets of runs per row.")] = 1000,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the simulation.")] = 0,
    only: Annotated[
        list[str] | None, typer.Option("--scenario", help="Name of a scenario; repeatable. Without it, all.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Simulate runs of known laws and count how often the 95 % intervals contain the truth."""
    known = {scenario.name: scenario for scenario in SCENARIOS}
    for name in only or []:
        if name not in known:
            raise UserError(f"--scenario {name!r} is unknown; use {'; '.join(known)}.")
    if sets < 2:
        raise UserError(f"--sets must be at least 2, not {sets}.")
    if seed < 0:
        raise UserError(f"--seed must be at least 0, not {seed}.")
    command = ["openclip-scaling", "coverage", "--sets", str(sets), "--seed", str(seed)]
    command += [part for name in only or [] for part in ("--scenario", name)]
    parts: list[pd.DataFrame] = []
    with stderr().status("simulating") as status:
        for name in only or known:
            parts.append(
                study(known[name], RUNS, sets, seed, lambda text: status.update(f"simulating {text}"))
            )
            found = pd.concat(parts, ignore_index=True)
            if output:  # after every scenario, since the whole takes minutes
                write_result(output / "coverage.json", found, shlex.join(command))
                save_figure(coverage_figure(found), output / "coverage.png")
    if as_json:
        print_json(records(found))
        return
    heads = [
        "scenario",
        "runs",
        "quantity",
        f"contain the truth (of {LEVEL:.0%})",
        "median width",
        "reliable",
    ]
    rows = [
        [row["scenario"], str(row["runs"]), row["quantity"], f"{row['covered']:.1%} +- {row['standard_error']:.1%}",
         f"{row['median_width']:.4g}", "yes" if row["reliable"] else "no"]
        for row in records(found)
    ]  # fmt: skip
    stdout().print(table_of(f"{sets} simulated sets of runs each", heads, rows))


def write_result(path: Path, found: pd.DataFrame, command: str) -> None:
    """The counts with the command that makes them, one row per line."""
    rows = ",\n".join("  " + json.dumps(json_ready(row), allow_nan=False) for row in records(found.round(6)))
    write_atomically(path, f'{{"command": {json.dumps(command)}, "rows": [\n{rows}\n]}}\n')


def coverage_figure(found: pd.DataFrame) -> Figure:
    """Share of intervals with the truth against the number of runs, one panel per scenario."""
    names = list(dict.fromkeys(found["scenario"]))
    columns = min(3, len(names))
    rows = -(-len(names) // columns)
    figure = Figure(figsize=(3.1 * columns, 2.5 * rows + 0.3), layout="constrained")
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    counts = sorted(set(found["runs"]))
    for axes, name in zip(panels.flat, names, strict=False):
        part = found[found["scenario"] == name]
        axes.axhspan(93, 97, color="0.92")
        axes.axhline(100 * LEVEL, color="0.4", linewidth=0.8)
        axes.axvline(counts.index(MINIMUM_RUNS) - 0.5, color="0.4", linewidth=0.8, linestyle=":")
        for index, (quantity, own) in enumerate(part.groupby("quantity", sort=False)):
            place = [counts.index(runs) + 0.06 * (index - 2) for runs in own["runs"]]
            axes.errorbar(
                place,
                100 * own["covered"],
                yerr=200 * own["standard_error"],
                fmt=MARKERS[index % len(MARKERS)],
                color=COLORS[index % len(COLORS)],
                markersize=3.5,
                linewidth=0.9,
                label=str(quantity),
            )
        axes.set_title(name, fontsize=8)
        axes.legend(frameon=False, fontsize=6, loc="lower right", ncols=2)
        axes.set_xticks(range(len(counts)), [str(count) for count in counts])
        axes.set_ylim(82, 101)
        axes.tick_params(labelbottom=True, labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels.flat[len(names) :]:
        axes.set_axis_off()
    figure.supxlabel(
        "runs\n(left of the dots: marked as not reliable; bars: two standard errors)", fontsize=8
    )
    figure.supylabel("intervals that contain the truth (%)", fontsize=8)
    return figure
