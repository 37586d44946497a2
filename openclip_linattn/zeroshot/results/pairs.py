"""Compares checkpoints that answered for the same images."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from openclip_linattn.errors import UserError
from openclip_linattn.zeroshot.checkpoints import Checkpoint
from openclip_linattn.zeroshot.results.answers import AnswerBook
from openclip_linattn.zeroshot.results.paired import Comparison, compare
from openclip_linattn.zeroshot.results.rows import Row, by_question
from openclip_linattn.zeroshot.tasks import BENCHMARK

_NOTHING = (
    "there is nothing to compare: name two checkpoints or more, and with --data a set for classification"
)


@dataclass(frozen=True)
class Pair:
    """Two checkpoints on one set and label set; `resized` is the image size where one was not trained at it."""

    data: str
    label_set: str
    resized: int | None
    comparison: Comparison


def check_comparison(checkpoints: Sequence[Checkpoint], against: Path | None) -> None:
    """Raise UserError where these checkpoints cannot be compared once they are evaluated."""
    if len(checkpoints) < 2:
        raise UserError(_NOTHING)
    if against is not None and _path(against) not in {str(each.path) for each in checkpoints}:
        raise UserError(f"{against} is not among the checkpoints that are evaluated; name its file there too")


def comparable(rows: Iterable[Row]) -> list[tuple[Row, Row]]:
    """Return every two rows of two checkpoints that answer one question with a top-1.

    Checkpoints are compared each at the image size of its training, and wherever they were evaluated at one size. Sets
    of clip_benchmark are left out: their images have no names, by which the answers of two would be matched.
    """
    answered = [row for row in rows if "top1" in row and row["label_set"] != BENCHMARK]
    pairs = [pair for group in by_question(answered) for pair in combinations(group, 2) if _alike(*pair)]
    return sorted(pairs, key=lambda pair: _resized(*pair) or 0)


def compare_rows(
    rows: Sequence[Row], names: Mapping[str, str], answers: AnswerBook, *, against: Path | None = None
) -> list[Pair]:
    """Compare every two checkpoints of `rows` on each question, or each with the checkpoint `against`.

    `names` are short names by path. Raises UserError where the answers are not known, where the images differ, and
    where there is nothing to compare.
    """
    pairs = comparable(rows)
    if against is not None:
        pairs = _with_base(pairs, _path(against))
    if not pairs:
        raise UserError(_NOTHING)
    found = []
    for pair in pairs:
        first, second = (answers.of(row, names[str(row["checkpoint"])]) for row in pair)
        row = pair[0]
        found.append(Pair(str(row["data"]), str(row["label_set"]), _resized(*pair), compare(first, second)))
    return found


def _alike(first: Row, second: Row) -> bool:
    if first["checkpoint"] == second["checkpoint"]:
        return False
    both_as_trained = "trained_image_size" not in first and "trained_image_size" not in second
    return both_as_trained or bool(first["image_size"] == second["image_size"])


def _resized(first: Row, second: Row) -> int | None:
    return next((row["image_size"] for row in (first, second) if "trained_image_size" in row), None)


def _path(checkpoint: Path) -> str:
    """Return the path of a checkpoint as rows have it."""
    return str(checkpoint.parent.resolve() / checkpoint.name)


def _with_base(pairs: Iterable[tuple[Row, Row]], base: str) -> list[tuple[Row, Row]]:
    """Return the pairs with the checkpoint `base`, which comes second."""
    turned = ((second, first) if first["checkpoint"] == base else (first, second) for first, second in pairs)
    return [pair for pair in turned if pair[1]["checkpoint"] == base]
