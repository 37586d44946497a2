"""OpenCLIP's own reader on remote shards, and the command that an unmodified OpenCLIP reads them through."""

import json
import subprocess
import sys

import pytest

from openclip_linattn.data import cat
from openclip_linattn.data.remote import readers, register_readers

gopen = pytest.importorskip("webdataset.gopen")

# What the training process does, with its data-loader workers, and the captions that it gets.
EPOCH = """
import argparse, json, sys
from open_clip_train.data import get_wds_dataset
from openclip_linattn.data.remote import register_readers, resuming

resuming.FIRST_WAIT = 0.001
register_readers()
args = argparse.Namespace(
    train_data=sys.argv[1], train_num_samples=40, dataset_resampled=False, train_data_upsampling_factors=None,
    seed=0, batch_size=1, workers=2, world_size=1,
)
data = get_wds_dataset(args, lambda image: image.size[0], True, tokenizer=lambda text: [text])
data.set_epoch(0)
print(json.dumps([caption for _, captions in data.dataloader for caption in captions]))
"""
CAPTIONS = [f"photo {shard:05d}{n:04d}" for shard in range(4) for n in range(10)]


def run_epoch(source):
    return subprocess.run(
        [sys.executable, "-c", EPOCH, source], capture_output=True, check=False, text=True, timeout=170
    )


def epoch(source):
    done = run_epoch(source)
    assert done.returncode == 0, done.stderr
    assert "Handling webdataset error" not in done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_every_sample_arrives_once_from_a_web_server_that_drops(web, rules, shards):
    for number, shard in enumerate(shards):
        faults = [rules.drop(9000), rules.status(503, Retry_After="0"), rules.drop(5000)]
        web.add(f"{number:05d}.tar", shard, *faults[number % 2 :], knows_ranges=number != 3)
    assert sorted(epoch(f"{web.url}/{{00000..00003}}.tar")) == CAPTIONS
    assert not any(page.rules for page in web.pages.values())


@pytest.mark.slow
def test_every_sample_arrives_once_from_a_store_that_drops(store, shards):
    for number, shard in enumerate(shards):
        store.put(f"{number:05d}.tar", shard)
    store.limits = [5000, 20_000, 10_000, 0]
    assert sorted(epoch("s3://bucket/{00000..00003}.tar")) == CAPTIONS
    assert not store.limits


@pytest.fixture
def schemes(monkeypatch):
    """webdataset's table of readers as it comes, whatever tests before have made of it, and restored afterwards."""
    table = dict(gopen.gopen_schemes)
    table |= {
        "pipe": gopen.gopen_pipe,
        "http": gopen.gopen_curl,
        "https": gopen.gopen_curl,
        "gs": gopen.gopen_gsutil,
    }
    table.pop("s3", None)
    monkeypatch.setattr(gopen, "gopen_schemes", table)
    return table


def test_readers_stand_in_webdatasets_table(web, schemes):
    before = dict(schemes)
    register_readers()
    once = dict(schemes)
    register_readers()
    assert schemes == once
    assert {name for name in schemes if schemes[name] is not before.get(name)} >= {
        "s3",
        "http",
        "https",
        "pipe",
    }
    with gopen.gopen(web.add("a.tar", b"abc")) as stream:
        assert stream.read() == b"abc"
    with pytest.raises(ValueError, match="not written"):
        gopen.gopen(f"{web.url}/a.tar", "wb")


def test_webdatasets_readers_stay_where_a_client_is_missing_or_aistore_is_told(schemes, monkeypatch):
    before = dict(schemes)
    monkeypatch.setattr(readers, "find_spec", lambda name: None if name == "gcsfs" else name)
    monkeypatch.setenv("USE_AIS_FOR", "aws:s3")
    register_readers()
    assert schemes["gs"] is before["gs"]
    assert schemes.get("s3") is before.get("s3")
    assert schemes["http"] is not before["http"]


