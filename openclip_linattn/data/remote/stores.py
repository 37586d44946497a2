"""Objects in S3 and Google Cloud Storage, read through s3fs and gcsfs in blocks of some megabytes."""

from __future__ import annotations

import errno
import importlib
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from openclip_linattn.data.remote.resuming import RefusedError, TransientError

BLOCK = 8 << 20  # bytes of one request
_CONNECT_TIMEOUT = 20.0  # seconds
_CLIENTS = {"s3": "s3fs", "gs": "gcsfs"}
_CHANGED = "it changed while it was read,"
_REFUSALS = (errno.EINVAL, errno.EPERM, errno.EACCES, errno.ENOSYS, errno.ENAMETOOLONG)
_ANONYMOUS = {"s3": "FSSPEC_S3_ANON=1", "gs": "FSSPEC_GS_TOKEN=anon"}


class StoreObject:
    """One s3:// or gs:// URL; `silence` is the longest wait for a byte, in s."""

    def __init__(self, url: str, silence: float) -> None:
        self.url = url
        self._scheme = urlsplit(url).scheme
        self._silence = silence
        self._version: str | None = None

    def connect(self, start: int) -> _StoreBody:
        """Open the object at byte `start`; raises TransientError or RefusedError, also for a changed object."""
        try:
            filesystem = self._filesystem()
            file = filesystem.open(self._pinned(filesystem), "rb", block_size=BLOCK, cache_type="readahead")
            self._check(file.details, start)
        except Exception as error:
            raise self._failure(error) from error
        file.seek(start)
        return _StoreBody(file, self._failure)

    def version(self) -> str:
        """What changes whenever the object does; raises TransientError or RefusedError."""
        try:
            return _version(self._filesystem().info(self.url))
        except Exception as error:
            raise self._failure(error) from error

    def _check(self, details: dict[str, Any], start: int) -> None:
        if details.get("type") == "directory":
            raise RefusedError("is a folder")
        version = _version(details)
        if start and version != self._version:
            raise RefusedError(_CHANGED)
        self._version = version

    def _pinned(self, filesystem: Any) -> str:
        # The client for S3 pins the ETag by itself, the one for Google Cloud Storage only a generation it is told.
        generation = filesystem.info(self.url).get("generation") if self._scheme == "gs" else None
        return f"{self.url}#{generation}" if generation else self.url

    def _filesystem(self) -> Any:
        # These clients are kept for each process and set of options, and made anew after a fork. The plain one for
        # Google is free of gRPC, which does not survive forks.
        if self._scheme == "gs":
            return importlib.import_module("gcsfs.core").GCSFileSystem(
                version_aware=True, use_listings_cache=False, requests_timeout=self._silence
            )
        timeouts = {"connect_timeout": min(_CONNECT_TIMEOUT, self._silence), "read_timeout": self._silence}
        filesystem = importlib.import_module("s3fs").S3FileSystem(
            use_listings_cache=False, config_kwargs={**timeouts, "retries": {"total_max_attempts": 1}}
        )
        filesystem.retries = 1  # the stream itself tries again, and knows when to stop
        return filesystem

    def _failure(self, error: Exception) -> Exception:
        if isinstance(error, (TransientError, RefusedError)):
            return error
        refusal = self._refusal(error)
        return TransientError(_words(error)) if refusal is None else RefusedError(refusal)

    def _refusal(self, error: Exception) -> str | None:
        """What the store, or its client, says for good; None where another try may help."""
        if isinstance(error, ImportError):
            return f"{self._scheme}: shards need {_CLIENTS[self._scheme]}: pip install 'openclip-linattn[remote]'"
        if isinstance(error, FileNotFoundError):
            return "404 Not Found"
        words = _words(error)
        if "credentials" in words.lower():
            return f"{words}; for a public bucket set {_ANONYMOUS[self._scheme]}"
        return words if _is_final(error) else None


class _StoreBody:
    """An open object; `failure` says of an error whether another try may help."""

    def __init__(self, file: Any, failure: Callable[[Exception], Exception]) -> None:
        self._file = file
        self._failure = failure

    def read(self, size: int, /) -> bytes:
        """At most `size` bytes, none at the end."""
        try:
            data: bytes = self._file.read(size)
        except FileNotFoundError as error:
            raise RefusedError(_CHANGED) from error
        except Exception as error:
            raise self._failure(error) from error
        if not data and self._file.tell() < self._file.size:
            # A block came short, which the client's cache takes for the end.
            raise TransientError("the connection dropped")
        return data

    def close(self) -> None:
        """Forget the blocks that were read ahead."""
        self._file.close()


def _words(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _is_final(error: Exception) -> bool:
    if isinstance(error, (ValueError, TypeError, PermissionError)):
        return True
    if type(error).__module__.startswith("botocore."):
        exceptions = importlib.import_module("botocore.exceptions")
        return not isinstance(error, exceptions.HTTPClientError)  # a wrong profile, say, or name of a bucket
    return getattr(error, "errno", None) in _REFUSALS or getattr(error, "code", None) in (400, 401, 403)


def _version(details: dict[str, Any]) -> str:
    tag = details.get("generation") or details.get("ETag") or details.get("etag")
    return str(tag or f"{details.get('LastModified') or details.get('updated')} {details.get('size')}")
