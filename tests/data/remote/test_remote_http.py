"""Shards on web servers: read whole however the server fails, and never a mixture of two objects."""

import os
import random
from email.utils import formatdate

import pytest

from openclip_linattn.data.identity import identity
from openclip_linattn.data.reading import ShardLog, read_samples
from openclip_linattn.data.remote import http, open_remote, resuming
from openclip_linattn.data.remote_sizes import remote_counts
from openclip_linattn.errors import UserError

CONTENT = random.Random(0).randbytes(300_000)


def read(url, **options):
    with open_remote(url, **options) as stream:
        return stream.read()


def failure(url, **options):
    with pytest.raises(OSError, match=r"\w") as caught:
        read(url, **options)
    return str(caught.value)


def test_an_object_is_read_whole(web):
    assert read(web.add("a.tar", CONTENT)) == CONTENT
    assert web.requests == [("GET", "a.tar", None)]


def test_after_a_drop_only_the_missing_bytes_are_asked_for(web, rules):
    url = web.add("a.tar", CONTENT, *[rules.drop(60_000)] * 4)
    assert read(url) == CONTENT
    assert web.ranges("a.tar") == [None, *[f"bytes={60_000 * n}-" for n in range(1, 5)]]


def test_a_server_without_ranges_sends_again_and_nothing_comes_twice(web, rules):
    url = web.add("a.tar", CONTENT, rules.drop(100_000), rules.drop(250_000), knows_ranges=False)
    assert read(url) == CONTENT


def test_a_server_without_ranges_that_always_drops_is_given_up(web, rules):
    url = web.add("a.tar", CONTENT, *[rules.drop(70_000)] * 99, knows_ranges=False)
    assert failure(url) == f"the connection dropped at byte 70,000 after {resuming.TRIES} tries"
    assert len(web.requests) == resuming.TRIES


def test_failures_are_forgotten_after_progress(web, rules, monkeypatch):
    monkeypatch.setattr(resuming, "PROGRESS", 50_000)
    url = web.add("a.tar", CONTENT, *[rules.drop(20_000)] * 14)
    assert read(url) == CONTENT
    assert len(web.requests) == 15 > resuming.TRIES


def test_many_drops_with_little_progress_are_given_up(web, rules):
    url = web.add("a.tar", CONTENT, *[rules.drop(10)] * 99)
    assert "the connection dropped at byte 60 after" in failure(url)


def test_a_busy_server_is_asked_again(web, rules):
    busy = [rules.status(503, Retry_After="0"), rules.status(429, Retry_After="0"), rules.status(500)]
    assert read(web.add("a.tar", CONTENT, *busy)) == CONTENT


def test_a_server_that_stays_busy_is_given_up_on_opening(web, rules):
    url = web.add("a.tar", CONTENT, *[rules.status(503)] * 99)
    assert failure(url) == f"503 Service Unavailable after {resuming.TRIES} tries"


@pytest.mark.parametrize(
    ("retry_after", "waited"),
    [("7", 7), ("86400", 60), (formatdate(usegmt=True), 0), (formatdate(), 0), ("soon", None)],
)
def test_the_server_says_how_long_to_wait(retry_after, waited, web, rules, monkeypatch):
    waits = []
    monkeypatch.setattr(resuming.time, "sleep", waits.append)
    monkeypatch.setattr(
        resuming, "FIRST_WAIT", 1000.0
    )  # more than the longest wait, unless the server is heard
    read(web.add("a.tar", CONTENT, rules.status(503, Retry_After=retry_after)))
    assert waits == [60 if waited is None else waited]


def test_waits_grow(web, rules, monkeypatch):
    waits = []
    monkeypatch.setattr(resuming.time, "sleep", waits.append)
    monkeypatch.setattr(resuming, "FIRST_WAIT", 1.0)
    read(web.add("a.tar", CONTENT, *[rules.status(502)] * 5))
    assert all(2**n / 2 <= wait <= 2**n for n, wait in enumerate(waits))
    assert len(waits) == 5


@pytest.mark.parametrize(
    ("code", "words"), [(403, "403 Forbidden"), (410, "410 Gone"), (401, "401 Unauthorized")]
)
def test_a_refusal_is_final(code, words, web, rules):
    url = web.add("a.tar", CONTENT, rules.status(code))
    assert failure(url) == words
    assert len(web.requests) == 1


def test_a_missing_object(web):
    assert failure(f"{web.url}/absent.tar") == "404 Not Found"
    assert len(web.requests) == 1


def test_a_refusal_after_a_drop_names_the_byte(web, rules):
    url = web.add("a.tar", CONTENT, rules.drop(4096), rules.status(403))
    assert failure(url) == "403 Forbidden at byte 4,096"


def test_a_silent_connection_counts_as_dropped(web, rules):
    url = web.add("a.tar", CONTENT, rules.stall(1000), rules.stall(0))
    assert read(url, silence=0.2) == CONTENT


def test_a_server_that_stays_silent_is_given_up(web, rules, monkeypatch):
    monkeypatch.setattr(resuming, "TRIES", 2)
    url = web.add("a.tar", CONTENT, rules.stall(70_000), rules.stall(0))
    assert failure(url, silence=0.1) == "nothing came for 0.1 s at byte 65,536 after 2 tries"


