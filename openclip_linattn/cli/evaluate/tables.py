"""The tables of `openclip-linattn eval`: one for each task that the rows are about."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from openclip_linattn.cli.evaluate.titles import Row, Titles

Cell = Callable[[Row], str]


@dataclass(frozen=True)
class _Layout:
    """A task's table: its title and, after checkpoint and data, its columns of words and of numbers."""

    title: str
    words: dict[str, Cell]
    numbers: dict[str, Cell]


def percent(value: float | None) -> str:
    """Return a fraction in percent, with two decimals."""
    return "-" if value is None else f"{100 * value:.2f}"


def _rate(key: str) -> Cell:
    return lambda row: percent(row.get(key))


def _interval(key: str) -> Cell:
    def cell(row: Row) -> str:
        bounds = row.get(f"{key}_interval")
        return "-" if bounds is None else f"[{percent(bounds[0])}, {percent(bounds[1])}]"

    return cell


def _count(key: str) -> Cell:
    return lambda row: str(row.get(key, "-"))


def labels(row: Row) -> str:
    """Return the label set of a row, with its number of classes."""
    return f"{row['label_set']} ({row['classes']})" if "classes" in row else str(row["label_set"])


_ACCURACY = {
    "images": _count("n"),
    "top-1": _rate("top1"),
    "95 %": _interval("top1"),
    "top-5": _rate("top5"),
    "class mean": _rate("mean_per_class"),
}
_LAYOUTS = {
    "classification": _Layout("Zero-shot accuracy", {"labels": labels}, _ACCURACY),
    "retrieval": _Layout(
        "Retrieval, recall",
        {},
        {
            "images": _count("images"),
            "captions": _count("texts"),
            **{f"image to text @{k}": _rate(f"image_to_text_recall@{k}") for k in (1, 5, 10)},
            **{f"text to image @{k}": _rate(f"text_to_image_recall@{k}") for k in (1, 5, 10)},
        },
    ),
    "linear_probe": _Layout(
        "Linear probe, accuracy", {"labels": labels}, {"trained on": _count("n_train"), **_ACCURACY}
    ),
    "multilabel": _Layout(
        "Several classes per image",
        {"labels": labels},
        {"images": _count("n"), "mean average precision": _rate("mean_average_precision")},
    ),
    "image_caption_selection": _Layout(
        "Choice among captions and images",
        {},
        {
            "items": _count("n"),
            "image": _rate("image_accuracy"),
            "caption": _rate("text_accuracy"),
            "both": _rate("accuracy"),
        },
    ),
}


def task_tables(rows: Sequence[Row], titles: Titles) -> list[Table]:
    """Return a table for each task in `rows`, accuracies in percent."""
    by_task: dict[str, list[Row]] = {}
    for row in rows:
        by_task.setdefault(row.get("task", "classification"), []).append(row)
    return [_table(_LAYOUTS[task], each, titles) for task, each in by_task.items()]


def _table(layout: _Layout, rows: Sequence[Row], titles: Titles) -> Table:
    sets = {titles.of(row)[1] for row in rows}
    alone = f" on {sets.pop()}" if len(sets) == 1 else ""  # named once, it leaves room for the paths
    words: dict[str, Cell] = {"checkpoint": lambda row: titles.of(row)[0]}
    if not alone:
        words["data"] = lambda row: titles.of(row)[1]
    words |= layout.words
    if any("trained_image_size" in row for row in rows):
        words["pixels"] = lambda row: str(row["image_size"])
    table = Table(title=escape(f"{layout.title}{alone}, %"), box=SIMPLE_HEAD, pad_edge=False)
    for heading in words:
        table.add_column(heading, overflow="fold")
    for heading in layout.numbers:
        table.add_column(heading, justify="right", no_wrap=len(heading) < 12)
    for row in rows:
        table.add_row(*(escape(cell(row)) for cell in (*words.values(), *layout.numbers.values())))
    return table


def class_tables(rows: Sequence[Row], titles: Titles) -> list[Table]:
    """Return a table of the classes of each row that lists them (see `accuracy`)."""
    return [_classes(row, (*titles.of(row), row["label_set"])) for row in rows if "per_class" in row]


def _classes(row: Row, title: Sequence[str]) -> Table:
    table = Table(title=escape(", ".join(title)), box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("class", overflow="fold")
    table.add_column("images", justify="right")
    table.add_column("top-1, %", justify="right")
    for name, images, top1 in row["per_class"]:
        table.add_row(escape(name), str(images), percent(top1))
    return table
