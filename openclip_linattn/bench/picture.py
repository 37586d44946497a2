"""The picture of a benchmark: time against length with the floor, and the ratio to softmax below it, both log-log."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from openclip_linattn.bench.inputs import CONTIGUOUS
from openclip_linattn.bench.report import Report, Row
from openclip_linattn.bench.sweep import EXTRAPOLATED, MEASURED
from openclip_scaling.pictures.plot import plain_ticks, styles

_MAX_TICKS = 7
_FEW = 30
"""A range in which powers of ten would be too few ticks."""


@dataclass(frozen=True)
class _View:
    """Which columns of a report are drawn, and their words."""

    name: str
    x: str
    x_label: str
    y_label: str
    floor: str


_VIEWS = {
    "ops": _View("operator", "tokens", "tokens", "time of one run", "floor of linear attention"),
    "towers": _View("model", "pixels", "image side (px)", "time of one batch", "floor of the lightest tower"),
}


def figure(report: Report) -> Figure:
    """A column per pass; the band is the middle half of the rounds, dashed lines are extrapolated or bounds."""
    view = _VIEWS[report.benchmark]
    passes = list(dict.fromkeys(str(row["pass"]) for row in report.rows))
    looks = _looks(report.rows, view)
    panels = Figure(figsize=(1.2 + 4.6 * len(passes), 6.9), layout="constrained")
    grid = panels.subplots(2, len(passes), sharex=True, squeeze=False, height_ratios=(1.7, 1))
    for column, direction in enumerate(passes):
        top, bottom = grid[:, column]
        rows = [row for row in report.rows if row["pass"] == direction]
        for name, look in looks.items():
            _draw(top, bottom, [row for row in rows if row[view.name] == name], view, look)
        _draw_floor(top, rows, view)
        bottom.axhline(1, color="0.4", linewidth=0.8)
        top.set_title(direction, fontsize=10)
        _axes(top, bottom, rows, view)
    grid[0, 0].set_ylabel(view.y_label)
    grid[1, 0].set_ylabel("softmax time / time")
    _legend(panels, grid[0, 0], towers=report.benchmark == "towers", columns=2 * len(passes))
    panels.suptitle(_title(report), fontsize=9, x=0.02, ha="left")
    return panels


@dataclass(frozen=True)
class _Look:
    color: str
    marker: str
    line: str


def _looks(rows: Sequence[Row], view: _View) -> dict[str, _Look]:
    """Colour and marker of every candidate: by attention kind where each has its own, else by name.

    Both layouts of the bare products share theirs; the contiguous one is dotted.
    """
    suffix = f"-{CONTIGUOUS}"
    kinds = {str(row[view.name]): str(row.get("attention", row[view.name])) for row in rows}
    if len(set(kinds.values())) < len(kinds):
        kinds = {name: name for name in kinds}
    plain = {name: kind.removesuffix(suffix) for name, kind in kinds.items()}
    style = styles(plain.values())
    return {name: _Look(*style[plain[name]], ":" if name.endswith(suffix) else "-") for name in kinds}


def _draw(top: Axes, bottom: Axes, rows: Sequence[Row], view: _View, look: _Look) -> None:
    if "flop_ratio" in rows[0]:
        bottom.plot(*_columns(rows, view.x, "flop_ratio"), "--", color=look.color, linewidth=0.9, alpha=0.7)
    measured = [row for row in rows if row["status"] == MEASURED]
    beyond = [row for row in rows if row["status"] == EXTRAPOLATED]
    if not measured:
        return
    x, seconds = _columns(measured, view.x, "seconds")
    style: dict[str, Any] = {"color": look.color, "marker": look.marker, "markersize": 4.0, "linewidth": 1.3}
    label = str(rows[0][view.name])
    top.plot(x, seconds, look.line, label=label, **style)
    spread = [row for row in measured if row["seconds_q1"] is not None]
    low, high = ([row[edge] for row in spread] for edge in ("seconds_q1", "seconds_q3"))
    top.fill_between([row[view.x] for row in spread], low, high, color=look.color, alpha=0.2, linewidth=0)
    if beyond:
        x, y = _columns([measured[-1], *beyond], view.x, "seconds")
        top.plot(x, y, "--", mfc="white", label=f"{label}, extrapolated", **style)
    if any(row["softmax_speedup"] != 1 for row in measured):  # softmax itself is the line at 1
        _draw_ratios(bottom, measured, view, look)


def _draw_ratios(axes: Axes, rows: Sequence[Row], view: _View, look: _Look) -> None:
    """Solid against a measured softmax, dashed with open markers against an extrapolated one."""
    known = [row for row in rows if row["softmax_speedup"] is not None]
    solid = [row for row in known if row.get("softmax_status", MEASURED) == MEASURED]
    dashed = [*solid[-1:], *(row for row in known if row not in solid)]
    style: dict[str, Any] = {"color": look.color, "marker": look.marker, "markersize": 3.5, "linewidth": 1.2}
    axes.plot(*_columns(solid, view.x, "softmax_speedup"), look.line, **style)
    if len(dashed) > 1:
        axes.plot(*_columns(dashed, view.x, "softmax_speedup"), "--", mfc="white", **style)


def _draw_floor(axes: Axes, rows: Sequence[Row], view: _View) -> None:
    """The lowest floor at the largest size; lininfsa, whose output is one row, is left out."""
    last = {str(row[view.name]): row for row in rows if row.get("attention", row[view.name]) != "lininfsa"}
    lowest = min(last, key=lambda name: float(last[name]["floor_seconds"]))
    x, seconds = _columns([row for row in rows if row[view.name] == lowest], view.x, "floor_seconds")
    axes.plot(x, seconds, "--", color="0.25", linewidth=1.1, label=view.floor)


def _columns(rows: Sequence[Row], x: str, y: str) -> tuple[list[float], list[float]]:
    return [float(row[x]) for row in rows], [float(row[y]) for row in rows]


def _axes(top: Axes, bottom: Axes, rows: Sequence[Row], view: _View) -> None:
    sizes = sorted({int(row[view.x]) for row in rows})
    for axes in (top, bottom):
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(True, which="major", color="0.92", linewidth=0.7)
        axes.set_axisbelow(True)
    step = -(-len(sizes) // _MAX_TICKS)
    bottom.xaxis.set_major_locator(FixedLocator(sizes[::-1][::step]))
    bottom.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _size(int(value))))
    bottom.xaxis.set_minor_locator(NullLocator())
    bottom.xaxis.set_minor_formatter(NullFormatter())
    _value_ticks(bottom, lambda value, _: f"{value:,g}")
    _value_ticks(top, lambda value, _: _time(value))
    bottom.set_xlabel(view.x_label)


def _value_ticks(axes: Axes, words: Callable[[float, int], str]) -> None:
    low, high = axes.get_ylim()
    if high / low < _FEW:
        axes.yaxis.set_major_locator(FixedLocator(plain_ticks(low, high)))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(words))


def _time(seconds: float) -> str:
    """A time in the unit that keeps it between 1 and 1000."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if round(seconds * factor, 9) >= 1:
            return f"{seconds * factor:,.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def _size(value: int) -> str:
    """Powers of two from 2^13 on as such, other numbers in full."""
    power = value.bit_length() - 1
    return f"$2^{{{power}}}$" if value == 2**power and power >= 13 else f"{value:,}"


def _legend(panels: Figure, axes: Axes, *, towers: bool, columns: int) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if towers:
        handles.append(Line2D([], [], linestyle="--", color="0.4", linewidth=0.9))
        labels.append("FLOP ratio to softmax")
    panels.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=8)


def _title(report: Report) -> str:
    environment, protocol = report.environment, report.protocol
    sizes = ", ".join(
        f"{key.replace('_', ' ')} {protocol[key]}"
        for key in ("batch", "heads", "head_width")
        if key in protocol
    )
    threads = f", {environment['threads']} thread(s)" if environment["device_type"] == "cpu" else ""
    return (
        f"{environment['device']}{threads}, torch {environment['torch']}, {environment['dtype']}, {sizes}\n"
        f"copy {report.ceilings['copy_bytes_per_s'] / 1e9:,.0f} GB/s, "
        f"matrix products {report.ceilings['matmul_flops_per_s'] / 1e12:,.3g} TFLOP/s, both measured in this run"
    )
