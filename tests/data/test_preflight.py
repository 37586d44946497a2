"""What is refused before training, what is let through, and what is remembered."""

import json
import time
import warnings

import pytest

from openclip_linattn.data.checks.shard_report import ShardReport
from openclip_linattn.data.training import preflight as preflight_module
from openclip_linattn.data.training.cache import NAME
from openclip_linattn.data.training.preflight import preflight
from openclip_linattn.errors import UserError

ONE = {"world_size": 1, "workers": 1, "resampled": False}


def refusal(source, **arguments):
    with pytest.raises(UserError) as caught:
        preflight(str(source), **{**ONE, **arguments})
    return str(caught.value)


def test_a_good_set_passes_and_is_described(good_set):
    result = preflight(str(good_set), **ONE, batch_size=8)
    assert result.pattern == f"{good_set}/{{00000..00003}}.tar"
    assert (result.shards, result.checked_shards, result.checked_samples) == (4, 4, 40)
    assert (result.num_samples, result.held, result.usable_share, result.warnings) == (40, 40, 1.0, [])
    record = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert record["samples"] == 40
    assert len(record["digest"]) == 64


def test_openclip_can_count_afterwards(good_set):
    preflight(str(good_set), **ONE)
    assert json.loads((good_set / "sizes.json").read_text()) == {f"0000{n}.tar": 10 for n in range(4)}


def test_a_given_number_writes_nothing_but_the_verdict(good_set):
    preflight(str(good_set), **ONE, num_samples=40)
    assert sorted(path.name for path in good_set.iterdir() if path.suffix == ".json") == [NAME]
    (good_set / NAME).unlink()
    preflight(str(good_set), **ONE, num_samples=40, cache=False)
    assert not list(good_set.glob("*.json"))


@pytest.mark.parametrize("resampled", [False, True])
def test_shards_without_captions(resampled, captionless_set):
    start = time.monotonic()
    text = refusal(captionless_set, resampled=resampled)
    assert "0 of 5 samples in 00000.tar have a txt member; members seen: jpg, json" in text
    assert time.monotonic() - start < 5


def test_a_part_usable_is_a_warning_with_reasons(broken_set):
    result = preflight(str(broken_set), **ONE, batch_size=5)
    assert result.usable_share == 0.5
    assert (result.held, result.num_samples) == (15, 15)
    assert result.lost["broken json"] == 3
    assert any("15 of 30 samples (50 %) are lost" in text for text in result.warnings)


@pytest.mark.parametrize(
    ("loaders", "arithmetic", "remedy"),
    [
        (
            {"world_size": 2, "workers": 3},
            "2 processes x 3 workers = 6 readers, each of which needs a shard of its own, for 4 shards (4 < 6)",
            "--workers 2",
        ),
        ({"world_size": 8, "workers": 1}, "(4 < 8)", "resampled"),
    ],
)
def test_fewer_shards_than_readers(loaders, arithmetic, remedy, good_set, monkeypatch):
    monkeypatch.setattr(preflight_module, "survey", None)  # refused without reading a shard
    text = refusal(good_set, **loaders)
    assert arithmetic in text
    assert remedy in text


def test_as_many_shards_as_readers_pass(good_set):
    assert preflight(str(good_set), world_size=2, workers=2, resampled=False, batch_size=10).shards == 4


def test_resampling_needs_no_shard_for_every_reader(good_set):
    result = preflight(str(good_set), world_size=2, workers=3, resampled=True, batch_size=64)
    assert result.shards == 4


def test_no_workers_read_in_the_process_itself(good_set):
    assert preflight(str(good_set), world_size=4, workers=0, resampled=False, batch_size=10).shards == 4


def test_a_worker_with_less_than_a_batch_would_wait_for_ever(good_set):
    text = refusal(good_set, workers=4, batch_size=16)
    assert "may get 1 shard" in text
    assert "only 10 usable samples, less than one batch of 16" in text
    assert preflight(str(good_set), world_size=1, workers=2, resampled=False, batch_size=16).shards == 4


def test_a_worker_that_may_get_an_empty_shard_would_wait_for_ever(good_set):
    (good_set / "00002.tar").write_bytes(b"")
    assert "only 0 usable samples" in refusal(good_set, workers=4)
    assert any("is empty" in text for text in preflight(str(good_set), **ONE).warnings)


