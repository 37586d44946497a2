"""How reading a shard ends: what comes after the end of the archive is not passed over in silence."""

import gzip

import pytest

from openclip_linattn.data.reading import ShardLog, read_samples

MARK = bytes(1024)
JOINED = "goes on after its end-of-archive marker, where reading stops: it may be several tars in one"


@pytest.fixture
def two(tmp_path, make_tar, make_sample):
    """Two shards of one sample each, as bytes."""
    return [make_tar(tmp_path / key / "0.tar", make_sample(key)).read_bytes() for key in "ab"]


def read(path):
    log = ShardLog()
    return [sample.key for sample in read_samples(str(path), log)], log.fault


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_several_tars_in_one_are_a_fault(pack, two, tmp_path):
    path = tmp_path / "both.tar"
    path.write_bytes(pack(two[0] + two[1]))
    assert read(path) == (["a"], JOINED)


def test_several_tars_from_one_command_are_a_fault(two, tmp_path):
    assert read(f"pipe:cat {tmp_path}/a/0.tar {tmp_path}/b/0.tar") == (["a"], JOINED)


@pytest.mark.parametrize("padding", [0, 512, 10_240, 3 << 20])
def test_padding_is_none(padding, two, tmp_path):
    path = tmp_path / "padded.tar"
    path.write_bytes(
        two[0].rstrip(b"\0") + bytes(512 - len(two[0].rstrip(b"\0")) % 512) + MARK + bytes(padding)
    )
    assert read(path) == (["a"], None)