def test_nobody_listens(web):
    with_port = "http://127.0.0.1:1/a.tar"
    assert (
        failure(with_port)
        == f"no connection to 127.0.0.1:1 (Connection refused) after {resuming.TRIES} tries"
    )


def test_redirects_are_followed_on_every_try(web, rules):
    there = web.add("there.tar", CONTENT, rules.drop(1000))
    redirect = rules.status(302, Location=there)
    assert read(web.add("here.tar", b"", redirect, redirect)) == CONTENT
    assert web.ranges("there.tar") == [None, "bytes=1000-"]


@pytest.mark.parametrize("knows_ranges", [True, False])
@pytest.mark.parametrize(
    ("etag", "then", "content"),
    [
        ('"1"', '"2"', CONTENT[::-1]),
        ('W/"1"', 'W/"2"', CONTENT[::-1]),  # no condition is sent, and the tag of the answer tells
        (None, None, CONTENT + b"longer"),
        (None, None, CONTENT[:-1]),
    ],
)
def test_an_object_that_changed_meanwhile_is_an_error(etag, then, content, knows_ranges, web, rules):
    options = {"etag": etag, "knows_ranges": knows_ranges}
    url = web.add("a.tar", CONTENT, rules.drop(5000), rules.change(content, then), **options)
    assert failure(url) == "it changed while it was read, at byte 5,000"


@pytest.mark.parametrize(("etag", "condition"), [('"1"', '"1"'), ('W/"1"', None), (None, None)])
def test_the_rest_is_asked_for_on_condition_of_a_strong_tag(etag, condition, web, rules):
    assert read(web.add("a.tar", CONTENT, rules.drop(5000), etag=etag)) == CONTENT
    assert web.conditions == [None, condition]


def test_a_short_answer_is_noticed_without_the_help_of_urllib3(web, rules, monkeypatch):
    request = http.requests.request

    def lenient(*arguments, **options):
        response = request(*arguments, **options)
        response.raw.enforce_content_length = False  # the default of its version 1
        return response

    monkeypatch.setattr(http.requests, "request", lenient)
    assert read(web.add("a.tar", CONTENT, rules.drop(5000), rules.drop(70_000))) == CONTENT


def test_content_without_length_is_read_to_its_mark(web, rules):
    url = web.add("a.tar", CONTENT, rules.chunks(100_000, 200_000, ended=True))
    assert read(url) == CONTENT


def test_content_without_length_is_continued_where_its_mark_is_missing(web, rules):
    url = web.add("a.tar", CONTENT, rules.chunks(65_536, ended=False))
    assert read(url) == CONTENT
    assert web.ranges("a.tar") == [None, "bytes=65536-"]


def test_an_empty_object(web):
    assert read(web.add("a.tar", b"")) == b""


def test_samples_are_read_across_drops(web, rules, shards):
    url = web.add("0.tar", shards[0], *[rules.drop(len(shards[0]) // 4)] * 3)
    log = ShardLog()
    samples = list(read_samples(url, log))
    assert [sample.key for sample in samples] == [f"{n:09d}" for n in range(10)]
    assert log.fault is None


@pytest.mark.parametrize(
    ("limit", "fault"),
    [
        (None, "cannot be opened (404 Not Found)"),
        (20_000, "cannot be read (the connection dropped at byte 20,000 after 6 tries)"),
    ],
)
def test_the_fault_of_a_shard_says_what_happened(limit, fault, web, rules, shards):
    if limit is not None:
        web.add("0.tar", shards[0], rules.drop(limit), *[rules.drop(0)] * 9)
    log = ShardLog()
    list(read_samples(f"{web.url}/0.tar", log))
    assert log.fault == fault


def test_an_identity_is_the_etag_and_changes_with_the_object(web):
    url = web.add("a.tar", CONTENT)
    assert identity(url) == '"1"'
    web.add("a.tar", CONTENT, etag='"2"')
    assert identity(url) == '"2"'
    assert {method for method, _, _ in web.requests} == {"HEAD"}


def test_an_object_without_a_tag_or_that_is_not_there_has_no_identity(web):
    assert identity(web.add("a.tar", CONTENT, etag=None)) is None
    assert identity(f"{web.url}/absent.tar") is None


def test_local_identity_is_size_and_time(tmp_path):
    path = tmp_path / "a.tar"
    path.write_bytes(b"abc")
    os.utime(path, ns=(0, 7_000_000_001))
    assert identity(str(path)) == identity(f"file:{path}") == "3-7000000001"
    assert identity(str(tmp_path / "absent.tar")) is None
    assert identity("pipe:cat a.tar") is None


def test_counts_of_remote_shards_come_from_the_table_beside_them(web):
    urls = [f"{web.url}/set/{n:05d}.tar" for n in range(3)]
    web.add("set/sizes.json", b'{"00000.tar": 10, "00002.tar": "7"}')
    assert remote_counts([*urls, f"{web.url}/0.tar", "local/00000.tar"]) == {urls[0]: 10, urls[2]: 7}
    assert len(web.ranges("set/sizes.json")) == 1


@pytest.mark.parametrize("content", [b"[]", b"{", b'{"0.tar": null}', b'{"0.tar": -1}', b'{"0.tar": 2.5}'])
def test_a_table_that_is_none_is_named(content, web):
    url = web.add("set/sizes.json", content)
    with pytest.raises(UserError, match=f"{url} must hold"):
        remote_counts([f"{web.url}/set/0.tar"])
