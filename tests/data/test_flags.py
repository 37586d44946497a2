"""`data flags`: weights that give the wanted shares, workers that fit the shards, and flags that OpenCLIP takes."""

import json
import os
import random
import shlex

import pytest
from typer.testing import CliRunner

from openclip_linattn.cli.data import app
from openclip_linattn.data.training.flags import Loaders, choose_workers, data_flags
from openclip_linattn.data.training.weights import Source, factors_for, look_at, weigh
from openclip_linattn.errors import UserError

SIZES = {"big": [900, 1000, 1100, 40, 960], "small": [300, 10], "tiny": [7]}


def run(*arguments):
    return CliRunner().invoke(app, ["flags", *(str(argument) for argument in arguments)])


def refusal(*arguments):
    result = run(*arguments)
    assert isinstance(result.exception, UserError), result.output
    return str(result.exception)


def flags_of(*arguments):
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    words = shlex.split(result.stdout)
    assert result.stdout.count("\n") == 1
    return {word: words[n + 1] for n, word in enumerate(words[:-1]) if word.startswith("--")}


@pytest.fixture
def sets(tmp_path):
    """Folders of empty shards whose sizes.json tells their samples."""
    for name, sizes in SIZES.items():
        folder = tmp_path / name
        folder.mkdir()
        table = {f"{n:05d}.tar": size for n, size in enumerate(sizes)}
        for shard in table:
            (folder / shard).touch()
        (folder / "sizes.json").write_text(json.dumps(table))
    return {name: str(tmp_path / name) for name in SIZES}


def drawn_by_openclip(flags, draws):
    """Samples by source folder of each of so many shards that OpenCLIP draws."""
    data = pytest.importorskip("open_clip_train.data")
    shards = data.ResampledShards2(
        flags["--train-data"],
        weights=flags.get("--train-data-upsampling-factors"),
        nshards=draws,
        deterministic=True,
        worker_seed=lambda: 7,
    )
    for shard in shards:
        _, folder, name = shard["url"].rsplit("/", 2)
        yield folder, SIZES[folder][int(name.removesuffix(".tar"))]


@pytest.mark.parametrize(
    ("option", "wanted"),
    [
        (("--factors", "1,8"), (4000, 2480)),
        (("--factors", "0.5,0.25"), (2000, 77.5)),
        (("--shares", "70,30"), (70, 30)),
        (("--shares", "1,99"), (1, 99)),
        (("--resampled",), (4000, 310)),
    ],
)
def test_openclip_draws_the_shares_that_are_told(option, wanted, sets):
    flags = flags_of(sets["big"], sets["small"], *option)
    told = json.loads(run(sets["big"], sets["small"], *option, "--json").stdout)["sources"][0]["share"]
    assert told == pytest.approx(wanted[0] / sum(wanted), rel=1e-5)
    draws = 20_000
    drawn = [(size if folder == "big" else 0, size) for folder, size in drawn_by_openclip(flags, draws)]
    mean = sum(size for _, size in drawn) / draws
    # The share is a ratio of two sums over draws; its deviation is that of (part - share x size) / mean.
    variance = sum((part - told * size) ** 2 for part, size in drawn) / draws
    sigma = (variance / draws) ** 0.5 / mean
    share = sum(part for part, _ in drawn) / sum(size for _, size in drawn)
    assert abs(share - told) < 3 * sigma < 0.03


def test_single_samples_are_drawn_as_often_as_their_factors_say(sets):
    rows = weigh([look_at(sets["big"]), look_at(sets["small"])], [2, 3])
    big, small = (row.times_seen(1_000_000) for row in rows)
    assert small / big == pytest.approx(1.5)
    assert 4000 * big + 310 * small == pytest.approx(1_000_000)


