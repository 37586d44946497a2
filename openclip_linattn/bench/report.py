"""What a benchmark found, and its files: a CSV of the rows, and a JSON with every round and the environment."""

import csv
import io
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from openclip_linattn.bench.checks import Finding
from openclip_linattn.bench.sweep import EXTRAPOLATED, MEASURED, Measurement
from openclip_linattn.files import write_json, write_text

Row = dict[str, Any]

PASSED = "passed"
FAILED = "check failed"
_NOT_IN_CSV = frozenset({"times"})


@dataclass(frozen=True)
class Report:
    """The rows of a benchmark, the checks behind them and the environment.

    benchmark: "ops" or "towers". protocol: the sizes and bounds of the run. methods: how each number was measured.
    """

    benchmark: str
    stem: str
    environment: dict[str, Any]
    protocol: dict[str, Any]
    methods: dict[str, str]
    ceilings: dict[str, Any]
    findings: list[Finding]
    rows: list[Row]

    @property
    def failures(self) -> list[str]:
        """A sentence for the first failed check of every candidate."""
        first: dict[str, Finding] = {}
        for finding in self.findings:
            if not finding.passed:
                first.setdefault(finding.name, finding)
        return [finding.sentence() for finding in first.values()]

    def as_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return {
            "benchmark": self.benchmark,
            "environment": self.environment,
            "protocol": self.protocol,
            "methods": self.methods,
            "ceilings": self.ceilings,
            "checks": [_finding_row(finding) for finding in self.findings],
            "rows": self.rows,
        }


def write_report(report: Report, folder: Path) -> list[Path]:
    """Writes <stem>.csv and <stem>.json into the folder, which is made, and returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{report.stem}.csv", folder / f"{report.stem}.json"]
    write_text(paths[0], _csv(report.rows))
    write_json(paths[1], report.as_dict())
    return paths


def failed_names(findings: Iterable[Finding]) -> set[str]:
    """The candidates of which a check failed."""
    return {finding.name for finding in findings if not finding.passed}


def time_columns(measurement: Measurement) -> Row:
    """Status, median and quartiles of a measurement; the quartiles are None for fewer than three rounds."""
    times = measurement.times
    counted = len(times) if measurement.status == MEASURED else 0
    quartiles = statistics.quantiles(times, n=4, method="inclusive") if counted >= 3 else [None] * 3
    timed = measurement.status in (MEASURED, EXTRAPOLATED)
    return {
        "status": measurement.status,
        "rounds": counted,
        "seconds": statistics.median(times) if timed else None,
        "seconds_q1": quartiles[0],
        "seconds_q3": quartiles[2],
    }


def _finding_row(finding: Finding) -> Row:
    row = asdict(finding)
    if finding.problem:
        row["error"] = row["allowed"] = None
    return {**row, "error": _finite(row["error"]), "passed": finding.passed}


def _finite(value: float | None) -> float | str | None:
    """NaN and infinity are no JSON numbers; as words they keep their meaning."""
    return str(value) if value is not None and value - value != 0 else value


def _csv(rows: list[Row]) -> str:
    buffer = io.StringIO()
    columns = [column for column in (rows[0] if rows else {}) if column not in _NOT_IN_CSV]
    writer = csv.DictWriter(buffer, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()
