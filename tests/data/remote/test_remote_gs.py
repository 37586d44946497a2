"""Shards in Google Cloud Storage, through the real client against a server on this machine."""

import json
import random

import pytest

from openclip_linattn.data.identity import identity
from openclip_linattn.data.remote import open_remote, stores

pytest.importorskip("gcsfs")
CONTENT = random.Random(0).randbytes(300_000)
OBJECT = "storage/v1/b/bucket/o/0.tar"


@pytest.fixture
def bucket(web, monkeypatch):
    """Puts an object of a generation there, as the only one; other generations are not found."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", web.url)
    monkeypatch.setenv("FSSPEC_GS_TOKEN", "anon")
    monkeypatch.setattr(stores, "BLOCK", 100_000)

    def put(content, generation, *faults):
        web.pages.clear()
        facts = {"bucket": "bucket", "name": "0.tar", "size": str(len(content)), "generation": generation}
        for query in ("", f"?generation={generation}"):
            web.add(OBJECT + query, json.dumps(facts).encode())
        web.add(f"download/{OBJECT}?alt=media&generation={generation}", content, *faults)

    return put


def test_an_object_is_read_whole_across_a_drop(bucket, rules):
    bucket(CONTENT, "1", rules.drop(1000))
    with open_remote("gs://bucket/0.tar") as stream:
        assert stream.read() == CONTENT


def test_an_object_that_changed_meanwhile_is_an_error(bucket):
    bucket(CONTENT, "1")
    with open_remote("gs://bucket/0.tar") as stream:
        assert stream.read(1000) == CONTENT[:1000]
        bucket(CONTENT[::-1], "2")
        with pytest.raises(OSError, match="changed"):
            stream.read()


def test_what_is_not_there_is_said_at_once(bucket):
    bucket(CONTENT, "1")
    with pytest.raises(OSError, match=r"^404 Not Found$"):
        open_remote("gs://bucket/absent.tar")


def test_an_identity_is_the_generation(bucket):
    bucket(CONTENT, "17")
    assert identity("gs://bucket/0.tar") == "17"
    assert identity("gs://bucket/absent.tar") is None
