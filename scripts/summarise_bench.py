"""The figures that the goals are about, from the reports of `openclip-linattn bench ops` below a folder.

python scripts/summarise_bench.py FOLDER
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

KINDS = ("normlinear", "linear")
SHORTEST = 512
"""Tokens from which on a linear kind is compared with softmax."""


def shares(report: dict[str, Any]) -> Iterator[str]:
    """Lines with the bytes that must be moved per second over those that a copy moves."""
    copy = report["ceilings"]["copy_bytes_per_s"]
    for row in _rows(report):
        if row["seconds"] is None or row["check"] != "passed":
            yield f"{_what(row)}: no share ({row['check']}, {row['status']})"
        else:
            share = row["least_bytes_per_s"] / copy
            yield f"{_what(row)}: {share:.0%} of the measured copy bandwidth of {copy / 1e12:.3g} TB/s"


def ratios(report: dict[str, Any]) -> Iterator[str]:
    """Lines with the time of softmax over that of the operator."""
    for row in _rows(report):
        if row["tokens"] < SHORTEST:
            continue
        if row["softmax_speedup"] is None:
            yield f"{_what(row)}: no ratio to softmax ({row['check']}, {row['status']})"
        else:
            note = "" if row["softmax_status"] == "measured" else f", softmax {row['softmax_status']}"
            yield f"{_what(row)}: softmax takes {row['softmax_speedup']:.3g} times as long{note}"


def _rows(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in report["rows"] if row["operator"] in KINDS]


def _what(row: dict[str, Any]) -> str:
    return f"{row['operator']} {row['pass']}, B*H {row['batch'] * row['heads']}, N {row['tokens']}"


def main(folder: Path) -> None:
    """Prints the lines of every report; exits with a sentence where there is none."""
    paths = sorted(folder.rglob("ops-*.json"))
    if not paths:
        sys.exit(f"no ops-*.json below {folder}: the benchmarks wrote no report")
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    for lines in (shares, ratios):
        for report in reports:
            for line in lines(report):
                print(line)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
