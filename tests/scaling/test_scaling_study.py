"""Published tables by a column map: units, results by data set, missing and repeated rows, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from openclip_scaling.cli import main
from openclip_scaling.errors import UserError
from openclip_scaling.reading.runs import load
from openclip_scaling.reading.study import read_study

TABLE = """name,arch,samples (M),gflops,set,acc,hours
a,B/32,10,2,in1k,50,1
a,B/32,10,2,coco,30,1
b,B/16,20,8,in1k,60,2
b,B/16,20,8,coco,40,2
"""
MAP = """
run: name
model: arch
attention: {value: softmax}
samples_seen: {column: samples (M), unit: millions}
gmac_per_pair: {column: gflops, unit: GFLOP}
gpu_hours: {column: hours, unit: days}
"{set}/top1": {column: acc, unit: "%"}
"""


def study(folder: Path, table: str = TABLE, columns: str = MAP) -> Any:
    (folder / "study.csv").write_text(table, encoding="utf-8")
    (folder / "map.yaml").write_text(columns, encoding="utf-8")
    return read_study(folder / "study.csv", folder / "map.yaml")


def notices_of(collection: Any) -> str:
    return "\n".join(str(notice) for notice in collection.notices)


def test_columns_and_units_become_those_of_the_table(tmp_path: Path) -> None:
    found = study(tmp_path)
    frame = found.checkpoints
    assert frame["run"].tolist() == ["a", "b"]
    assert frame["model"].tolist() == ["B/32", "B/16"]
    assert set(frame["attention"]) == {"softmax"}
    assert frame["samples_seen"].tolist() == [1e7, 2e7]
    assert frame["gmac_per_pair"].tolist() == [1, 4]
    assert frame["gpu_hours"].tolist() == [24, 48]
    assert frame["in1k/top1"].tolist() == [0.5, 0.6]
    assert frame["coco/top1"].tolist() == [0.3, 0.4]
    assert frame["train_flop"].tolist() == pytest.approx([6e9 * 1e7, 6e9 * 4 * 2e7])
    assert "study.csv: train_flop is counted as 3 x 2 x gmac_per_pair" in notices_of(found)
    assert found.runs["run"].tolist() == ["a", "b"]


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("train_flop: x", 7.0),
        ("train_flop: {column: x, unit: EFLOP}", 7e18),
        ("train_flop: {column: x, unit: forward GMAC}", 42e9),
        ("train_flop: {column: x, unit: forward GFLOP}", 21e9),
        ("train_flop: {column: x, unit: PFLOP-days}", 7 * 8.64e19),
        ("train_flop: {column: x, factor: 1e6}", 7e6),
        ("gmac_per_pair: {column: x, unit: TMAC}", 7e3),
        ("gmac_per_pair: {column: x, unit: FLOP}", 3.5e-9),
        ("samples_seen: {column: x, unit: billions, factor: 2}", 14e9),
        ("hours: {column: x, unit: minutes}", 7 / 60),
        ("imagenet/top1: {column: x, unit: '%'}", 0.07),
        ("imagenet/top1: {column: x, unit: fraction}", 7.0),
    ],
)
def test_units(entry: str, value: float, tmp_path: Path) -> None:
    frame = study(tmp_path, "r,x\na,7\n", f"run: r\n{entry}\n").checkpoints
    assert frame[entry.split(":")[0]].tolist() == pytest.approx([value])


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ("", "must map columns"),
        ("[a]", "must map columns"),
        ("a: [", "is not YAML"),
        ("run: nobody", r"has no column 'nobody', which .* names for run; its columns: name, arch"),
        ('"{nobody}/x": acc', "has no column 'nobody'"),
        ("run: 3", "give the name of a column"),
        ("run: {colum: name}", "give the name of a column"),
        ("run: {column: name, value: 1}", "or a value alone"),
        ("run: {unit: millions}", "give a column"),
        ("samples_seen: {column: gflops, unit: M}", "the unit 'M' is unknown; use thousands, millions"),
        ("gmac_per_pair: {column: gflops, unit: flops}", "use MAC, MMAC, GMAC"),
        ("hours: {column: hours, factor: -1}", "is not a positive number"),
        ("hours: {column: hours, factor: ten}", "is not a positive number"),
        ("samples_seen: {value: 3 billion}", "'3 billion' is not a number"),
        ("batch: {value: [1, 2]}", r"\[1, 2\] is not a number"),
        ("diverged: {value: perhaps}", "'perhaps' is neither true nor false"),
        ("family: {value: [x]}", r"\['x'\] is neither a text nor a number"),
        (
            '"{set}/top1": acc\n"{arch}/top1": acc\n"{set}/top1 ": acc\nin1k/top1: acc',
            "give the column 'in1k/top1'",
        ),
    ],
)
def test_a_wrong_map_is_a_sentence(columns: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        study(tmp_path, columns=columns)


def test_one_value_for_all_rows_may_be_written_with_an_exponent(tmp_path: Path) -> None:
    columns = (
        "run: name\nsamples_seen: {value: 3e10}\ngmac_per_pair: n\nmodel: {value: 16}\npatch: {value: 16}\n"
    )
    (row,) = study(tmp_path, "name,n\na,2\n", columns).checkpoints.to_dict("records")
    assert (row["samples_seen"], row["train_flop"]) == (3e10, 6 * 2e9 * 3e10)
    assert (row["model"], row["patch"]) == ("16", 16)


def test_rows_that_end_with_a_comma_do_not_shift_the_columns(tmp_path: Path) -> None:
    columns = "run: name\nsamples_seen: n\nval_loss: loss\n"
    frame = study(tmp_path, "name,n,loss\na,2,3.5,\nb,4,2.5,\n", columns).checkpoints
    assert frame[["run", "samples_seen", "val_loss"]].values.tolist() == [["a", 2, 3.5], ["b", 4, 2.5]]
    with pytest.raises(
        UserError, match=r"study.csv is not a CSV table: its rows have more cells than its head"
    ):
        study(tmp_path, "name,n,loss\na,2,3.5,7\nb,4,2.5,7\n", columns)


def test_runs_whose_names_are_digits_stay_apart(tmp_path: Path) -> None:
    found = study(tmp_path, "name,n\n001,2\n1,3\n,4\n", "run: name\nsamples_seen: n\n")
    assert found.runs["run"].tolist() == ["001", "1"]


def test_every_way_to_say_that_a_run_diverged_is_understood(tmp_path: Path) -> None:
    table = "name,n,bad\na,1,1\nb,1,True\nc,1,no\nd,1,maybe\ne,1,\n"
    found = study(tmp_path, table, "run: name\nsamples_seen: n\ndiverged: bad\n")
    assert found.checkpoints["diverged"].tolist()[:3] == [True, True, False]
    assert found.checkpoints["diverged"].isna().tolist() == [False, False, False, True, True]
    assert "1 values of 'bad' are neither true nor false and are left empty, the first in row 4: 'maybe'" in (
        notices_of(found)
    )


def test_rows_without_the_name_of_a_metric_are_named(tmp_path: Path) -> None:
    found = study(tmp_path, TABLE + "c,B/8,30,9,,45,3\n")
    assert [name for name in found.checkpoints.columns if "top1" in name] == ["in1k/top1", "coco/top1"]
    assert found.runs["run"].tolist() == ["a", "b"]
    assert "1 rows have no set and are left out" in notices_of(found)


def test_a_table_without_a_usable_row_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no row that can be used \(2 rows have no run"):
        study(tmp_path, "name,n\n,1\n,2\n", "run: name\nsamples_seen: n\n")


def test_results_on_many_sets_are_one_row(tmp_path: Path) -> None:
    rows = "".join(f"a,x,1,1,set{number},50,1\n" for number in range(150))
    found = study(tmp_path, TABLE.splitlines()[0] + "\n" + rows)
    assert len(found.checkpoints) == 1
    assert found.checkpoints.filter(like="/top1").shape[1] == 150


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has 2 columns called 'loss'; rename all but one"):
        study(tmp_path, "name,loss,loss\na,1,2\n", "run: name\nval_loss: loss\n")


def test_what_is_missing_or_no_number_is_named(tmp_path: Path) -> None:
    table = "name,n,loss\na,1,2.0\nb,,1.5\nc,many,1.2\n,4,1.0\n"
    found = study(tmp_path, table, "run: name\nsamples_seen: n\nval_loss: loss\n")
    assert found.checkpoints["val_loss"].tolist() == [2.0, 1.5, 1.2]
    assert found.checkpoints["samples_seen"].isna().tolist() == [False, True, True]
    text = notices_of(found)
    assert "1 values of 'n' are no numbers and are left empty, the first in row 3: 'many'" in text
    assert "1 rows have no run and are left out" in text
    assert "2 of 3 rows have no samples_seen" in text


def test_repeated_rows_are_named(tmp_path: Path) -> None:
    table = "name,n,loss\na,1,2.0\na,1,2.0\na,2,1.9\nb,1,1.5\nb,1,1.4\n"
    found = study(tmp_path, table, "run: name\nsamples_seen: n\nval_loss: loss\n")
    assert found.checkpoints["val_loss"].tolist() == [2.0, 1.9, 1.5, 1.4]
    assert "1 rows equal another one in every mapped column" in notices_of(found)
    assert "1 rows have the run, samples_seen of another row with other values, and are kept" in notices_of(
        found
    )
    assert "the first is of run 'b'" in notices_of(found)
    assert found.runs["val_loss"].tolist() == [1.9, 1.4]
    backwards = study(
        tmp_path, "name,n,loss\na,2,1.9\nb,1,1.5\na,1,2.0\n", "run: name\nsamples_seen: n\nval_loss: loss\n"
    )
    assert backwards.runs["val_loss"].tolist() == [1.9, 1.5]
    again = study(tmp_path, TABLE + "b,B/16,20,8,coco,45,2\n")
    assert again.checkpoints["coco/top1"].tolist() == [0.3, 0.45]
    assert "1 results are there more than once; the last one is used" in notices_of(again)


def test_rows_without_a_column_for_runs_are_runs(tmp_path: Path) -> None:
    found = study(
        tmp_path, "n,loss,kind\n1,2.0,x\n2,1.5,y\n", "samples_seen: n\nval_loss: loss\nfamily: kind\n"
    )
    assert found.checkpoints["run"].tolist() == ["row 1", "row 2"]
    assert found.checkpoints["family"].tolist() == ["x", "y"]
    assert "every row is taken as a run of its own" in notices_of(found)


def command(*arguments: str) -> None:
    try:
        main(arguments)
    except SystemExit as ended:
        assert ended.code in (0, None)  # noqa: PT017 - typer ends every command so


def test_a_study_and_own_runs_are_one_table(
    tmp_path: Path, write_ladder: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    study(tmp_path)
    ladder = write_ladder(kinds=("linear",), widths=(64, 96), epochs=1)
    options = ["--csv", str(tmp_path / "study.csv"), "--columns", str(tmp_path / "map.yaml")]
    command("collect", str(ladder), *options, "-o", str(tmp_path / "all.csv"))
    frame = load(tmp_path / "all.csv").checkpoints
    assert frame["run"].tolist() == ["linear-64", "linear-96", "a", "b"]
    assert frame["attention"].tolist() == ["linear", "linear", "softmax", "softmax"]
    assert frame["in1k/top1"].tolist()[2:] == [0.5, 0.6]
    assert "4 checkpoints of 4 runs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Give run folders, or a table"),
        (["--csv", "x.csv"], "--csv and --columns go together"),
        (["--csv", "absent.csv", "--columns", "absent.yaml"], "Cannot read absent.yaml"),
        (
            ["--csv", "x.csv", "--columns", "x.yaml", "-o", "./x.csv"],
            "x.csv is an input; give --output another",
        ),
    ],
)
def test_half_of_a_study_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["collect", *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


CHERTI = """
run: name
model: arch
attention: {value: softmax}
samples_seen: samples_seen
gmac_per_pair: gmacs
train_flop: {column: gmacs_total, unit: forward GMAC}
upstream_dataset: upstream_dataset
"{downstream_dataset}/error": err1
"""


@pytest.mark.parametrize("task", ["imagenet1k", "mscoco_captions", "flickr30k", "imagenet_robustness"])
def test_the_published_exponents_come_out_of_the_published_table(
    task: str, scaling_data: Path, expected: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "map.yaml").write_text(CHERTI, encoding="utf-8")
    table = str(tmp_path / "table.csv")
    command("collect", "--csv", str(scaling_data / "cherti2022_errors.csv"),
            "--columns", str(tmp_path / "map.yaml"), "-o", table)  # fmt: skip
    capsys.readouterr()
    command("fit", table, "--metric", f"{task}/error", "--points", "bins", "--least-squares", "--law", "power",
            "--where", "upstream_dataset!=CLIP-WIT", "--draws", "100", "--json")  # fmt: skip
    (fit,) = json.loads(capsys.readouterr().out)["fits"]
    alpha, beta = expected["cherti2022"]["fits"][task]["openclip_binned5"]
    assert fit["parameters"]["a"] == pytest.approx(alpha, abs=2e-6)
    assert fit["parameters"]["b"] * 6e9**alpha == pytest.approx(beta, rel=1e-4)
