"""Reads shards as OpenCLIP's training reader does: the same members, grouped into the same samples.

OpenCLIP reads with `webdataset` and its own `group_by_keys_nothrow` (open_clip_train/data.py), which need
torch; this module needs the standard library only, and says what went wrong instead of logging it.
"""

from __future__ import annotations

import lzma
import re
import stat
import tarfile
import zlib
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol, cast
from urllib.parse import urlparse

from openclip_linattn.data.pipes import PipeStream
from openclip_linattn.errors import UserError

# webdataset's rules: what is a key and what a suffix, and which members are passed over.
_KEY_AND_SUFFIX = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")
NOT_REGULAR = "is not a regular file"
REMOTE = ("s3", "gs", "http", "https")
READABLE = ("local", "pipe", *REMOTE)

# What tarfile and the decompressors under it raise for broken archives.
_BROKEN = (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, ValueError)
_META = re.compile(r"__[^/]*__($|/)")
_PADDING = 1 << 20  # bytes of zeros after the end, more than any tar program writes


class Stream(Protocol):
    """What is read: a file or the output of a command."""

    def read(self, size: int = -1, /) -> bytes:
        """At most `size` bytes; none at the end."""

    def close(self) -> None:
        """Close the stream; raises OSError where a command has failed."""


@dataclass
class RawSample:
    """The members of one sample, undecoded, by lower-case suffix and in the order of the tar."""

    key: str
    members: dict[str, bytes] = field(default_factory=dict)


@dataclass
class ShardLog:
    """What happened while a shard was read: `fault` is a clause ("is empty"), or None where all went well."""

    fault: str | None = None
    skipped: list[str] = field(default_factory=list)


class _Header(tarfile.TarInfo):
    """Notes why the headers ended: tarfile itself stops in silence at a damaged or missing one."""

    @classmethod
    def fromtarfile(cls, tarfile_: tarfile.TarFile) -> Any:
        try:
            return super().fromtarfile(tarfile_)
        except tarfile.HeaderError as error:
            tarfile_.end = type(error).__name__  # type: ignore[attr-defined]
            raise


def scheme_of(url: str) -> str:
    """`local`, `pipe`, or the scheme of a remote shard (`s3`, `https`, ...), by webdataset's own rule.

    Raises UserError for brackets that enclose no address.
    """
    try:
        name = urlparse(url).scheme
    except ValueError as error:
        raise UserError(f"{url} cannot be opened as a path or a URL: {error}.") from error
    return "local" if name in ("", "file") else name


def local_path(url: str) -> Path:
    """Path of a local shard, given as a path or as file:/path."""
    return Path(urlparse(url).path) if url.startswith("file:") else Path(url)


def open_shard(url: str, *, silence: float = 60.0) -> Stream:
    """Open a local or remote shard, or run the command of a `pipe:` one, which is ended when silent for `silence` s.

    A remote shard goes on from the byte it had when its connection drops or is as silent. Raises OSError where
    this fails, the scheme is none of `READABLE`, or the file is no regular one (reading a FIFO may never end).
    """
    scheme = scheme_of(url)
    if scheme == "pipe":
        return PipeStream(url[len("pipe:") :], silence=silence)
    if scheme in REMOTE:
        from openclip_linattn.data.remote import open_remote  # its clients are slow to import

        return open_remote(url, silence=silence)
    if scheme != "local":
        raise OSError(f"{scheme}: shards are not read here")
    path = local_path(url)
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError("is a directory" if path.is_dir() else NOT_REGULAR)
    return path.open("rb")


def read_members(url: str, log: ShardLog, *, silence: float = 60.0) -> Iterator[tuple[str, bytes]]:
    """Yield (name, content) of the members that OpenCLIP sees; the fault that ends them goes into `log`."""
    try:
        stream = open_shard(url, silence=silence)
    except OSError as error:
        log.fault = (
            str(error) if NOT_REGULAR in str(error) else f"cannot be opened ({error.strerror or error})"
        )
        return
    try:
        with closing(cast("IO[bytes]", stream)):
            yield from _members(stream, log)
    except OSError as error:
        # The command's own end explains more than the tar that it broke off.
        log.fault = f"cannot be read ({error.strerror or error})"


def _members(stream: Stream, log: ShardLog) -> Iterator[tuple[str, bytes]]:
    try:
        tar = tarfile.open(  # noqa: SIM115 - the stream is closed by the caller
            fileobj=cast("IO[bytes]", stream), mode="r|*", tarinfo=_Header
        )
    except _BROKEN as error:
        empty = "empty" in str(error)
        log.fault = "is empty (0 bytes)" if empty else "is not a tar archive"
        return
    try:
        while (info := tar.next()) is not None:
            # tarfile keeps every header otherwise, and a shard may hold 30,000.
            tar.members = []  # type: ignore[attr-defined]
            if not info.isreg() or _META.match(info.name):
                continue
            content = tar.extractfile(info)
            assert content is not None
            yield info.name, content.read()
        log.fault = _ending(tar)
    except _BROKEN:
        log.fault = "is cut short: the archive ends in the middle of a member"


def _ending(tar: tarfile.TarFile) -> str | None:
    """None where the archive ended with its marker, else what was found instead."""
    end = getattr(tar, "end", None)
    if end == "EOFHeaderError":
        more = "goes on after its end-of-archive marker, where reading stops: it may be several tars in one"
        return more if _goes_on(tar) else None
    if end == "EmptyHeaderError":
        return "has no end-of-archive marker: it may be cut short"
    if end == "TruncatedHeaderError":
        return "is cut short: the archive ends in the middle of a header"
    return f"is damaged: the header at byte {tar.offset:,} is not valid, and nothing after it is read"


def _goes_on(tar: tarfile.TarFile) -> bool:
    """Whether more than zeros comes after the end of the archive, as where tars were joined with `cat`."""
    stream = cast("IO[bytes]", tar.fileobj)
    read = 0
    while read < _PADDING and (data := stream.read(1 << 16)):
        if data.strip(b"\0"):
            return True
        read += len(data)
    return False


def group(members: Iterable[tuple[str, bytes]], log: ShardLog) -> Iterator[RawSample]:
    """Group neighbors with the same key, as OpenCLIP does; a repeated suffix starts a new sample."""
    sample: RawSample | None = None
    for name, content in members:
        match = _KEY_AND_SUFFIX.match(name)
        if match is None:
            log.skipped.append(name)
            continue
        key, suffix = match.group(1), match.group(2).lower()
        if sample is None or key != sample.key or suffix in sample.members:
            if sample is not None and _valid(sample):
                yield sample
            sample = RawSample(key)
        sample.members[suffix] = content
    if sample is not None and _valid(sample):
        yield sample


def _valid(sample: RawSample) -> bool:
    # webdataset drops a sample that carries a true value under this name.
    return not sample.members.get("__bad__")


def read_samples(url: str, log: ShardLog, *, silence: float = 60.0) -> Generator[RawSample]:
    """Yield the samples of one shard, undecoded; what went wrong goes into `log`."""
    yield from group(read_members(url, log, silence=silence), log)
