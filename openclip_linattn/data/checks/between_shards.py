"""What shards have in common that they should not: keys at their edges, keys at large, and whole contents.

OpenCLIP groups the members of one endless stream: nothing marks where a shard ends. Where the last sample of a shard
has the key of the next shard's first one, members go to the earlier sample until a suffix repeats, so that an image
can get the caption of another. Which shards meet depends on the order, which is drawn anew in every epoch; so all
pairs are looked at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from openclip_linattn.data.checks.shard_report import ShardReport
from openclip_linattn.data.decoding import IMAGE_SUFFIXES

EXAMPLES = 3


@dataclass
class Meetings:
    """Ordered pairs of shards in which the last key of the one is the first of the other, and a few of them.

    An example is (shard, next shard, key).
    """

    pairs: int = 0
    examples: list[tuple[str, str, str]] = field(default_factory=list)

    def add(self, last: ShardReport, following: Sequence[ShardReport]) -> None:
        """Count `last` before each of the shards `following`, which begin with the same key and suffixes."""
        # These all begin alike, so `last` is one of them where it begins like the first. A search would take n^2.
        begins = (last.keys.first, last.keys.first_suffixes)
        itself = begins == (following[0].keys.first, following[0].keys.first_suffixes)
        self.pairs += len(following) - itself
        for shard in following[: EXAMPLES + 1]:
            if shard is not last and len(self.examples) < EXAMPLES:
                self.examples.append((last.name, shard.name, str(last.keys.last)))


@dataclass
class Overlap:
    """What was found between the shards that were read.

    `mixing` are meetings that put an image beside another's caption, `joining` others in which members go over,
    `apart` those that stay apart because their suffixes repeat. `duplicates` are groups of shards with the same
    keys, captions and image sizes. `overlapping` counts shards whose range of keys meets another's (where none
    does, no key is in two shards); of the up to 16 keys that were kept of each, `sampled` different ones,
    `shared` are in more than one shard: a key that few shards share may escape this.
    """

    mixing: Meetings = field(default_factory=Meetings)
    joining: Meetings = field(default_factory=Meetings)
    apart: Meetings = field(default_factory=Meetings)
    duplicates: list[list[str]] = field(default_factory=list)
    overlapping: int = 0
    sampled: int = 0
    shared: int = 0
    sharing: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """The findings as JSON values."""
        return asdict(self)


def find_overlap(shards: Sequence[ShardReport]) -> Overlap:
    """Compare the shards with each other."""
    overlap = Overlap()
    _meet(shards, overlap)
    groups = _groups(shards)
    overlap.duplicates = [[shard.name for shard in group] for group in groups if len(group) > 1]
    # Shards that are the same share their keys as well, which says nothing new.
    _share([group[0] for group in groups], overlap)
    return overlap


def _meet(shards: Sequence[ShardReport], overlap: Overlap) -> None:
    starts: dict[str, dict[tuple[str, ...], list[ShardReport]]] = {}
    for shard in shards:
        if shard.keys.first is not None:
            suffixes = tuple(shard.keys.first_suffixes)
            starts.setdefault(shard.keys.first, {}).setdefault(suffixes, []).append(shard)
    for shard in shards:
        if shard.keys.last is None:
            continue
        for suffixes, following in starts.get(shard.keys.last, {}).items():
            taken = joined_suffixes(shard.keys.last_suffixes, suffixes)
            if mixes(shard.keys.last_suffixes, taken):
                overlap.mixing.add(shard, following)
            elif taken:
                overlap.joining.add(shard, following)
            else:
                overlap.apart.add(shard, following)


def joined_suffixes(last: Sequence[str], first: Sequence[str]) -> list[str]:
    """The suffixes of a sample that go to the one before it with the same key: up to one that this has."""
    taken: list[str] = []
    for suffix in first:
        if suffix in last:
            break
        taken.append(suffix)
    return taken


def mixes(last: Sequence[str], taken: Sequence[str]) -> bool:
    """Whether the joined sample is one that OpenCLIP uses, its image of the one and its caption of the other."""
    image = next((suffix for suffix in IMAGE_SUFFIXES if suffix in last or suffix in taken), None)
    if image is None or ("txt" not in last and "txt" not in taken):
        return False
    return (image in taken) != ("txt" in taken)


def _groups(shards: Sequence[ShardReport]) -> list[list[ShardReport]]:
    """The shards that were read whole, those of the same content together."""
    by_digest: dict[str, list[ShardReport]] = {}
    for shard in shards:
        if shard.digest is not None:
            by_digest.setdefault(shard.digest, []).append(shard)
    return list(by_digest.values())


def _share(shards: Sequence[ShardReport], overlap: Overlap) -> None:
    """Count keys that are in more than one of the shards, as far as ranges and sketches tell."""
    meeting = _overlapping(shards)
    counts = Counter(hash_ for shard in meeting for hash_ in shard.keys.sketch)
    overlap.overlapping = len(meeting)
    overlap.sampled = len(counts)
    overlap.shared = sum(count > 1 for count in counts.values())
    sharing = (shard.name for shard in meeting if any(counts[hash_] > 1 for hash_ in shard.keys.sketch))
    overlap.sharing = [name for _, name in zip(range(EXAMPLES), sharing, strict=False)]


def _overlapping(shards: Sequence[ShardReport]) -> list[ShardReport]:
    """The shards whose range of keys meets that of another, in the order of their ranges."""
    ordered = sorted(shards, key=lambda shard: (str(shard.keys.low), str(shard.keys.high)))
    meeting: dict[int, ShardReport] = {}
    widest: ShardReport | None = None
    for shard in ordered:
        if widest is not None and str(shard.keys.low) <= str(widest.keys.high):
            meeting[id(widest)] = widest
            meeting[id(shard)] = shard
        if widest is None or str(shard.keys.high) > str(widest.keys.high):
            widest = shard
    return list(meeting.values())