def test_a_source_of_several_parts_has_its_factor_repeated(sets):
    source = f"{sets['big']}/{{00000..00002}}.tar::{sets['big']}/00003.tar"
    flags = flags_of(source, sets["small"], "--factors", "2,1")
    assert flags["--train-data-upsampling-factors"] == "2::2::1"
    assert len(flags["--train-data"].split("::")) == 3
    data = pytest.importorskip("open_clip_train.data")
    _, weights = data.expand_urls(flags["--train-data"], flags["--train-data-upsampling-factors"])
    assert weights == [2, 2, 2, 2, 1, 1]


def test_factors_for_shares_are_scaled_and_exact():
    sources = [Source("a", "a", 1, 400_000_000), Source("b", "b", 1, 3), Source("c", "c::d", 2, 1000)]
    factors = factors_for(sources, [50, 25, 25])
    assert min(factors) == 1
    shares = [row.share for row in weigh(sources, factors)]
    assert shares == pytest.approx([0.5, 0.25, 0.25], rel=1e-5)


def test_flags_without_weights_train_every_sample_once(sets):
    flags = flags_of(sets["big"], sets["small"])
    assert flags == {
        "--train-data": f"{sets['big']}/{{00000..00004}}.tar::{sets['small']}/{{00000..00001}}.tar",
        "--dataset-type": "webdataset",
        "--train-num-samples": "4310",
        "--workers": "7",
    }


def test_weights_bring_replacement_and_workers_need_no_shards_then(sets):
    result = run(sets["tiny"], sets["small"], "--factors", "2,1", "--num-samples", 5000, "--processes", 64)
    words = shlex.split(result.stdout)
    assert "--dataset-resampled" in words
    assert words[-2:] == ["--workers", "8"]
    assert words[words.index("--train-num-samples") + 1] == "5000"


def test_the_flags_are_what_openclips_parser_reads(sets, tmp_path):
    parse_args = pytest.importorskip("open_clip_train.params").parse_args
    folder = tmp_path / "my data (1)"
    folder.mkdir()
    (folder / "00000.tar").touch()
    line = run(folder, sets["tiny"], "--factors", "1,2.5", "--num-samples", 10).stdout
    args = parse_args(shlex.split(line))
    assert args.train_data == f"{folder}/00000.tar::{sets['tiny']}/00000.tar"
    assert (args.train_data_upsampling_factors, args.dataset_resampled) == ("1::2.5", True)
    assert (args.dataset_type, args.train_num_samples, args.workers) == ("webdataset", 10, 8)


@pytest.mark.parametrize(
    ("shards", "processes", "limit", "workers"),
    [
        (100, 1, 8, 5),  # 20 each
        (41_408, 8, 8, 8),  # 647 each
        (41_407, 8, 8, 8),  # even only with none: the shares differ by one in 647
        (7, 1, 4, 4),  # even only with one
        (6, 2, 3, 3),
        (4, 2, 8, 2),
        (5, 5, 8, 1),
    ],
)
def test_workers_share_the_shards_evenly_where_that_costs_few(shards, processes, limit, workers):
    assert choose_workers(shards, Loaders(processes, limit)) == workers


def loads_as_openclip_deals(shards, processes, workers):
    urls = range(shards)
    return [
        len(urls[rank::processes][worker::workers]) for rank in range(processes) for worker in range(workers)
    ]


@pytest.mark.parametrize(
    ("shards", "processes", "limit"), [(100, 3, 8), (41_455, 8, 8), (9, 2, 4), (12, 3, 4)]
)
def test_the_loads_are_those_of_openclips_readers(shards, processes, limit):
    flags = data_flags([Source("a", "a", shards, 10)], Loaders(processes, limit))
    loads = loads_as_openclip_deals(shards, processes, flags.workers)
    assert flags.loads == (max(loads), min(loads))
    assert any("the fullest gets" in note for note in flags.notes) == (len(set(loads)) > 1)


def test_fewer_shards_than_processes_are_refused(sets):
    assert "3 processes need a shard each and there are 2" in refusal(sets["small"], "--processes", 3)


