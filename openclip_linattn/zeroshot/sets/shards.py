"""Locates the tars of an evaluation set and counts their samples without reading an image."""

import re
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from webdataset.shardlists import expand_urls
from webdataset.tariterators import group_by_keys

from openclip_linattn.errors import UserError

COUNT_FILE = "nshards.txt"
META_MEMBER = re.compile(r"__[^/]*__($|/)")  # webdataset skips these


def find_shards(source: str) -> tuple[Path, list[Path]]:
    """Return (what was meant, its tars in order) for a folder, a folder with test/, or a brace pattern.

    The first is the folder of the tars, or the pattern with its folder made absolute. Raises UserError when
    nothing is there, and for remote sources.
    """
    if "://" in source or source.startswith("pipe:"):
        raise UserError(f"{source!r} is not a local path; copy the evaluation set here and name its folder")
    path = Path(source)
    if path.is_dir():
        folder = path / "test" if (path / "test").is_dir() else path
        folder = folder.resolve()
        shards = sorted(folder.glob("*.tar"), key=_natural)
        if not shards:
            raise UserError(
                f"{folder} holds no tar; expected 0.tar, 1.tar, ... there or in a folder test/ below it"
            )
        return folder, shards
    shards = [path] if path.is_file() else _expand(source)
    missing = [shard for shard in shards if not shard.is_file()]
    if missing:
        raise UserError(
            f"{len(missing)} of {len(shards)} shard(s) of {source!r} do not exist, first {missing[0]}; "
            "name a folder, or tars in a pattern such as FOLDER/{0..3}.tar"
        )
    if len({shard.resolve() for shard in shards}) < len(shards):
        raise UserError(f"{source!r} names a shard twice; its images would be counted twice")
    return path.parent.resolve() / path.name, [shard.parent.resolve() / shard.name for shard in shards]


def check_shard_count(shards: list[Path]) -> None:
    """Raise UserError where nshards.txt, if it lies beside the shards, disagrees with them."""
    path = shards[0].parent / COUNT_FILE
    if not path.is_file():
        return
    text = path.read_text(encoding="utf-8", errors="replace").strip()
    if not re.fullmatch(r"[0-9]+", text):
        raise UserError(f"{path} holds {text[:40]!r}; it must be the number of tars, here {len(shards)}")
    stated = int(text)
    numbers = {int(shard.stem) for shard in shards if re.fullmatch(r"[0-9]+", shard.stem)}
    gaps = sorted(set(range(stated)) - numbers) if len(numbers) == len(shards) and stated < 10**7 else []
    if stated != len(shards) or gaps:
        first = f"; {gaps[0]}.tar is missing" if gaps else ""
        raise UserError(
            f"{path} says {stated} shard(s), but {len(shards)} tar(s) lie beside it{first}: "
            "complete the set or correct the number"
        )


def count_samples(shard: Path) -> int:
    """Return the number of samples in a tar as webdataset groups them, reading headers only.

    Raises UserError for a tar that is damaged or cut. A stream reader takes a tar cut between two members
    for a shorter one, so the end mark is looked for too.
    """
    try:
        return sum(1 for _ in group_by_keys(_members(shard)))
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise UserError(f"{shard} cannot be read as a tar ({error}); fetch or write it again") from error
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{shard}: {error.args[0]}") from error


def _members(shard: Path) -> Iterator[dict[str, object]]:
    tar: Any  # its list of members is no public attribute
    with tarfile.open(shard) as tar:
        while (member := tar.next()) is not None:
            tar.members = []  # else every header stays in memory
            if member.isreg() and not META_MEMBER.match(member.name):
                yield {"fname": member.name, "data": b"", "__url__": str(shard)}
        tar.fileobj.seek(tar.offset)
        if tar.fileobj.read(512) != bytes(512):
            raise UserError(
                f"{shard} has no end mark: it is cut or damaged at byte {tar.offset}; fetch or write it again"
            )


def _expand(source: str) -> list[Path]:
    try:
        return [Path(url) for url in expand_urls(source)]
    except ValueError as error:
        raise UserError(
            f"{source!r} has unbalanced braces; write a pattern such as FOLDER/{{0..3}}.tar"
        ) from error
    except AssertionError as error:  # an environment variable of the pattern is not set
        raise UserError(f"{source!r}: {error}") from error


def _natural(path: Path) -> tuple[list[int | str], str]:
    parts = re.split(r"([0-9]+)", path.name)
    return [int(part) if index % 2 else part for index, part in enumerate(parts)], path.name
