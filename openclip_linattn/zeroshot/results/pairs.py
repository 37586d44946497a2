"""Compares checkpoints that answered for the same images, from the rows' kept predictions."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from openclip_linattn.errors import UserError
from openclip_linattn.zeroshot.checkpoints import CHECKPOINT_FOLDER, PARAMS_FILE, RUN_FILE, Checkpoint
from openclip_linattn.zeroshot.results.paired import Comparison, compare
from openclip_linattn.zeroshot.results.prediction_files import load_answers
from openclip_linattn.zeroshot.results.rows import Row, row_key

_NOTHING = "there is nothing to compare: name two checkpoints or more, and a set for classification"


@dataclass(frozen=True)
class Pair:
    """Two checkpoints on one set and label set, and the image size if it is not that of training."""

    data: str
    label_set: str
    resized: int | None
    comparison: Comparison


def check_comparison(checkpoints: Sequence[Checkpoint], against: Path | None) -> None:
    """Raise UserError where these checkpoints cannot be compared once they are evaluated."""
    if len(checkpoints) < 2:
        raise UserError(_NOTHING)
    lone = next((each.path for each in checkpoints if each.results_folder is None), None)
    if lone is not None:
        raise UserError(
            f"{lone} cannot be compared: its predictions would not be kept, as it lies in no run folder's "
            f"{CHECKPOINT_FOLDER}/ with a {RUN_FILE} or {PARAMS_FILE} above; put it there, or leave out --paired "
            "and --against"
        )
    _chosen([str(each.path) for each in checkpoints], against)


def comparable(rows: Iterable[Row]) -> list[list[Row]]:
    """Return the groups of two or more rows with a top-1 that answer one question."""
    groups: dict[tuple[str, str, int | None], list[Row]] = {}
    for row in rows:
        if "top1" in row:
            groups.setdefault(_question(row), []).append(row)
    return [group for group in groups.values() if len(group) > 1]


def compare_rows(rows: Sequence[Row], names: Mapping[str, str], *, against: Path | None = None) -> list[Pair]:
    """Compare every two checkpoints of `rows` on each question, or each with the checkpoint `against`.

    `names` are short names by path. Raises UserError where predictions are not kept, where the images differ, and
    where there is nothing to compare.
    """
    groups = comparable(rows)
    if not groups:
        raise UserError(_NOTHING)
    pairs = []
    for group in groups:
        answers = {str(row["checkpoint"]): load_answers(row, names[str(row["checkpoint"])]) for row in group}
        data, label_set, resized = _question(group[0])
        for first, second in _chosen(list(answers), against):
            pairs.append(Pair(data, label_set, resized, compare(answers[first], answers[second])))
    return pairs


def _question(row: Row) -> tuple[str, str, int | None]:
    _, data, label_set, resized = row_key(row)
    return data, label_set, resized


def _chosen(checkpoints: Sequence[str], against: Path | None) -> list[tuple[str, str]]:
    if against is None:
        return list(combinations(checkpoints, 2))
    base = str(against.parent.resolve() / against.name)
    if base not in checkpoints:
        raise UserError(f"{against} is not among the checkpoints that are evaluated; name its file there too")
    return [(each, base) for each in checkpoints if each != base]