def test_the_table_and_the_notes_go_to_standard_error(sets):
    result = run(sets["big"], sets["small"], "--factors", "1,8")
    assert "61.73 %" in result.stderr  # 4000 of 6480
    assert "800.0" in result.stderr
    assert "times seen" not in result.stdout
    plain = run(sets["big"], "--processes", 2, "--max-workers", 2)
    assert "the next multiple of 4 x --batch-size" in plain.stderr
    assert "the fullest gets 2 and the emptiest 1" in plain.stderr


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--factors", "2"), "The factors must be one number for each source: 1 for 2"),
        (("--factors", "2,0"), "positive"),
        (("--factors", "2,nan"), "positive"),
        (("--factors", "2,x"), "numbers with commas"),
        (("--shares", "70,70"), "add up to 100, not 140"),
        (("--shares", "0.7,0.3"), "add up to 100, not 1"),
        (("--shares", "70,30", "--factors", "1,1"), "give one of them"),
    ],
)
def test_wrong_weights_are_a_sentence(options, says, sets):
    assert says in refusal(sets["big"], sets["small"], *options)


def test_unknown_counts_are_refused_only_where_they_are_needed(sets, tmp_path):
    (tmp_path / "big" / "00009.tar").touch()
    both = sets["big"], sets["small"]
    for options in ((), ("--shares", "50,50"), ("--shares", "50,50", "--num-samples", 100)):
        text = refusal(*both, *options)
        assert "The samples of 1 of 6 shards" in text
        assert "openclip-linattn data check" in text
    result = run(*both, "--factors", "2,1", "--num-samples", 100)
    assert result.exit_code == 0
    assert "unknown" in result.stderr


def test_a_source_without_samples_has_no_share(tmp_path, sets):
    (tmp_path / "tiny" / "sizes.json").write_text('{"00000.tar": 0}')
    assert "no usable sample" in refusal(sets["big"], sets["tiny"], "--shares", "50,50")


@pytest.mark.parametrize(
    ("source", "form"),
    [
        ("s3://b/{00000..00003}.tar", "pipe:aws s3 cp s3://b/{00000..00003}.tar -"),
        (
            "s3://b/{0,2}.tar::gs://c/0.tar",
            "pipe:aws s3 cp s3://b/{0,2}.tar -::pipe:gcloud storage cat gs://c/0.tar",
        ),
        ("s3://b/my set/{0..3}.tar", "pipe:aws s3 cp 's3://b/my set/{0..3}.tar' -"),
        ("https://h.invalid/{0..3}.tar", "https://h.invalid/{0..3}.tar"),
        ("pipe:cat {0..3}.tar", "pipe:cat {0..3}.tar"),
    ],
)
def test_sources_in_the_form_that_stock_openclip_opens(source, form):
    flags = data_flags([Source(source, source, 4, 10)], Loaders(1, 1), stock=True)
    assert flags.train_data == form
    assert any("curl" in note for note in flags.notes) == source.startswith("https")


def test_a_list_too_long_for_a_shell_is_noted(sets):
    names = "::".join(f"data/{random.Random(n).randbytes(20).hex()}.tar" for n in range(3000))
    flags = data_flags([Source("list.txt", names, 3000, 10)], Loaders(1, 1))
    assert any("give `python -m openclip_linattn.train` the list file" in note for note in flags.notes)


def test_a_name_that_is_no_text_passes(tmp_path):
    name = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.tar")
    flags = data_flags([Source(name, name, 1, 10)], Loaders(1, 1))
    assert flags.notes
    assert os.fsencode(flags.train_data).endswith(b"\xff.tar")


@pytest.mark.parametrize(("samples", "said"), [(1000, True), (100_000, False), (None, False)])
def test_a_batch_that_a_reader_cannot_fill_is_warned_of(samples, said):
    flags = data_flags([Source("a", "a", 9, samples)], Loaders(2, 2), num_samples=50)
    note = "The emptiest reader has about 222 samples"  # 2 of 9 shards
    assert any(note in text for text in flags.notes) == said
    drawn = data_flags([Source("a", "a", 9, samples)], Loaders(2, 2), num_samples=50, resampled=True)
    assert not any("emptiest" in text for text in drawn.notes)
