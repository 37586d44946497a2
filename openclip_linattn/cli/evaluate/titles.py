"""Short names for what stands in a table."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class Titles:
    """Names of checkpoints and sets, by what rows say in `checkpoint` and `data`."""

    checkpoints: dict[str, str]
    sets: dict[str, str]

    def of(self, row: Row) -> tuple[str, str]:
        """The names of a row's checkpoint and set."""
        return self.checkpoints[str(row["checkpoint"])], self.sets[str(row["data"])]


def titles_of(rows: Sequence[Row]) -> Titles:
    """Return titles for `rows`: a set has its own name, and a longer one where two sets share it."""
    own = {str(row["data"]): str(row["dataset"]) for row in rows}
    paths = short_names(own)
    names = list(own.values())
    sets = {data: name if names.count(name) == 1 else paths[data] for data, name in own.items()}
    return Titles(short_names(str(row["checkpoint"]) for row in rows), sets)


def short_names(paths: Iterable[str]) -> dict[str, str]:
    """Return for each path the fewest of its last parts that tell it from the others.

    A run's checkpoints folder, which tells nothing, is left out where the names differ without it.
    """
    parts = {path: tuple(part for part in Path(path).parts if part != "checkpoints") for path in paths}
    if len(set(parts.values())) < len(parts):
        parts = {path: Path(path).parts for path in parts}
    for length in range(1, max((len(each) for each in parts.values()), default=0) + 1):
        short = {path: "/".join(each[-length:]) for path, each in parts.items()}
        if len(set(short.values())) == len(short):
            return short
    return {path: path for path in parts}
