"""Shards in S3, through the real client against a server on this machine."""

import multiprocessing
import random
import subprocess
import sys

import pytest

from openclip_linattn.data.identity import identity
from openclip_linattn.data.reading import ShardLog, read_samples
from openclip_linattn.data.remote import open_remote, resuming, stores
from openclip_linattn.data.sources import expand

s3fs = pytest.importorskip("s3fs")
CONTENT = random.Random(0).randbytes(300_000)


def read(url):
    with open_remote(url) as stream:
        return stream.read()


def failure(url):
    with pytest.raises(OSError, match=r"\w") as caught:
        read(url)
    return str(caught.value)


def test_the_shards_of_a_pattern_are_read_whole(store, shards):
    for number, shard in enumerate(shards):
        store.put(f"set/{number:05d}.tar", shard)
    keys = []
    for url in expand("s3://bucket/set/{00000..00003}.tar"):
        log = ShardLog()
        keys += [sample.key for sample in read_samples(url, log)]
        assert log.fault is None
    assert keys == [f"{shard:05d}{n:04d}" for shard in range(4) for n in range(10)]


def test_what_is_not_there_is_said_at_once(store):
    assert failure("s3://bucket/absent.tar") == "404 Not Found"
    assert failure("s3://no-such-bucket/0.tar") == "404 Not Found"
    store.put("folder/0.tar", CONTENT)
    assert failure("s3://bucket/folder") == "is a folder"


def test_an_object_is_read_whole_across_drops(store, monkeypatch):
    monkeypatch.setattr(stores, "BLOCK", 100_000)
    store.put("0.tar", CONTENT)
    # Each request has a connection: one for the facts of the object, at most 1,000 bytes, then one for each block.
    store.limits = [1000, 50_000, 1000, 200_000, 50_000, 1000, 90_000]
    assert read("s3://bucket/0.tar") == CONTENT
    assert not store.limits


def test_a_store_that_always_drops_is_given_up(store):
    store.put("0.tar", CONTENT)
    store.limits = [150_000] * 99
    assert failure("s3://bucket/0.tar").endswith(f"after {resuming.TRIES} tries")
    assert resuming.TRIES <= store.connections <= 2 * resuming.TRIES


def test_a_block_that_comes_short_is_asked_for_again(store, monkeypatch):
    monkeypatch.setattr(stores, "BLOCK", 100_000)
    store.put("0.tar", CONTENT)
    fetch = s3fs.core.S3File._fetch_range
    short = [65_536, 0]
    monkeypatch.setattr(
        s3fs.core.S3File,
        "_fetch_range",
        lambda self, start, end: fetch(self, start, end)[: short.pop(0) if short else None],
    )
    assert read("s3://bucket/0.tar") == CONTENT
    assert not short


def test_an_object_that_changed_meanwhile_is_an_error(store, monkeypatch):
    monkeypatch.setattr(stores, "BLOCK", 100_000)
    store.put("0.tar", CONTENT)
    with open_remote("s3://bucket/0.tar") as stream:
        assert stream.read(1000) == CONTENT[:1000]
        store.put("0.tar", CONTENT[::-1])
        with pytest.raises(OSError, match="changed"):
            stream.read()


def test_an_object_that_changed_before_a_new_connection_is_an_error(store, monkeypatch):
    monkeypatch.setattr(stores, "BLOCK", 100_000)
    store.put("0.tar", CONTENT)
    store.limits = [1000, 200_000, 50_000]
    monkeypatch.setattr(resuming.time, "sleep", lambda _: store.put("0.tar", CONTENT[::-1]))
    assert failure("s3://bucket/0.tar") == "it changed while it was read, at byte 106,496"


def test_an_identity_changes_with_the_object(store):
    store.put("0.tar", CONTENT)
    before = identity("s3://bucket/0.tar")
    assert before is not None
    assert identity("s3://bucket/0.tar") == before
    store.put("0.tar", CONTENT[::-1])
    assert identity("s3://bucket/0.tar") not in (None, before)
    assert identity("s3://bucket/absent.tar") is None


def test_missing_credentials_are_named_with_the_way_to_a_public_bucket(store, monkeypatch, tmp_path):
    store.put("0.tar", CONTENT)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert "for a public bucket set FSSPEC_S3_ANON=1" in failure("s3://bucket/0.tar")


def test_a_public_bucket_is_read_without_credentials(store, monkeypatch):
    store.put("0.tar", CONTENT)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("FSSPEC_S3_ANON", "1")
    command = [sys.executable, "-m", "openclip_linattn.data.cat", "s3://bucket/0.tar"]
    assert subprocess.run(command, check=True, capture_output=True, timeout=60).stdout == CONTENT


@pytest.mark.parametrize(("scheme", "module"), [("s3", "s3fs"), ("gs", "gcsfs.core")])
def test_a_client_that_is_not_installed_is_named_with_the_command(scheme, module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    assert failure(f"{scheme}://bucket/0.tar").endswith("pip install 'openclip-linattn[remote]'")


def _read_in_child(url, queue):
    queue.put(read(url))


# The server's threads run in this process, and Python 3.12 warns of forks beside threads.
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_reads_after_its_parent_has(store):
    store.put("0.tar", CONTENT)
    assert read("s3://bucket/0.tar") == CONTENT  # starts the client's own thread, which a fork leaves behind
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_read_in_child, args=("s3://bucket/0.tar", queue))
    child.start()
    assert queue.get(timeout=60) == CONTENT
    child.join()
    queue.close()
    queue.join_thread()
