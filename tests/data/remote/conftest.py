"""A web server on this machine that fails as it is told, and shards for it."""

import logging
import os
import select
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import boto3
import fsspec
import pytest
import requests

from openclip_linattn.data.remote import resuming


@dataclass
class Page:
    """What a path holds, and what the server does with the next requests for it, one rule each."""

    content: bytes
    etag: str | None = '"1"'
    knows_ranges: bool = True
    rules: list[Callable[["Handler"], None]] = field(default_factory=list)


@dataclass
class Web:
    """The server: its pages by path, the requests that came, as (method, path, Range), and their If-Range."""

    url: str = ""
    pages: dict[str, Page] = field(default_factory=dict)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    conditions: list[str | None] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)

    def add(self, path: str, content: bytes, *rules: Callable[["Handler"], None], **options) -> str:
        """Serve `content` under `path`; returns its URL."""
        self.pages[path] = Page(content, rules=list(rules), **options)
        return f"{self.url}/{path}"

    def ranges(self, path: str) -> list[str | None]:
        """The Range headers of the requests for `path`, in order."""
        return [asked for _, name, asked in self.requests if name == path]


class Handler(BaseHTTPRequestHandler):
    """Serves the pages of `web`, which each server sets on a class of its own."""

    web: Web

    def do_GET(self) -> None:
        """Answer by the next rule of the page, or with its content."""
        name = self.path.lstrip("/")
        self.web.requests.append((self.command, name, self.headers.get("Range")))
        self.web.conditions.append(self.headers.get("If-Range"))
        page = self.web.pages.get(name)
        if page is None:
            self.send_error(404)
        elif page.rules:
            page.rules.pop(0)(self)
        else:
            self.serve()

    def do_HEAD(self) -> None:
        """Answer as for GET, without the content."""
        self.do_GET()

    @property
    def page(self) -> Page:
        """The page that is asked for."""
        return self.web.pages[self.path.lstrip("/")]

    def serve(self, limit: int | None = None) -> None:
        """Send the range that is asked for, or only `limit` bytes of it though more are announced."""
        content, start, end = self.page.content, 0, len(self.page.content)
        asked, condition = self.headers.get("Range"), self.headers.get("If-Range")
        if asked and self.page.knows_ranges and condition in (None, self.page.etag):
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, end = int(first), int(last) + 1 if last else end
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(content)}")
        else:
            self.send_response(200)
        if self.page.etag:
            self.send_header("ETag", self.page.etag)
        self.send_header("Content-Length", str(end - start))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[start : end if limit is None else min(end, start + limit)])

    def log_message(self, *_arguments) -> None:
        """Say nothing."""


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    """A running server without pages; readers wait milliseconds between their tries."""
    monkeypatch.setattr(resuming, "FIRST_WAIT", 0.001)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    web = Web()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"web": web}))
    web.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield web
    web.released.set()
    server.shutdown()
    server.server_close()
    thread.join()


class Rules:
    """Rules for pages: what the server does with one request."""

    @staticmethod
    def drop(after: int) -> Callable[[Handler], None]:
        """Send `after` bytes of what was announced, and hang up."""
        return lambda handler: handler.serve(after)

    @staticmethod
    def status(code: int, **headers: str) -> Callable[[Handler], None]:
        """Answer with a status, and headers with _ for -."""

        def rule(handler: Handler) -> None:
            handler.send_response(code)
            for name, value in headers.items():
                handler.send_header(name.replace("_", "-"), value)
            handler.send_header("Content-Length", "0")
            handler.end_headers()

        return rule

    @staticmethod
    def stall(after: int) -> Callable[[Handler], None]:
        """Send `after` bytes, and then nothing until the test ends."""

        def rule(handler: Handler) -> None:
            handler.serve(after)
            handler.wfile.flush()
            handler.web.released.wait(60)

        return rule

    @staticmethod
    def change(content: bytes, etag: str | None) -> Callable[[Handler], None]:
        """Answer with another content from now on."""

        def rule(handler: Handler) -> None:
            handler.page.content, handler.page.etag = content, etag
            handler.serve()

        return rule

    @staticmethod
    def chunks(*sizes: int, ended: bool) -> Callable[[Handler], None]:
        """Send the content in chunks of `sizes` without its length, with or without the mark of its end."""

        def rule(handler: Handler) -> None:
            handler.wfile.write(b'HTTP/1.1 200 OK\r\nETag: "1"\r\nTransfer-Encoding: chunked\r\n\r\n')
            start = 0
            for size in sizes:
                part = handler.page.content[start : start + size]
                handler.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
                start += size
            if ended:
                handler.wfile.write(b"0\r\n\r\n")

        return rule


@pytest.fixture
def rules() -> type[Rules]:
    """What the server can be told to do."""
    return Rules


@pytest.fixture
def shards(good_set: Path) -> list[bytes]:
    """Four shards of ten samples, as bytes."""
    return [path.read_bytes() for path in sorted(good_set.glob("*.tar"))]


@dataclass
class Store:
    """An S3 server with the bucket `bucket`, reached through a proxy that hangs up as `limits` say.

    Each connection that is made takes the next limit: the bytes of the answers that it still gets through.
    """

    put: Callable[[str, bytes], object]
    limits: list[int] = field(default_factory=list)
    connections: int = 0


@pytest.fixture(scope="session")
def s3_server() -> Iterator[tuple[str, int]]:
    """Host and port of moto's S3 server."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    yield server.get_host_and_port()
    server.stop()


@pytest.fixture
def store(s3_server: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A bucket on that server, and an environment from which clients find it by themselves."""
    monkeypatch.setattr(resuming, "FIRST_WAIT", 0.001)
    for name in [name for name in os.environ if name.startswith(("AWS_", "FSSPEC_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    direct = f"http://{s3_server[0]}:{s3_server[1]}"
    requests.post(f"{direct}/moto-api/reset", timeout=10).raise_for_status()
    client = boto3.client("s3", endpoint_url=direct)
    client.create_bucket(Bucket="bucket")
    store = Store(lambda key, data: client.put_object(Bucket="bucket", Key=key, Body=data, ACL="public-read"))

    class Proxy(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            store.connections += 1
            left = store.limits.pop(0) if store.limits else None
            with socket.create_connection(s3_server) as server:
                ends = {self.request: server, server: self.request}
                while True:
                    for source in select.select(list(ends), [], [])[0]:
                        data = source.recv(1 << 16)
                        if source is server and left is not None:
                            data = data[:left]
                            left -= len(data)
                        if not data:
                            return
                        ends[source].sendall(data)

    proxy = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Proxy)
    proxy.daemon_threads = True
    thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.server_address[1]}")
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    yield store
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    client.close()
    proxy.shutdown()
    proxy.server_close()
    thread.join()
