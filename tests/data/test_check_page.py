"""Histograms, the report file and the picture of a check, and what its screen says and ends with."""

import json
import sys

import numpy as np
import pytest
from PIL import Image
from rich.progress import Progress
from typer.testing import CliRunner

from openclip_linattn.cli.data import app, check_progress
from openclip_linattn.data.checks import check as check_module
from openclip_linattn.data.checks.check import check
from openclip_linattn.data.checks.dataset_report import DatasetReport, report_text
from openclip_linattn.data.checks.histograms import ASPECTS, CAPTIONS, SIDES
from openclip_linattn.data.checks.problems import find_problems
from openclip_linattn.data.checks.shard_report import ShardReport
from openclip_linattn.errors import UserError


def run(*arguments):
    return CliRunner().invoke(app, ["check", *map(str, arguments)])


@pytest.fixture
def sized_set(tmp_path, make_tar, make_sample):
    """One shard of images of known sizes and captions of known lengths, and one lost sample."""
    import io

    members = []
    for number, (size, caption) in enumerate(
        [((300, 200), "a" * 10), ((31, 400), "b" * 200), ((256, 256), " c \n"), ((5000, 5000), "  ")]
    ):
        buffer = io.BytesIO()
        Image.new("L", size).save(buffer, "PNG")
        members += make_sample(f"00{number}", jpg=None, png=buffer.getvalue(), txt=caption.encode())
    make_tar(tmp_path / "sized" / "0.tar", [*members, *make_sample("009", txt=b"\xff" * 50)])
    return tmp_path / "sized"


def filled(histogram):
    return {edge: count for edge, count in zip(histogram["edges"], histogram["counts"], strict=True) if count}


def test_usable_images_and_captions_are_measured(sized_set):
    report = check(str(sized_set)).to_json()
    assert filled(report["shorter_side"]) == {0: 1, 192: 1, 256: 1, 4096: 1}
    assert filled(report["width_over_height"]) == {0: 1, 4 / 5: 2, 3 / 2: 1}
    assert filled(report["caption_length"]) == {0: 1, 1: 1, 8: 1, 192: 1}
    assert report["empty_captions"] == 1


@pytest.mark.parametrize("scale", [SIDES, ASPECTS, CAPTIONS])
def test_bins_hold_their_lower_edge_and_not_their_upper_one(scale):
    assert list(scale.edges) == sorted(set(scale.edges))
    for place, edge in enumerate(scale.edges):
        assert scale.place(edge) == place
        assert scale.place(np.nextafter(edge, np.inf)) == place
        if place:
            assert scale.place(np.nextafter(edge, -np.inf)) == place - 1
    assert scale.place(1e9) == len(scale.edges) - 1


def test_histograms_add_up():
    assert SIDES.total([[1] * 16, [2] * 16]) == [3] * 16
    assert SIDES.total([]) == SIDES.zeros()


def test_the_report_file_holds_everything_a_shard_a_line(broken_set, tmp_path):
    result = run(broken_set, "--report", tmp_path / "report.json")
    assert result.exit_code == 0, result.output
    text = (tmp_path / "report.json").read_text()
    assert json.loads(text) == [check(str(broken_set)).to_json()]
    rows = [line for line in text.splitlines() if line.startswith('{"url"')]
    assert [json.loads(row.rstrip(","))["usable"] for row in rows] == [5, 5, 5]


def test_reports_of_several_sources_stand_in_one_file(broken_set, good_set):
    reports = [check(str(broken_set)), check(str(good_set)), DatasetReport("none", 0, [])]
    assert json.loads(report_text(reports)) == [report.to_json() for report in reports]


def test_totals_add_up_over_shards_and_reasons(broken_set):
    (report,) = json.loads(run(broken_set, "--json").stdout)
    for name in ("samples", "usable", "empty_captions", "recoverable", "repeated_keys", "split_keys"):
        assert report[name] == sum(shard[name] for shard in report["shards"])
    assert report["usable"] + sum(report["lost"].values()) == report["samples"]
    assert sum(report["shorter_side"]["counts"]) == report["usable"]


def has_color(pixels, color):
    return bool((np.abs(pixels.astype(int) - color).max(axis=-1) < 12).sum() > 30)


GREEN, RED, BLUE = (44, 160, 44), (214, 39, 40), (31, 119, 180)