@pytest.fixture
def command(schemes, tmp_path):
    """Opens the output of a command as webdataset does."""
    register_readers()
    return lambda text: gopen.gopen(f"pipe:{text}")


def test_a_command_is_read_to_its_end(command, good_set, shards):
    with command(f"cat {good_set}/00000.tar") as stream:
        assert stream.read() == shards[0]
        assert stream.read() == b""


def test_a_command_that_fails_after_its_output_is_an_error(command):
    with command("echo abc; echo why >&2; exit 3") as stream, pytest.raises(OSError, match="status 3: why"):
        stream.read()


def test_a_command_that_hangs_is_given_up(command, monkeypatch):
    monkeypatch.setattr(readers, "SILENCE", 0.2)
    with command("echo abc; sleep 60") as stream, pytest.raises(OSError, match=r"wrote nothing for 0.2 s"):
        stream.read()


def test_a_command_that_nobody_reads_on_is_ended(command, tmp_path):
    with command(f"yes; touch {tmp_path}/after") as stream:
        assert stream.read(4) == b"y\ny\n"
    assert not (tmp_path / "after").exists()


def test_a_command_that_lingers_is_ended(command, tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "LINGER", 0.1)
    with command(f"echo abc; sleep 2; touch {tmp_path}/after") as stream:
        assert stream.read(4) == b"abc\n"
    assert not (tmp_path / "after").exists()


def test_a_process_that_can_open_no_shard_ends(command, web, shards, monkeypatch):
    monkeypatch.setattr(readers, "_attempts", readers._Attempts())
    monkeypatch.setattr(readers, "MAX_FAILURES", 3)
    absent, there = f"{web.url}/absent.tar", web.add("0.tar", shards[0])
    for _ in range(3):  # none in succession
        for open_absent in (lambda: gopen.gopen(absent), lambda: command("false")):
            with pytest.raises(OSError, match=r"404|status 1"):
                open_absent()
        gopen.gopen(there).close()
    for _ in range(2):
        with pytest.raises(OSError, match="404"):
            gopen.gopen(absent)
    with pytest.raises(SystemExit, match=f"3 shards in succession.* the last was {absent}: 404 Not Found"):
        gopen.gopen(absent)


@pytest.mark.slow
def test_training_ends_where_every_shard_is_gone(web):
    done = run_epoch(f"{web.url}/{{00000..00003}}.tar")
    assert done.returncode != 0
    assert "shards in succession could not be opened" in done.stderr


def test_the_command_writes_a_shard_to_its_output(web, rules, shards, capfdbinary):
    url = web.add("0.tar", shards[0], rules.drop(9000))
    assert cat.main([url]) == 0
    sys.stdout.flush()
    assert capfdbinary.readouterr().out == shards[0]


def test_the_command_fails_where_a_shard_does(web, rules, shards, capfd):
    assert cat.main([f"{web.url}/absent.tar"]) == 1
    assert capfd.readouterr().err == f"{web.url}/absent.tar: 404 Not Found\n"
    url = web.add("0.tar", shards[0], *[rules.drop(0)] * 99)
    assert cat.main([url]) == 1
    assert "0.tar: the connection dropped after 6 tries" in capfd.readouterr().err


def test_the_command_is_light_and_stands_in_a_pipe(good_set):
    heavy = "torch", "open_clip", "webdataset", "numpy"
    code = f"import sys, openclip_linattn.data.cat; assert not set({heavy}) & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    with gopen.gopen(f"pipe:{sys.executable} -m openclip_linattn.data.cat {good_set}/00000.tar") as stream:
        assert stream.read() == (good_set / "00000.tar").read_bytes()


@pytest.mark.parametrize("shards", [[], ["0.tar", "1.tar"]])
def test_the_command_without_one_shard_says_how_it_is_used(shards, capsys):
    assert cat.main(shards) == 2
    assert "usage" in capsys.readouterr().err
