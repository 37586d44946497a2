"""Rows, table and picture of measurements that are made up: extrapolated, skipped and failed ones among them."""

import csv

import pytest
import torch

from openclip_linattn.bench.ceilings import Ceilings
from openclip_linattn.bench.checks import Finding
from openclip_linattn.bench.contestants import contestants
from openclip_linattn.bench.inputs import Shape
from openclip_linattn.bench.operator_rows import operator_rows
from openclip_linattn.bench.picture import figure
from openclip_linattn.bench.report import Report, write_report
from openclip_linattn.bench.sweep import Measurement
from openclip_linattn.bench.tables import print_report

SHAPE = Shape(2, 3, 8, torch.float32, torch.device("cpu"))
CEILINGS = {"copy_bytes_per_s": 1e9, "matmul_flops_per_s": 1e10, "buffer_bytes": 1, "matrix_size": 1}
ENVIRONMENT = {
    "device": "Abacus", "device_type": "cpu", "threads": 1, "torch": "2.0", "dtype": "fp32", "kernel": "torch",
}  # fmt: skip


def measurement(name, size, status="measured", times=(), peak=None, joules=None):
    return Measurement(name, size, "forward", status, list(times), peak, joules)


def report(findings=()):
    measurements = [
        measurement("softmax", 1024, times=[8.0, 9.0, 10.0], peak=1000),
        measurement("bare", 1024, times=[0.5, 0.5, 0.5]),
        measurement("bare-contiguous", 1024, times=[0.25, 0.25, 0.25]),
        measurement("linear", 1024, times=[1.0, 1.0, 1.0], peak=2 * SHAPE.tensor_bytes(1024), joules=2.5),
        measurement("softmax", 4096, "extrapolated", times=[144.0]),
        measurement("bare", 4096, times=[2.0]),
        measurement("bare-contiguous", 4096, "skipped: would need 64 GiB"),
        measurement("linear", 4096, times=[4.0, 3.0]),
    ]
    rows = operator_rows(
        measurements, contestants(["linear"], "packed", "cpu"), SHAPE, Ceilings(**CEILINGS), findings
    )
    return Report(
        "ops", "ops-abacus-torch2.0", ENVIRONMENT, {"batch": 2}, {"time": "", "memory": "", "energy": "counter"},
        CEILINGS, list(findings), rows,
    )  # fmt: skip


def by_name(rows, column):
    return {(row["operator"], row["tokens"]): row[column] for row in rows}


def test_rows_of_measured_extrapolated_and_skipped_candidates():
    rows = report().rows
    assert by_name(rows, "softmax_speedup") == {
        ("softmax", 1024): 1.0, ("bare", 1024): 18.0, ("bare-contiguous", 1024): 36.0, ("linear", 1024): 9.0,
        ("softmax", 4096): None, ("bare", 4096): 72.0, ("bare-contiguous", 4096): None, ("linear", 4096): 144 / 3.5,
    }  # fmt: skip
    assert by_name(rows, "softmax_status")["linear", 1024] == "measured"
    assert by_name(rows, "softmax_status")["linear", 4096] == "extrapolated"
    # Against the faster layout of the bare products.
    assert by_name(rows, "bare_ratio")["linear", 1024] == 4.0
    assert by_name(rows, "bare_ratio")["linear", 4096] == 1.75
    assert by_name(rows, "rounds")["softmax", 4096] == 0
    assert by_name(rows, "seconds_q1")["softmax", 1024] == 8.5
    assert by_name(rows, "seconds_q1")["linear", 4096] is None  # two rounds have no quartiles
    assert by_name(rows, "peak_T")["linear", 1024] == 2.0
    floor = 4 * SHAPE.tensor_bytes(1024) / 1e9
    assert by_name(rows, "floor_share")["linear", 1024] == pytest.approx(floor)
    assert by_name(rows, "floor_share")["softmax", 4096] is None


def test_the_table_says_what_is_extrapolated_and_skipped(capsys):
    print_report(report())
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    cells = {tuple(line.split()[:2]): line for line in lines if line[:1].isdigit()}
    assert cells["1,024", "linear"].startswith("1,024 linear 1.00 s 0 %")
    assert "9.00x 4.00x" in cells["1,024", "linear"]
    assert "2.5 J" in cells["1,024", "linear"]
    assert "not measured" in cells["1,024", "bare"]
    assert "41.14x (extrapolated)" in cells["4,096", "linear"]
    assert cells["4,096", "softmax"].endswith("extrapolated")
    assert cells["4,096", "softmax"].count("x") == cells["4,096", "softmax"].count("softmax") + 1
    assert cells["4,096", "bare-contiguous"].endswith("skipped: would need 64 GiB")


def test_the_picture_has_the_floor_dashed_and_the_extrapolation_apart():
    panels = figure(report())
    top, bottom = panels.axes
    lines = {line.get_label(): line for line in top.lines}
    assert {"softmax", "softmax, extrapolated", "bare", "linear", "floor of linear attention"} <= lines.keys()
    assert list(lines["softmax"].get_xdata()) == [1024]
    assert list(lines["softmax, extrapolated"].get_xdata()) == [1024, 4096]
    assert list(lines["softmax, extrapolated"].get_ydata()) == [9.0, 144.0]
    assert lines["softmax, extrapolated"].get_linestyle() == "--"
    floor = lines["floor of linear attention"]
    assert floor.get_linestyle() == "--"
    assert list(floor.get_ydata()) == pytest.approx([4 * SHAPE.tensor_bytes(n) / 1e9 for n in (1024, 4096)])
    assert (
        {axes.get_xscale() for axes in panels.axes} == {axes.get_yscale() for axes in panels.axes} == {"log"}
    )
    ratios = {tuple(line.get_ydata()) for line in bottom.lines if line.get_linestyle() == "--"}
    assert (9.0, 144 / 3.5) in ratios


def test_a_failed_check_leaves_only_times():
    broken = report([Finding("linear", 77, "dk", 0.3, 1e-4)])
    assert broken.failures == [
        "linear: the check against the reference failed (dk at 77 tokens is off by 0.3, allowed 0.0001), so none of "
        "its ratios is shown"
    ]
    row = next(row for row in broken.rows if row["operator"] == "linear")
    assert row["check"] == "check failed"
    assert row["seconds"] == 1.0
    assert row["softmax_speedup"] is row["bare_ratio"] is row["floor_share"] is None
    assert not [line for line in figure(broken).axes[1].lines if 9.0 in list(line.get_ydata())]


def test_a_wrong_bare_product_is_no_bound():
    rows = report([Finding("bare-contiguous", 1, "o", 1.0, 1e-4)]).rows
    assert by_name(rows, "bare_ratio")["linear", 1024] == 2.0


def test_files_of_a_report(tmp_path):
    whole = report([Finding.raised("linear", 5, ValueError("x")), Finding("bare", 1, "o", float("inf"), 1.0)])
    csv_path, json_path = write_report(whole, tmp_path / "new")
    with csv_path.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["status"] for row in rows] == [row["status"] for row in whole.rows]
    assert "times" not in rows[0]
    text = json_path.read_text()
    for part in ('"times"', '"error": "inf"', '"problem": "ValueError: x"', '"passed": false'):
        assert part in text