def test_a_picture_shows_losses_shards_sizes_and_captions(broken_set, tmp_path):
    (broken_set / "00001.tar").write_bytes(b"")
    result = run(broken_set, "--picture", tmp_path / "page.png")
    assert result.exit_code == 0, result.output
    with Image.open(tmp_path / "page.png") as image:
        assert image.size == (1600, 1000)
        pixels = np.asarray(image.convert("RGB"))
    reasons, shards = pixels[:500, :800], pixels[:500, 800:]
    assert has_color(reasons, GREEN)
    assert has_color(reasons, RED)
    assert has_color(shards, RED)  # the shard of which nothing is usable
    assert has_color(pixels[500:, :800], BLUE)
    assert has_color(pixels[500:, 800:], BLUE)


def test_a_picture_of_many_shards_and_of_a_source_with_mathematics_in_it(tmp_path):
    from openclip_linattn.data.checks.picture import draw_report

    shards = [
        ShardReport(f"{n}.tar", samples=9, usable=n % 9, lost={"broken json": 9 - n % 9}) for n in range(900)
    ]
    draw_report(DatasetReport(r"$\frac{ \udce9" + "x" * 300, 900, shards), tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 10_000


def test_shards_are_drawn_at_their_numbers_where_the_names_are_numbers():
    from openclip_linattn.data.checks.picture import _places

    def places(*urls, **absent):
        found, holes, unit = _places(DatasetReport("", 9, [ShardReport(url) for url in urls], **absent))
        return [*found], holes, unit

    numbers = ([7, 9, 12], [8, 10], "number of the shard")
    assert places("a/07.tar", "a/09.tar", "a/12.tar", gaps=["a/10.tar"], missing=["a/08.tar"]) == numbers
    counted = ([1, 2], [], "place among the checked shards")
    assert places("a/1.tar", "b/1.tar", gaps=["a/3.tar"]) == counted
    assert places("a/1.tar", "a/x.tar") == counted
    assert places("a/1.tar", "pipe:cat 2.tar") == counted


def test_pictures_that_cannot_be_drawn_are_sentences(good_set, tmp_path):
    several = run(good_set, f"{good_set}/00000.tar", "--picture", tmp_path / "page.png")
    assert "--picture draws one source, not 2" in str(several.exception)
    nothing = run("ais://bucket/0.tar", "--picture", tmp_path / "page.png", "--state", tmp_path / "state")
    assert "no checked shard to draw" in str(nothing.exception)
    for option in ("--picture", "--report"):
        absent = run(good_set, option, tmp_path / "absent" / "file")
        assert isinstance(absent.exception, UserError)
        assert f"cannot be written: {tmp_path / 'absent'} is no folder" in str(absent.exception)
        folder = run(good_set, option, tmp_path)
        assert "is a folder: give the name of a file" in str(folder.exception)
    assert not (good_set / "sizes.json").exists()  # this was said before anything was read


def problems_of(**lost):
    shard = ShardReport(
        "0.tar", samples=100, usable=100 - sum(lost.values()), lost=lost, fault="is cut short"
    )
    report = DatasetReport("0.tar", 1, [shard])
    return find_problems([shard], report.overlap)


def test_one_reason_that_takes_most_samples_is_said_first():
    first = problems_of(**{"missing caption": 51, "broken json": 9})[0]
    assert first.severity == "warning"
    assert first.text == "More than half of the samples (51 of 100) are lost for one reason: missing caption."
    texts = [problem.text for problem in problems_of(**{"missing caption": 50, "broken json": 49})]
    assert "is cut short" in texts[0]
    assert not any("one reason" in text for text in texts)


def test_bombs_are_explained():
    shard = ShardReport("0.tar", samples=2, usable=1, lost={"image bomb": 1}, bomb_pixels=180_000_000)
    texts = [problem.text for problem in find_problems([shard], DatasetReport("0.tar", 1, [shard]).overlap)]
    assert any("up to 180,000,000 pixels" in text for text in texts)


def test_started_again_the_screen_says_the_same_without_reading(broken_set, monkeypatch):
    first = run(broken_set, "--workers", 1)
    monkeypatch.setattr(
        check_module, "map_unordered", lambda task, urls, workers: iter([(url, 0) for url in urls])
    )
    assert run(broken_set, "--workers", 1).output == first.output
    assert run(broken_set, "--workers", 1, "--afresh").exception is not None


def test_an_interrupted_check_keeps_what_it_has(good_set, monkeypatch, tmp_path):
    def interrupted(task, urls, workers):
        yield urls[0], task(urls[0])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(check_module, "map_unordered", interrupted)
        stopped = run(good_set, "--state", tmp_path)
        assert stopped.exit_code not in (0, 2)
        assert f"what was read is kept in {tmp_path}" in stopped.stderr
    (kept,) = tmp_path.glob("verdicts-*.jsonl")
    assert len(kept.read_text(encoding="utf-8").splitlines()) == 1
    assert run(good_set, "--state", tmp_path).exit_code == 0


@pytest.mark.parametrize("workers", [0, -1])
def test_workers_that_are_none_are_refused(workers, good_set):
    for option in ("--workers", "--sample-shards", "--slurm-array"):
        result = run(good_set, option, workers)
        assert result.exit_code == 2
        assert option in result.stderr


def test_all_sources_are_looked_at_before_the_first_is_read(good_set, tmp_path):
    result = run(good_set, tmp_path / "absent")
    assert isinstance(result.exception, UserError)
    assert not (good_set / "sizes.json").exists()


def test_shards_whose_scheme_is_not_read_end_with_status_1(good_set, tmp_path):
    result = run(f"{good_set}::ais://bucket/{{0..2}}.tar", "--allow-missing")
    assert result.exit_code == 1
    assert "the samples of 3 shards were not looked at" in result.stderr


def test_counts_that_are_not_written_are_a_warning(good_set, monkeypatch):
    def refuse(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("openclip_linattn.data.sizes.write_json", refuse)
    result = run(good_set)
    assert result.exit_code == 0
    assert "warning: " in result.stderr
    assert run(good_set, "--strict").exit_code == 1


def test_a_shard_that_could_not_be_read_leaves_the_report_incomplete(good_set, tmp_path):
    assert check(str(good_set)).complete
    assert not check(f"{good_set}/00000.tar::pipe:false").complete


def test_captions_that_can_be_mixed_up_end_with_status_1(tmp_path, make_tar, make_sample):
    make_tar(tmp_path / "0.tar", make_sample("k", txt=None, json=None))
    make_tar(tmp_path / "1.tar", sorted(make_sample("k"), reverse=True))
    result = run(tmp_path)
    assert result.exit_code == 1
    assert "Captions can be mixed up" in " ".join(result.output.split())


def test_a_dead_reader_ends_with_status_1_and_names_the_shard(good_set, tmp_path):
    source = f"{good_set}/00000.tar::pipe:exec kill -9 $PPID"
    result = run(source, "--state", tmp_path / "state", "--json")
    assert result.exit_code == 1
    (report,) = json.loads(result.stdout)
    assert report["usable"] == 10
    assert "pipe:exec kill -9 $PPID was not read" in report["problems"][0]["text"]


def test_shards_that_cannot_be_read_end_with_status_1_unless_allowed(good_set, tmp_path):
    source = f"{good_set}/00000.tar::pipe:false"
    result = run(source, "--state", tmp_path)
    assert result.exit_code == 1
    assert "of 1 shards that could not be read are not counted (such as pipe:false)" in result.stderr
    assert run(source, "--state", tmp_path, "--allow-missing").exit_code == 0


def test_progress_counts_samples_and_losses(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(check_progress.time, "monotonic", lambda: now[0])
    counts = check_progress.Counts()
    now[0] = 7.0
    counts.add(ShardReport("9.tar", samples=9000, usable=9000), kept=True)
    assert counts.text() == "9,000 samples, 0/s, 0 lost"
    now[0] = 9.0
    counts.add(ShardReport("0.tar", samples=1000, usable=1000), kept=False)
    assert counts.text() == "10,000 samples, 500/s, 0 lost"
    now[0] = 11.0
    counts.add(ShardReport("1.tar", samples=1000, usable=450), kept=False)
    assert counts.text() == "11,000 samples, 500/s, 550 lost (5 %)"


def test_progress_is_silent_where_no_terminal_is(capsys):
    with check_progress.check_progress(2) as watch:
        watch(ShardReport("0.tar", samples=1), False)
    assert capsys.readouterr().err == ""


def test_progress_moves_on_a_terminal(monkeypatch):
    class Terminal(check_progress.Console):
        def __init__(self, **options):
            super().__init__(file=sys.stderr, force_terminal=True, width=120)

    texts = []
    monkeypatch.setattr(check_progress, "Console", Terminal)
    update = Progress.update

    def noting(self, task, **fields):
        update(self, task, **fields)
        texts.append((self.tasks[0].completed, fields["counts"].split(",")[0]))

    monkeypatch.setattr(Progress, "update", noting)
    with check_progress.check_progress(2) as watch:
        watch(ShardReport("0.tar", samples=7), True)
        watch(ShardReport("1.tar", samples=5), False)
    assert texts == [(1, "7 samples"), (2, "12 samples")]
