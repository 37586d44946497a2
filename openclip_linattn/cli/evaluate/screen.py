"""What `openclip-linattn eval` shows of its rows."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from openclip_linattn.cli.evaluate.resolution_tables import resolution_tables
from openclip_linattn.cli.evaluate.tables import class_tables, percent, task_tables
from openclip_linattn.cli.evaluate.titles import Row, Titles, titles_of
from openclip_linattn.errors import UserError

if TYPE_CHECKING:
    from openclip_linattn.zeroshot.results.answers import AnswerBook  # slow to import


def show_rows(rows: list[Row], *, as_json: bool, per_class: bool) -> None:
    """Print the rows on the standard output, as JSON or as tables."""
    if as_json:
        typer.echo(json.dumps(rows, indent=1, allow_nan=False))
        return
    titles = titles_of(rows)
    console = Console()
    if not console.is_terminal:  # a file or a pipe has no width to keep to
        console = Console(width=max(console.width, 160))
    for table in task_tables(rows, titles):
        console.print(table)
    for table in resolution_tables(rows, titles):
        console.print(table)
    for sentence in _benchmark_means(rows, titles):
        console.print(sentence, markup=False, highlight=False)
    for table in class_tables(rows, titles) if per_class else ():
        console.print(table)
    unlisted = sum("top1" in row and "per_class" not in row for row in rows)
    if per_class and unlisted:
        console.print(f"{unlisted} row(s) list no classes, which are too many; see their predictions")


def _benchmark_means(rows: Sequence[Row], titles: Titles) -> list[str]:
    from openclip_linattn.zeroshot.benchmarks.passthrough import mean_top1
    from openclip_linattn.zeroshot.tasks import BENCHMARK

    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["label_set"] == BENCHMARK and "top1" in row:
            groups.setdefault((titles.of(row)[0], str(row["image_size"])), []).append(row)
    return [
        f"{name}: mean top-1 of {len(group)} sets of clip_benchmark at {size} px is {percent(mean_top1(group))} %"
        for (name, size), group in groups.items()
        if len(group) > 1
    ]


def check_pairs(checkpoints: Sequence[Path], model: str | None, *, against: Path | None) -> None:
    """Raise UserError where checkpoints could not be compared afterwards, before the evaluation spends its hours."""
    from openclip_linattn.zeroshot.checkpoints import find_checkpoints
    from openclip_linattn.zeroshot.results.pairs import check_comparison

    check_comparison(find_checkpoints(checkpoints, model), against)


def show_pairs(
    rows: Sequence[Row], answers: "AnswerBook", console: Console, *, wanted: bool, against: Path | None
) -> None:
    """Print McNemar's sentence for the checkpoints that answered for the same images.

    Without being `wanted`, it is said only where there are two checkpoints, with known answers. Raises UserError
    where it is wanted and cannot be said.
    """
    from openclip_linattn.zeroshot.results.pairs import comparable, compare_rows

    if not wanted:
        two = len({row["checkpoint"] for row in rows}) == 2
        rows = [row for row in rows if answers.knows(row)]
        if not (two and comparable(rows)):
            return
    titles = titles_of(rows)
    try:
        pairs = compare_rows(rows, titles.checkpoints, answers, against=against)
    except UserError as error:
        if wanted:
            raise
        console.print(f"not compared: {error}", markup=False, highlight=False, soft_wrap=True)
        return
    for pair in pairs:
        size = "" if pair.resized is None else f" at {pair.resized} px"
        where = f"{titles.sets[pair.data]}, {pair.label_set}{size}"
        console.print(f"{where}: {pair.comparison.sentence}", markup=False, highlight=False, soft_wrap=True)
    if len(pairs) > 1:
        console.print(
            f"({len(pairs)} comparisons: at 5 % each, one in twenty is found where there is no difference)",
            markup=False, highlight=False, soft_wrap=True,
        )  # fmt: skip
