"""Accuracy against resolution, as tables."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from openclip_linattn.cli.evaluate.tables import labels, percent
from openclip_linattn.cli.evaluate.titles import Row, Titles


def resolution_tables(rows: Sequence[Row], titles: Titles) -> list[Table]:
    """Return for each set and label set the top-1 of checkpoints by image size; none where all are as trained."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if "top1" in row:
            groups.setdefault(f"{titles.of(row)[1]}, {labels(row)}", []).append(row)
    return [
        _table(title, group, titles)
        for title, group in groups.items()
        if any("trained_image_size" in row for row in group)
    ]


def _table(title: str, rows: Sequence[Row], titles: Titles) -> Table:
    from openclip_linattn.zeroshot.results.resolution_curves import tokens_at  # slow to import

    table = Table(title=escape(f"Top-1 against image size on {title}, %"), box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("checkpoint", overflow="fold")
    table.add_column("trained at", justify="right")
    sizes = sorted({str(row["image_size"]) for row in rows}, key=lambda size: (len(size), size))
    of_size = {size: [row for row in rows if str(row["image_size"]) == size] for size in sizes}
    for size, group in of_size.items():
        tokens = tokens_at(group, group[0]["image_size"])
        table.add_column(f"{size} px\n{tokens}".strip(), justify="right", no_wrap=True)
    lines: dict[str, dict[str, str]] = {}
    for row in rows:
        line = lines.setdefault(titles.of(row)[0], {"trained": ""})
        line["trained"] = str(row.get("trained_image_size", row["image_size"]))
        line[str(row["image_size"])] = percent(row["top1"])
    for checkpoint, cells in lines.items():
        table.add_row(escape(checkpoint), cells["trained"], *(cells.get(size, "-") for size in sizes))
    return table
