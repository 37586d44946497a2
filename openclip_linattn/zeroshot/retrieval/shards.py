"""Reads the captions of a retrieval set in tars, and where its images stand there, without reading an image."""

import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from webdataset.tariterators import group_by_keys

from openclip_linattn.errors import UserError
from openclip_linattn.zeroshot.retrieval.images import ImagePlace
from openclip_linattn.zeroshot.sets.reading import IMAGE_MEMBERS
from openclip_linattn.zeroshot.sets.shards import META_MEMBER, count_samples


def read_shard(shard: Path) -> list[tuple[ImagePlace, list[str]]]:
    """Return (image, its captions) of every sample: the lines of its txt member, as clip_benchmark takes them.

    Raises UserError naming shard and key for a sample without an image or without a txt member, for a txt
    that is not UTF-8, and for a tar that is compressed, damaged or cut.
    """
    samples = count_samples(shard)  # looks for damage, which the reading below would take for an early end
    try:
        with tarfile.open(shard, "r:") as tar:
            found = [_read(tar, shard, sample) for sample in group_by_keys(_members(tar, shard))]
    except tarfile.ReadError as error:
        raise UserError(f"{shard} is compressed ({error}); retrieval needs plain tars") from error
    if len(found) != samples:
        raise UserError(
            f"{shard}: {len(found)} of {samples} samples were read; did the tar change meanwhile?"
        )
    return found


def _members(tar: tarfile.TarFile, shard: Path) -> Iterator[dict[str, Any]]:
    for member in tar:
        if member.isreg() and not META_MEMBER.match(member.name):
            yield {"fname": member.name, "data": member, "__url__": str(shard)}


def _read(tar: tarfile.TarFile, shard: Path, sample: dict[str, Any]) -> tuple[ImagePlace, list[str]]:
    key = sample["__key__"]
    suffix = next((each for each in IMAGE_MEMBERS if each in sample), None)
    if suffix is None or "txt" not in sample:
        lacking = f"image ({', '.join(IMAGE_MEMBERS)})" if suffix is None else "txt member with captions"
        seen = ", ".join(each for each in sample if not each.startswith("__"))
        raise UserError(f"{shard}: sample {key!r} has no {lacking}; members seen: {seen}")
    image, text = sample[suffix], tar.extractfile(sample["txt"])
    assert text is not None, "only regular members are grouped"
    try:
        captions = text.read().decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise UserError(f"{shard}: sample {key!r}: its txt is not UTF-8 (byte {error.start})") from error
    return ImagePlace(shard, key, suffix, image.offset_data, image.size), captions
