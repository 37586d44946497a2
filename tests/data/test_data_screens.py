"""The commands of `openclip-linattn data`, and the picture of a set."""

import json
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from openclip_linattn.cli.data import app
from openclip_linattn.data.drawn.grid import sample_grid
from openclip_linattn.data.drawn.shapes import write_shapes
from openclip_linattn.errors import UserError


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_shapes_then_check(tmp_path):
    out = tmp_path / "shapes"
    arguments = ("shapes", out, "--samples", 60, "--test-samples", 10, "--samples-per-shard", 20, "--seed", 3)
    first = run(*arguments)
    assert first.exit_code == 0, first.output
    assert "70 samples; 4 shards written" in first.output
    again = run(*arguments)
    assert again.exit_code == 0
    assert "already holds this set, complete" in again.output
    assert (out / "samples.png").exists()
    checked = run("check", out)
    assert checked.exit_code == 0
    assert "No problems found" in checked.output
    assert "3 of 3 shards" in checked.output


def test_a_folder_that_cannot_be_made_is_a_sentence(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written"):
        write_shapes(tmp_path / "file" / "set", 4)


def test_digits(tmp_path):
    result = run("digits", tmp_path / "digits", "--image-size", 16, "--samples-per-shard", 1000)
    assert result.exit_code == 0, result.output
    assert "1,797 samples; 3 shards written" in result.output


@pytest.mark.parametrize(
    "arguments",
    [
        ("shapes", "OUT", "--samples", 0),
        ("shapes", "OUT", "--samples", 5, "--image-size", 2),
        ("digits", "OUT", "--repeat", 0),
        ("check", "OUT"),
        ("check", ""),
        ("check", "{0 .. 3}.tar"),
    ],
)
def test_wrong_input_is_a_sentence(arguments, tmp_path):
    result = run(*[tmp_path / "absent" if argument == "OUT" else argument for argument in arguments])
    assert result.exit_code != 0
    assert isinstance(result.exception, UserError)
    assert " " in str(result.exception)


@pytest.mark.parametrize("arguments", [("shapes", "x"), ("shapes", "x", "--samples", "many"), ("check",)])
def test_wrong_usage_ends_with_status_2(arguments):
    assert run(*arguments).exit_code == 2


def test_the_whole_command_prints_no_traceback(tmp_path):
    code = "import sys; from openclip_linattn.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "data", "check", str(tmp_path / "absent" / "0.tar")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 2
    assert "does not exist" in result.stderr
    assert "Traceback" not in result.stderr


def test_exit_status_tells_errors_from_warnings(broken_set, captionless_set):
    assert run("check", broken_set).exit_code == 0
    assert run("check", broken_set, "--strict").exit_code == 1
    assert run("check", captionless_set).exit_code == 1
    assert run("check", broken_set, captionless_set).exit_code == 1


def test_sizes_are_written_unless_told_not_to(broken_set):
    run("check", broken_set, "--no-write")
    assert not (broken_set / "sizes.json").exists()
    run("check", broken_set)
    assert json.loads((broken_set / "sizes.json").read_text()) == {f"0000{n}.tar": 5 for n in range(3)}


def test_json_is_all_that_stands_on_standard_output(broken_set, good_set):
    result = run("check", broken_set, good_set, "--json")
    reports = json.loads(result.stdout)
    assert [report["usable"] for report in reports] == [15, 40]
    assert reports[0]["lost"]["broken json"] == 3


def test_table_names_reasons_and_problems(broken_set):
    output = " ".join(run("check", broken_set).output.split())
    assert "15 of 30 samples (50 %) are lost" in output
    assert "broken json" in output


def test_names_in_other_encodings_can_be_printed(tmp_path, make_tar):
    make_tar(tmp_path / "0.tar", [(f"0.caf\udce9{n}", b"x") for n in range(20)])
    result = run("check", tmp_path)
    assert result.exit_code == 1, result.exception
    assert "and 12 others" in " ".join(result.output.split())


def test_large_sets_list_the_shards_with_losses_only(good_set, captionless_set, tmp_path):
    many = tmp_path / "many"
    many.mkdir()
    for number in range(45):
        source = captionless_set if number == 30 else good_set
        (many / f"{number:05d}.tar").write_bytes((source / "00000.tar").read_bytes())
    output = run("check", many, "--workers", 1).output
    assert "Only shards with a loss or a fault are listed. A report" in output
    assert "00030.tar" in output
    assert "00007.tar" not in output
    assert "45 of 45 shards" in output
    for number in range(45):
        (many / f"{number:05d}.tar").write_bytes(b"")
    output = run("check", many, "--workers", 1).output
    assert "Only shards with a loss or a fault are listed; the first 40 of 45. A report" in output
    assert "00039.tar" in output
    assert "00040.tar" not in output


def test_a_picture_of_any_shards(good_set, tmp_path):
    assert sample_grid(str(good_set), tmp_path / "grid.png", 10) == 10
    with Image.open(tmp_path / "grid.png") as image:
        pixels = np.asarray(image.convert("RGB"))
    assert pixels.shape[1] > 1000
    # Number 1 of a shard has the color (37, 91, 13).
    assert (np.abs(pixels.astype(int) - (37, 91, 13)).max(axis=-1) < 6).sum() > 500


def test_a_picture_of_captions_with_mathematics_in_them(tmp_path, make_tar, make_sample):
    make_tar(tmp_path / "0.tar", make_sample("0", txt=b"$\\frac{ costs $5_ and 100% \xe2\x82\xac"))
    assert sample_grid(str(tmp_path), tmp_path / "grid.png") == 1


def test_no_picture_of_nothing(captionless_set, tmp_path):
    with pytest.raises(UserError, match="no usable sample"):
        sample_grid(str(captionless_set), tmp_path / "grid.png")
    with pytest.raises(UserError, match="at least 1"):
        sample_grid(str(captionless_set), tmp_path / "grid.png", 0)
    assert not (tmp_path / "grid.png").exists()


def test_the_data_modules_load_neither_torch_nor_openclip():
    code = (
        "import pkgutil, sys, openclip_linattn.data as data\n"
        "for module in pkgutil.walk_packages(data.__path__, 'openclip_linattn.data.'):\n"
        "    __import__(module.name)\n"
        "heavy = {'torch', 'open_clip', 'webdataset', 'sklearn'} & set(sys.modules)\n"
        "print(sorted(heavy))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout == "[]\n"