@pytest.mark.slow
@pytest.mark.parametrize(("batch_size", "hangs"), [(10, False), (16, True)])
def test_openclip_itself_waits_for_ever_where_we_say_so(batch_size, hangs, good_set, tmp_path):
    import subprocess
    import sys

    pytest.importorskip("open_clip_train")
    script = tmp_path / "read.py"
    script.write_text(
        "import sys, types\n"
        "from open_clip_train.data import get_wds_dataset\n"
        "from torchvision.transforms import ToTensor\n"
        "args = types.SimpleNamespace(train_data=sys.argv[1], train_num_samples=40, seed=0, workers=4,\n"
        "    batch_size=int(sys.argv[2]), world_size=1, train_data_upsampling_factors=None)\n"
        "data = get_wds_dataset(args, ToTensor(), True, tokenizer=lambda text: [text])\n"
        "print('ready', flush=True)\n"
        "print(sum(len(texts) for _, texts in data.dataloader), flush=True)\n"
    )
    command = [sys.executable, str(script), f"{good_set}/{{00000..00003}}.tar", str(batch_size)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            process.wait(8 if hangs else 60)
            waited = False
        except subprocess.TimeoutExpired:
            waited = True
            import os
            import signal

            os.killpg(process.pid, signal.SIGKILL)
        assert waited == hangs
        if not hangs:
            assert process.stdout.readline() == "40\n"


def test_a_command_that_fails_is_caught(good_set):
    text = refusal(f"pipe:false {good_set}/{{00000..00003}}.tar", num_samples=40)
    assert "the command failed with exit status 1" in text


def test_a_command_that_hangs_is_caught(monkeypatch):
    monkeypatch.setattr(preflight_module, "SILENCE", 0.3)
    assert "the command wrote nothing for 0.3 s" in refusal("pipe:sleep 6{0..9}", num_samples=40)


def test_one_hanging_command_stops_a_run_however_good_the_others_are(good_set, monkeypatch):
    monkeypatch.setattr(preflight_module, "SILENCE", 0.3)
    source = f"{good_set}/{{00000..00003}}.tar::pipe:sleep 60"
    assert "pipe:sleep 60 cannot be read" in refusal(source, num_samples=40)


@pytest.mark.parametrize("number", [0, -1])
def test_a_number_of_samples_that_is_none(number, good_set):
    assert f"must be at least 1, not {number}" in refusal(good_set, num_samples=number)


def test_a_pipe_passes_with_its_number_of_samples(good_set):
    source = f"pipe:cat {good_set}/{{00000..00003}}.tar"
    assert "give --train-num-samples 40" in refusal(source)
    result = preflight(source, **ONE, num_samples=40, batch_size=8)
    assert (result.held, result.digest, result.pattern) == (40, None, source)


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("{00000..00009}.tar", "6 of 10 shards"),
        ("{00000 .. 00003}.tar", "write {00000..00003}"),
        ("absent/{0..3}.tar", "does not exist"),
    ],
)
def test_wrong_sources(pattern, said, good_set):
    assert said in refusal(f"{good_set}/{pattern}")


def test_a_server_that_is_down_is_said_after_its_first_shard(monkeypatch):
    monkeypatch.setattr(preflight_module, "SILENCE", 1e-6)
    monkeypatch.setattr("openclip_linattn.data.remote.resuming.TRIES", 1)
    text = refusal("https://example.invalid/{0..3}.tar", num_samples=100, batch_size=8)
    assert "https://example.invalid/0.tar cannot be opened (no connection to example.invalid" in text
    assert text.count("cannot be opened") == 1


def test_a_large_set_is_sampled(good_set, tmp_path, make_tar):
    data = (good_set / "00000.tar").read_bytes()
    many = tmp_path / "many"
    many.mkdir()
    for number in range(40):
        (many / f"{number:05d}.tar").write_bytes(data)
    (many / "00039.tar").write_bytes(b"")
    result = preflight(str(many), **ONE, num_samples=400, batch_size=8)
    assert (result.shards, result.checked_shards) == (40, preflight_module.MAX_SHARDS)
    assert any("00039.tar is empty" in text for text in result.warnings)
    (many / "00017.tar").unlink()
    assert "1 of 40 shards" in refusal(f"{many}/{{00000..00039}}.tar", num_samples=400)


def test_large_shards_are_read_in_part(good_set, monkeypatch):
    monkeypatch.setattr(preflight_module, "MAX_SAMPLES", 8)
    monkeypatch.setattr(preflight_module, "MIN_SAMPLES_PER_SHARD", 2)
    result = preflight(str(good_set), **ONE, num_samples=40, batch_size=8)
    assert (result.checked_samples, result.held) == (8, None)
    assert "give --train-num-samples N" in refusal(good_set, cache=False)


def test_repeating_samples_within_an_epoch_is_said(good_set):
    result = preflight(str(good_set), **ONE, num_samples=100)
    assert result.warnings == ["An epoch of 100 samples repeats some of the 40 usable ones."]


