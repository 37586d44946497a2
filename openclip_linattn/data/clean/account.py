"""The account of a cleaning: what came in, what went out, and what was dropped for which reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

from openclip_linattn.data.clean.sealing import Sealed
from openclip_linattn.data.clean.writing import Record

VERSION = 1


def make_account(call: Mapping[str, Any], sealed: Sealed, records: Sequence[Record]) -> dict[str, Any]:
    """The account as JSON values: `in` is `out` and all of `dropped` together.

    `in` and `dropped` are counted from what was read, `out` and what was changed from what was written. Raises
    RuntimeError where they do not add up.
    """
    dropped = _sum(shard.dropped for shard in sealed.shards)
    out = sum(record.samples for record in records)
    if sealed.samples != out + sum(dropped.values()):
        raise RuntimeError(f"{sealed.samples} samples in are not {out} out and {dropped} dropped")
    return {
        "version": VERSION,
        "source": call["source"],
        "filters": call["settings"],
        "in": sealed.samples,
        "out": out,
        "dropped": dropped,
        "recovered": sum(shard.recovered for shard in sealed.shards),
        "images_resized": sum(record.resized for record in records),
        "json_made": sum(record.json_made for record in records),
        "members_left_out": _sum(record.left_out for record in records),
        "without_field": _sum(shard.lacking for shard in sealed.shards),
        "input_shards": len(sealed.shards),
        "output_shards": len(records),
        "output_bytes": sum(record.bytes for record in records),
        "faults": [
            {"shard": shard.url, "fault": shard.fault, "samples": shard.samples}
            for shard in sealed.shards
            if shard.fault is not None
        ],
        "made_with": {name: version(name) for name in ("openclip-linattn", "pillow")},
    }


def _sum(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Sums by name, the largest first."""
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    return dict(sorted(total.items(), key=lambda item: (-item[1], item[0])))
