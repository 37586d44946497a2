"""Objects on web servers: opened from any byte on, and known again by their ETag."""

from __future__ import annotations

import re
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from urllib.parse import urlsplit

import requests
import urllib3
from requests.structures import CaseInsensitiveDict

from openclip_linattn.data.remote.resuming import RefusedError, TransientError

_CHUNK = 1 << 16  # small, because a failing read loses what it had of its chunk
_CONNECT_TIMEOUT = 20.0  # seconds
_PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")
_DROPPED = "the connection dropped"

Headers = CaseInsensitiveDict[str]


class HttpObject:
    """One URL; `silence` is the longest wait for a byte, in s."""

    def __init__(self, url: str, silence: float) -> None:
        self.url = url
        self.silence = silence
        self._first: Headers | None = None
        self._length: int | None = None

    def connect(self, start: int) -> _HttpBody:
        """Ask for the bytes from `start` on; raises TransientError or RefusedError, also for a changed object."""
        response = self._request("GET", self._range(start))
        try:
            begins = self._begin(response, start)
            body = _HttpBody(response, None if self._length is None else self._length - begins, self.silence)
            body.skip(start - begins)
        except BaseException:
            response.close()
            raise
        return body

    def version(self) -> str | None:
        """The ETag, or the time of change with the size; None where the server does not tell."""
        with self._request("HEAD", {}) as response:
            tag, changed = response.headers.get("ETag"), response.headers.get("Last-Modified")
            return tag or (changed and f"{changed} {response.headers.get('Content-Length')}")

    def _range(self, start: int) -> dict[str, str]:
        if not start or self._first is None:
            return {}
        tag = self._first.get("ETag", "")
        # Only a strong tag says that the bytes are the same.
        condition = tag if tag and not tag.startswith("W/") else self._first.get("Last-Modified")
        return {"Range": f"bytes={start}-", **({"If-Range": condition} if condition else {})}

    def _request(self, method: str, headers: dict[str, str]) -> requests.Response:
        try:
            response = requests.request(
                method,
                self.url,
                headers={"Accept-Encoding": "identity", **headers},
                timeout=(min(_CONNECT_TIMEOUT, self.silence), self.silence),
                stream=True,
                allow_redirects=True,
            )
        except requests.RequestException as error:
            raise self._failure(error) from error
        if response.status_code in (200, 206):
            return response
        response.close()
        reason = _status(response)
        if response.status_code in _PASSING:
            raise TransientError(reason, _retry_after(response.headers))
        raise RefusedError(reason)

    def _failure(self, error: requests.RequestException) -> Exception:
        if isinstance(error, requests.exceptions.SSLError):
            return RefusedError(f"no secure connection ({_cause(error)})")
        if isinstance(error, requests.Timeout):
            return TransientError(f"no answer for {self.silence:g} s")
        if isinstance(error, (requests.ConnectionError, requests.exceptions.ChunkedEncodingError)):
            return TransientError(
                f"no connection to {urlsplit(self.url).netloc.rpartition('@')[2]} ({_cause(error)})"
            )
        return RefusedError(str(error))

    def _begin(self, response: requests.Response, start: int) -> int:
        """The byte that the answer begins with; raises RefusedError where the object is not the one of before."""
        begins, length = 0, _number(response.headers.get("Content-Length"))
        if response.status_code == HTTPStatus.PARTIAL_CONTENT:
            match = _CONTENT_RANGE.match(response.headers.get("Content-Range", ""))
            if match is None or int(match.group(1)) != start:
                raise RefusedError("the server sent another range than was asked for")
            begins, length = start, _number(match.group(2))
        if self._first is None:
            self._first, self._length = response.headers, length
        elif not self._is_same(response.headers, length):
            raise RefusedError("it changed while it was read,")
        return begins

    def _is_same(self, headers: Headers, length: int | None) -> bool:
        assert self._first is not None
        for name in ("ETag", "Last-Modified"):
            before, now = self._first.get(name), headers.get(name)
            if before and now and before != now:
                return False
        return length is None or self._length is None or length == self._length


class _HttpBody:
    """The content of one answer, of which `owed` bytes are to come (None: the server did not say)."""

    def __init__(self, response: requests.Response, owed: int | None, silence: float) -> None:
        self._response = response
        self._owed = owed
        self._silence = silence

    def read(self, size: int, /) -> bytes:
        """At most `size` bytes; raises TransientError where the answer ends before its length."""
        try:
            data: bytes = self._response.raw.read(min(size, _CHUNK), decode_content=False)
        except urllib3.exceptions.ReadTimeoutError as error:
            raise TransientError(f"nothing came for {self._silence:g} s") from error
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise TransientError(_DROPPED) from error
        if self._owed is not None:
            if not data and self._owed:  # urllib3 looks at this by itself from version 2 on only
                raise TransientError(_DROPPED)
            self._owed -= len(data)
        return data

    def skip(self, size: int) -> None:
        """Read over `size` bytes, which a server sends again that knows no ranges."""
        while size:
            data = self.read(size)
            if not data:
                raise TransientError(_DROPPED)
            size -= len(data)

    def close(self) -> None:
        """End the connection."""
        self._response.close()


def _status(response: requests.Response) -> str:
    try:
        phrase = HTTPStatus(response.status_code).phrase
    except ValueError:
        phrase = response.reason or ""
    return f"{response.status_code} {phrase}".strip()


def _retry_after(headers: Headers) -> float | None:
    value = headers.get("Retry-After", "")
    if value.isdecimal():
        return float(value)
    try:
        moment = parsedate_to_datetime(value)
    except ValueError:
        return None
    if moment.tzinfo is None:  # "-0000": UTC of an unknown place
        moment = moment.replace(tzinfo=timezone.utc)
    return max(0.0, (moment - datetime.now(timezone.utc)).total_seconds())


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() else None


def _cause(error: BaseException) -> str:
    """The innermost reason that a chain of errors gives."""
    reason: BaseException | None = error
    words = str(error)
    while reason is not None:
        if isinstance(reason, OSError) and reason.strerror:
            words = reason.strerror
        reason = reason.__cause__ or reason.__context__
    return words