def test_short_epochs_of_many_shards_are_warned_of_with_the_remedy(good_set, monkeypatch):
    shards, per_shard = 41_408, 9_800
    monkeypatch.setattr(preflight_module, "remote_counts", lambda urls: dict.fromkeys(urls, per_shard))
    arguments = {"world_size": 64, "workers": 6, "batch_size": 256, "num_samples": shards * per_shard // 32}
    source = f"pipe:NUMBER={{00000..{shards - 1}}} cat {good_set}/00000.tar"
    result = preflight(source, **arguments, resampled=False)
    assert result.held == pytest.approx(
        shards * per_shard, rel=1e-3
    )  # but for the few that were read: 10 each
    # Each of 384 readers takes 33,024 samples and holds 4,999 back, of 4 shards; the buffer has read 1,999 further.
    (note,) = [text for text in result.warnings if "within a buffer" in text]
    assert f"never get beyond the first {4 * 384 + 1999:,} of the 41,408 shards" in note
    assert "give --dataset-resampled" in note
    resampled = preflight(source, **arguments, resampled=True)
    assert not any("within a buffer" in text for text in resampled.warnings)


def test_counts_beside_remote_shards_are_used(good_set, monkeypatch):
    monkeypatch.setattr(preflight_module, "remote_counts", lambda urls: dict.fromkeys(urls, 5000))
    monkeypatch.setattr(preflight_module, "MAX_SAMPLES", 8)
    monkeypatch.setattr(preflight_module, "MIN_SAMPLES_PER_SHARD", 2)
    source = f"pipe:cat {good_set}/{{00000..00003}}.tar"
    assert preflight(source, **ONE, num_samples=40, batch_size=8).held == 20_000
    assert "give --train-num-samples 20000" in refusal(source)


def test_unchanged_shards_are_not_read_again(good_set, monkeypatch):
    source = f"{good_set}::{good_set}/00000.tar"  # which has a shard twice, and that is said again
    first = preflight(source, **ONE)
    assert any("listed more than once" in text for text in first.warnings)
    monkeypatch.setattr(preflight_module, "read_shards", None)
    assert preflight(source, **ONE) == first


@pytest.mark.parametrize(
    ("fault", "silence"),
    [("cannot be read (Input/output error)", 20.0), ("is empty (0 bytes)", 0.0)],  # the rest is not come to
)
def test_what_could_not_be_read_is_tried_again(good_set, monkeypatch, fault, silence):
    with monkeypatch.context() as patch:
        patch.setattr(preflight_module, "SILENCE", silence)
        patch.setattr(
            preflight_module,
            "read_shards",
            lambda urls, **_: (ShardReport(url, fault=fault) for url in urls),
        )
        assert fault.split(" (")[0] in refusal(good_set, num_samples=40)
    assert preflight(str(good_set), **ONE, num_samples=40).checked_samples == 40


def test_a_changed_shard_is_read_again(good_set, captionless_set):
    preflight(str(good_set), **ONE, num_samples=40)
    for shard in range(4):
        data = (captionless_set / "00000.tar").read_bytes()
        (good_set / f"0000{shard}.tar").write_bytes(data)
    assert "have a txt member" in refusal(good_set, num_samples=40)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": 1}', '{"version": 0, "reports": {}}'])
def test_a_spoilt_verdict_is_ignored(content, good_set):
    (good_set / NAME).write_text(content)
    assert preflight(str(good_set), **ONE).checked_samples == 40
    assert json.loads((good_set / NAME).read_text())["version"] == 1


def test_the_verdict_goes_to_the_cache_folder_where_the_shards_cannot_be_written(
    good_set, tmp_path, monkeypatch
):
    from openclip_linattn.data.training import cache

    write = cache.write_json

    def refuse(path, value):
        if path.parent == good_set:
            raise PermissionError(13, "Permission denied")
        write(path, value)

    monkeypatch.setattr(cache, "write_json", refuse)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first = preflight(str(good_set), **ONE, num_samples=40)
    assert len(list((tmp_path / "cache" / "openclip_linattn").glob("*.json"))) == 1
    monkeypatch.setattr(preflight_module, "read_shards", None)
    assert preflight(str(good_set), **ONE, num_samples=40) == first


def test_a_user_needs_no_home(good_set, monkeypatch):
    def homeless() -> None:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("openclip_linattn.data.training.cache.Path.home", homeless)
    assert preflight(str(good_set), **ONE).checked_samples == 40
    assert (good_set / NAME).exists()


def test_no_warning_of_pillow_escapes(tmp_path, make_tar, make_sample):
    import io

    from PIL import Image

    buffer = io.BytesIO()
    palette = Image.new("P", (8, 8))
    palette.save(buffer, "PNG", transparency=bytes(range(256)))
    make_tar(tmp_path / "0.tar", make_sample("000", jpg=None, png=buffer.getvalue()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert preflight(str(tmp_path), **ONE, num_samples=1).usable_share == 1
