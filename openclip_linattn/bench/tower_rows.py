"""Measurements of towers as rows: per image, against the softmax tower and what the arithmetic allows."""

from collections.abc import Sequence

import torch

from openclip_linattn.bench.ceilings import TRAINING_FLOPS, Ceilings
from openclip_linattn.bench.checks import Finding
from openclip_linattn.bench.passes import TRAINING, dtype_name
from openclip_linattn.bench.report import FAILED, PASSED, Row, failed_names, time_columns
from openclip_linattn.bench.sweep import Measurement
from openclip_linattn.bench.tower_setup import Entrant


def tower_rows(
    measurements: Sequence[Measurement],
    chosen: Sequence[Entrant],
    batch: int,
    dtype: torch.dtype,
    ceilings: Ceilings,
    findings: Sequence[Finding],
) -> list[Row]:
    """One row per measurement.

    softmax_speedup is the time of the softmax twin over the row's, flop_ratio the same of their products, which is
    the most that the speed-up can be where both run at the same rate; floor_share the time of the products at the
    measured rate over the row's. Speed-up and share are None for a tower of which a check failed.
    """
    entrants = {entrant.name: entrant for entrant in chosen}
    failed = failed_names(findings)
    seconds = {(m.name, m.size, m.direction): time_columns(m)["seconds"] for m in measurements}

    def row(m: Measurement) -> Row:
        entrant, times = entrants[m.name], time_columns(m)
        own = times["seconds"]
        twin = None if entrant.twin in failed else seconds.get((entrant.twin, m.size, m.direction))
        flops = batch * entrant.forward_flops(m.size)
        floor = ceilings.floor_seconds(0, flops * (TRAINING_FLOPS if m.direction == TRAINING else 1))
        good = own is not None and m.name not in failed
        return {
            "model": m.name,
            "attention": entrant.config.tower.kind,
            "pass": m.direction,
            "batch": batch,
            "pixels": m.size,
            "tokens": entrant.tokens(m.size),
            "dtype": dtype_name(dtype),
            **times,
            "images_per_s": batch / own if own else None,
            "tokens_per_s": batch * entrant.tokens(m.size) / own if own else None,
            "peak_bytes": m.peak,
            "energy_joules": m.joules,
            "forward_gflop": flops / batch / 1e9,
            "floor_seconds": floor,
            "softmax_speedup": twin / own if good and twin else None,
            "flop_ratio": entrants[entrant.twin].forward_flops(m.size) / entrant.forward_flops(m.size),
            "floor_share": floor / own if good else None,
            "check": FAILED if m.name in failed else PASSED,
            "times": m.times,
        }

    return [row(measurement) for measurement in measurements]
