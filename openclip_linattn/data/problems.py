"""Says in sentences what the counts of a check mean for training."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from openclip_linattn.data.decoding import IMAGE_SUFFIXES
from openclip_linattn.data.shard_report import ShardReport

Severity = Literal["error", "warning"]
MAX_NAMED = 3
MAX_SUFFIXES = 8


@dataclass(frozen=True)
class Problem:
    """One finding: an error stops training (it would hang, crash or lose everything), a warning does not."""

    severity: Severity
    text: str


def find_problems(shards: Sequence[ShardReport]) -> list[Problem]:
    """Problems of the checked shards, errors first."""
    samples = sum(shard.samples for shard in shards)
    usable = sum(shard.usable for shard in shards)
    problems: list[Problem] = []
    if shards and not usable:
        none = (
            f"None of the {samples:,} checked samples can be trained on" if samples else "There is no sample"
        )
        problems.append(Problem("error", f"{none}: OpenCLIP would wait for ever."))
    severity: Severity = "warning" if usable else "error"
    problems += [Problem("error", text) for text in _faults(shard for shard in shards if shard.blocks)]
    problems += [Problem(severity, text) for text in _faults(shard for shard in shards if not shard.blocks)]
    problems += [Problem(severity, text) for text in _barren(shards)]
    if 0 < usable < samples:
        text = f"{samples - usable:,} of {samples:,} samples ({percent(samples - usable, samples)}) are lost"
        problems.append(Problem("warning", f"{text}: {reasons(shards)}."))
    problems += [Problem("warning", text) for text in _remarks(shards)]
    # A tar may hold names in any encoding, which no terminal could print.
    return [Problem(p.severity, p.text.encode(errors="backslashreplace").decode()) for p in problems]


def percent(part: int, whole: int) -> str:
    """`part` of `whole` in per cent, never rounded to 0 or 100 where it is neither."""
    share = 100 * part / whole
    if 0 < share < 0.1:
        return "< 0.1 %"
    return f"{share:.3g} %" if share < 99.9 or part == whole else "> 99.9 %"


def reasons(shards: Iterable[ShardReport]) -> str:
    """The reasons for losses with their counts, the most frequent first."""
    total: dict[str, int] = {}
    for shard in shards:
        for reason, count in shard.lost.items():
            total[reason] = total.get(reason, 0) + count
    ordered = sorted(total.items(), key=lambda item: -item[1])
    return ", ".join(f"{count:,} {reason}" for reason, count in ordered)


def _faults(shards: Iterable[ShardReport]) -> list[str]:
    """One sentence for each kind of fault of the files or commands themselves."""
    by_fault: dict[str, list[ShardReport]] = {}
    for shard in shards:
        if shard.fault is not None:
            # What a failed command said differs from shard to shard; its exit status does not.
            by_fault.setdefault(shard.fault.partition(":")[0], []).append(shard)
    return [_fault(str(found[0].fault), found) for found in by_fault.values()]


def _fault(fault: str, found: Sequence[ShardReport]) -> str:
    read = sum(shard.samples for shard in found)
    names = ", ".join(shard.name for shard in found[:MAX_NAMED])
    if len(found) == 1:
        return f"{names} {fault}; {read:,} samples were read."
    more = f" and {len(found) - MAX_NAMED:,} more" if len(found) > MAX_NAMED else ""
    return f"{len(found):,} shards have one fault ({names}{more}): the first {fault}; {read:,} samples read."


def _barren(shards: Iterable[ShardReport]) -> list[str]:
    """One sentence for each kind of shard that holds samples, or other members, and nothing usable."""
    barren = [shard for shard in shards if not shard.usable and (shard.samples or shard.fault is None)]
    by_kind: dict[tuple[str, ...], list[ShardReport]] = {}
    for shard in barren:
        by_kind.setdefault((*sorted(shard.members), *sorted(shard.lost)), []).append(shard)
    sentences = []
    for found in by_kind.values():
        like = f" ({len(found) - 1:,} more like it)" if len(found) > 1 else ""
        sentences.append(f"{_why(found[0])}{like}.")
    return sentences


def _why(shard: ShardReport) -> str:
    if not shard.samples:
        if shard.skipped_members:
            return (
                f"{shard.name} has {shard.skipped_members:,} members and none is named <key>.<suffix>, such "
                "as 000000000.jpg"
            )
        return f"{shard.name} has no members"
    seen = _seen(shard)
    apart = "; members of one sample do not stand next to each other" if shard.repeated_keys else ""
    absent = []
    if not shard.members.get("txt"):
        absent.append("a txt member")
    if not any(shard.members.get(suffix) for suffix in IMAGE_SUFFIXES):
        absent.append("an image member (jpg, png, jpeg or webp)")
    if absent:
        text = (
            f"0 of {shard.samples:,} samples in {shard.name} have {' or '.join(absent)}; members seen: {seen}"
        )
        return text + apart
    return f"0 of {shard.samples:,} samples in {shard.name} are usable: {reasons([shard])}{apart}"


def _seen(shard: ShardReport) -> str:
    frequent = sorted(shard.members, key=lambda suffix: -shard.members[suffix])[:MAX_SUFFIXES]
    more = len(shard.members) - len(frequent)
    return ", ".join(sorted(frequent)) + (f" and {more:,} others" if more else "")


def _remarks(shards: Sequence[ShardReport]) -> list[str]:
    remarks = []
    recoverable = sum(shard.recoverable for shard in shards)
    if recoverable:
        remarks.append(
            f"{recoverable:,} of the lost samples have a good image and caption beside a broken member "
            "(recoverable by leaving that member out)."
        )
    empty = sum(shard.empty_captions for shard in shards)
    if empty:
        remarks.append(f"{empty:,} usable samples have an empty caption.")
    repeated = sum(shard.repeated_keys for shard in shards)
    if repeated:
        remarks.append(
            f"{repeated:,} samples repeat a key of their own shard (written twice, or pulled apart)."
        )
    skipped = sum(shard.skipped_members for shard in shards if shard.samples)
    if skipped:
        remarks.append(
            f"{skipped:,} members are passed over: their names have no suffix or begin with a dot."
        )
    undecoded = sorted({suffix for shard in shards for suffix in shard.undecoded})
    if undecoded:
        remarks.append(f"Members that training decodes were not checked: {', '.join(undecoded)}.")
    return remarks
