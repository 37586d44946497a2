"""Panels of accuracy against resolution: top-1 of the last checkpoint of runs at several image sizes."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullLocator

from openclip_linattn.zeroshot.resolutions import image_tokens
from openclip_linattn.zeroshot.results.looks import Look, run_path, set_title
from openclip_linattn.zeroshot.results.picture import Panel
from openclip_linattn.zeroshot.results.rows import Row, by_question
from openclip_scaling.pictures.plot import tidy


def resolution_rows(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that stand in a curve: with a top-1, of each run's last epoch, where there are several sizes."""
    found = [row for row in rows if "top1" in row and isinstance(row["image_size"], int)]
    last: dict[Path, int] = {}
    for row in found:
        last[run_path(row)] = max(last.get(run_path(row), 0), int(row["epoch"] or 0))
    latest = [row for row in found if int(row["epoch"] or 0) == last[run_path(row)]]
    return [row for group in by_question(latest) if _several_sizes(group) for row in group]


def resolution_panels(rows: Sequence[Row], looks: Mapping[Path, Look]) -> list[Panel]:
    """Return a panel for every set and label set of `resolution_rows`, with a line per run and its 95 % band."""
    return [partial(_draw, part, looks) for part in by_question(rows)]


def tokens_at(rows: Sequence[Row], size: int | list[int]) -> str:
    """Return the tokens that the models of `rows` have at an image size, in words; "" where they are not known."""
    found = {image_tokens(str(row["model"]), size) for row in rows if row["image_size"] == size}
    known = sorted(each for each in found if each is not None)
    return f"{' or '.join(map(str, known))} tokens" if known else ""


def _several_sizes(rows: Sequence[Row]) -> bool:
    resized = any("trained_image_size" in row for row in rows)
    return resized and len({row["image_size"] for row in rows}) > 1


def _draw(rows: Sequence[Row], looks: Mapping[Path, Look], axes: Axes) -> None:
    lines: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: int(row["image_size"])):
        lines.setdefault(str(row["checkpoint"]), []).append(row)
    for own in lines.values():
        look = looks[run_path(own[0])]
        look.draw(axes, [row["image_size"] for row in own], own)
        trained = [row for row in own if "trained_image_size" not in row]
        axes.plot(
            [row["image_size"] for row in trained], [100 * row["top1"] for row in trained],
            "o", color=look.color, markersize=9, markerfacecolor="none", markeredgewidth=0.8,
        )  # fmt: skip
    sizes = sorted({row["image_size"] for row in rows})
    set_title(axes, rows[0])
    axes.set_xlabel("image size in pixels (circled: that of training)")
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(sizes))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([f"{size}\n{tokens_at(rows, size)}" for size in sizes])
    tidy(axes)
