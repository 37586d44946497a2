"""Says in sentences what the counts of a check mean for training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from openclip_linattn.data.checks.between_shards import Meetings, Overlap
from openclip_linattn.data.checks.shard_report import ShardReport
from openclip_linattn.data.decoding import IMAGE_SUFFIXES

Severity = Literal["error", "warning"]
MAX_NAMED = 3
MAX_SUFFIXES = 8


@dataclass(frozen=True)
class Problem:
    """One finding: an error stops training or spoils it (it would hang, crash, lose everything or mix captions up), or
    the check could not do its work; a warning does neither.
    """

    severity: Severity
    text: str


def find_problems(shards: Sequence[ShardReport], overlap: Overlap) -> list[Problem]:
    """Problems of the checked shards: first one reason that takes most of the samples, then errors first."""
    samples = sum(shard.samples for shard in shards)
    usable = sum(shard.usable for shard in shards)
    problems: list[Problem] = []
    if shards and not usable:
        none = (
            f"None of the {samples:,} checked samples can be trained on" if samples else "There is no sample"
        )
        problems.append(Problem("error", f"{none}: OpenCLIP would wait for ever."))
    fatal = [shard for shard in shards if shard.blocks or shard.died]
    rest = [shard for shard in shards if not (shard.blocks or shard.died)]
    severity: Severity = "warning" if usable else "error"
    problems += [Problem("error", text) for text in _faults(fatal)]
    problems += [Problem("error", text) for text in _mixtures(overlap)]
    problems += [Problem(severity, text) for text in _faults(rest)]
    problems += [Problem(severity, text) for text in _barren(shards)]
    if 0 < usable < samples:
        text = f"{samples - usable:,} of {samples:,} samples ({percent(samples - usable, samples)}) are lost"
        problems.append(Problem("warning", f"{text}: {reasons(shards)}."))
    problems += [Problem("warning", text) for text in (*_remarks(shards), *_meetings(overlap))]
    if usable:
        problems[:0] = [Problem("warning", text) for text in _main_loss(shards, samples)]
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
    return ", ".join(f"{count:,} {reason}" for reason, count in _by_reason(shards))


def _by_reason(shards: Iterable[ShardReport]) -> list[tuple[str, int]]:
    total: Counter[str] = Counter()
    for shard in shards:
        total.update(shard.lost)
    return total.most_common()


def _main_loss(shards: Sequence[ShardReport], samples: int) -> list[str]:
    """A sentence where one reason takes more than half of the samples: the layout may not be what it should be."""
    return [
        f"More than half of the samples ({count:,} of {samples:,}) are lost for one reason: {reason}."
        for reason, count in _by_reason(shards)[:1]
        if 2 * count > samples
    ]


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
    apart = "; members of one sample do not stand next to each other" if shard.split_keys else ""
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


def _mixtures(overlap: Overlap) -> list[str]:
    mixing = overlap.mixing
    if not mixing.pairs:
        return []
    return [
        f"Captions can be mixed up: {_pairs(mixing)}, and where they meet OpenCLIP puts the image of the one beside "
        "the caption of the other."
    ]


def _meetings(overlap: Overlap) -> list[str]:
    """Sentences on what is in more than one shard."""
    remarks = []
    if overlap.joining.pairs:
        remarks.append(
            f"{_pairs(overlap.joining)}, and where they meet OpenCLIP moves members from the one to the other; "
            "images and captions stay together."
        )
    if overlap.apart.pairs:
        remarks.append(f"{_pairs(overlap.apart)}; OpenCLIP keeps them apart, since their suffixes repeat.")
    remarks += [
        f"{_names(group)} hold the same samples (keys, captions and image sizes)."
        for group in overlap.duplicates[:MAX_NAMED]
    ]
    if len(overlap.duplicates) > MAX_NAMED:
        remarks.append(f"{len(overlap.duplicates):,} groups of shards, in all, hold the same samples.")
    if overlap.shared:
        remarks.append(
            f"Keys are used in more than one shard: {overlap.shared:,} of {overlap.sampled:,} sampled keys, for "
            f"instance in {', '.join(overlap.sharing)}."
        )
    return remarks


def _pairs(meetings: Meetings) -> str:
    last, first, key = meetings.examples[0]
    pairs = f"{meetings.pairs:,} pairs" if meetings.pairs > 1 else "1 pair"
    return f"{pairs} of shards (such as {last} and {first}, {key}) have the last key of one as first key of the other"


def _names(names: Sequence[str]) -> str:
    named = ", ".join(names[:MAX_NAMED])
    return f"{named} and {len(names) - MAX_NAMED:,} more" if len(names) > MAX_NAMED else named


def _remarks(shards: Sequence[ShardReport]) -> list[str]:
    remarks = []
    recoverable = sum(shard.recoverable for shard in shards)
    if recoverable:
        remarks.append(
            f"{recoverable:,} of the lost samples have a good image and caption beside a broken member "
            "(recoverable by leaving that member out)."
        )
    bombs = max((shard.bomb_pixels for shard in shards), default=0)
    if bombs:
        remarks.append(
            f"Images of up to {bombs:,} pixels are too large for Pillow, which takes them for decompression bombs."
        )
    empty = sum(shard.empty_captions for shard in shards)
    if empty:
        remarks.append(f"{empty:,} usable samples have an empty caption.")
    return remarks + _layout_remarks(shards)


def _layout_remarks(shards: Sequence[ShardReport]) -> list[str]:
    """Sentences on members that stand or are named otherwise than they should."""
    remarks = []
    repeated = sum(shard.repeated_keys for shard in shards)
    if repeated:
        remarks.append(f"Samples written again under a key of their own shard: {repeated:,}.")
    split = sum(shard.split_keys for shard in shards)
    if split:
        remarks.append(
            f"Keys whose members are pulled apart (those of one sample must stand next to each other): {split:,}."
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
