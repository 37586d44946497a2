"""Measurements of operators as rows: per token, per T, against softmax, the bare products and the floor."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from openclip_linattn.bench.ceilings import Ceilings, least_bytes, product_flops
from openclip_linattn.bench.checks import Finding
from openclip_linattn.bench.contestants import BARE, SOFTMAX, Contestant
from openclip_linattn.bench.inputs import CONTIGUOUS, Shape
from openclip_linattn.bench.passes import dtype_name
from openclip_linattn.bench.report import FAILED, PASSED, Row, failed_names, time_columns
from openclip_linattn.bench.sweep import MEASURED, Measurement

BARE_FORMS = (BARE, f"{BARE}-{CONTIGUOUS}")


def operator_rows(
    measurements: Sequence[Measurement],
    entrants: Sequence[Contestant],
    shape: Shape,
    ceilings: Ceilings,
    findings: Sequence[Finding],
) -> list[Row]:
    """One row per measurement.

    softmax_speedup is the time of softmax over the row's; bare_ratio the row's time over that of the bare products,
    in whichever layout they were faster; floor_share the least possible time over the row's. All three are None for
    what was not measured, and for a candidate of which a check failed; the first two also where the baseline's own
    check failed.
    """
    builder = _Builder(measurements, {e.name: e for e in entrants}, shape, ceilings, failed_names(findings))
    return [builder.row(measurement) for measurement in measurements]


@dataclass
class _Builder:
    measurements: Sequence[Measurement]
    entrants: dict[str, Contestant]
    shape: Shape
    ceilings: Ceilings
    failed: set[str]
    seconds: dict[tuple[str, int, str], float] = field(default_factory=dict)
    status: dict[tuple[str, int, str], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for m in self.measurements:
            if (seconds := time_columns(m)["seconds"]) is not None:
                self.seconds[m.name, m.size, m.direction] = seconds
                self.status[m.name, m.size, m.direction] = m.status

    def row(self, m: Measurement) -> Row:
        """The row of one measurement."""
        entrant, shape, tokens = self.entrants[m.name], self.shape, m.size
        times = time_columns(m)
        seconds = times["seconds"]
        moved = least_bytes(entrant.kind, m.direction, shape.tensor_bytes(tokens))
        return {
            "operator": m.name,
            "role": entrant.role,
            "layout": entrant.layout,
            "pass": m.direction,
            "batch": shape.batch,
            "heads": shape.heads,
            "tokens": tokens,
            "head_width": shape.head_width,
            "dtype": dtype_name(shape.dtype),
            **times,
            "tokens_per_s": shape.batch * tokens / seconds if seconds else None,
            "peak_bytes": m.peak,
            "peak_T": None if m.peak is None else m.peak / shape.tensor_bytes(tokens),
            "energy_joules": m.joules,
            "least_bytes": moved,
            "least_bytes_per_s": moved / seconds if seconds else None,
            "floor_seconds": self._floor(entrant, m.direction, tokens, moved),
            **self._ratios(m, seconds, self._floor(entrant, m.direction, tokens, moved)),
            "check": FAILED if m.name in self.failed else PASSED,
            "times": m.times,
        }

    def _floor(self, entrant: Contestant, direction: str, tokens: int, moved: int) -> float:
        shape = self.shape
        flops = product_flops(
            entrant.kind,
            direction,
            batch=shape.batch,
            heads=shape.heads,
            tokens=tokens,
            head_width=shape.head_width,
        )
        return self.ceilings.floor_seconds(moved, flops)

    def _ratios(self, m: Measurement, seconds: float | None, floor: float) -> Row:
        empty = {"softmax_speedup": None, "softmax_status": None, "bare_ratio": None, "floor_share": None}
        if seconds is None or m.status != MEASURED or m.name in self.failed:
            return empty
        key = (SOFTMAX, m.size, m.direction)
        softmax = None if SOFTMAX in self.failed else self.seconds.get(key)
        bare = [
            self.seconds[name, m.size, m.direction]
            for name in BARE_FORMS
            if name not in self.failed and (name, m.size, m.direction) in self.seconds
        ]
        return {
            "softmax_speedup": softmax / seconds if softmax else None,
            "softmax_status": self.status[key] if softmax else None,
            "bare_ratio": seconds / min(bare) if bare else None,
            "floor_share": floor / seconds,
        }
