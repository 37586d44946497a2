"""`openclip-linattn bench`: whole runs at smoke size, broken operators, and wrong input."""

import csv
import json

import pytest
import torch

from openclip_linattn.bench.contestants import contestants
from openclip_linattn.ops import OPERATORS

STEM = "*-torch" + torch.__version__.split("+")[0]


def load(folder, benchmark):
    (path,) = folder.glob(f"{benchmark}-{STEM}.json")
    return json.loads(path.read_text())


def ratios(report):
    return {
        (row["operator"], row["pass"], row["tokens"]): (
            row["softmax_speedup"],
            row["bare_ratio"],
            row["floor_share"],
        )
        for row in report["rows"]
    }


def test_ops_tiny(command, tmp_path):
    result = command("bench", "ops", "--tiny", "--device", "cpu", "--out", tmp_path)
    assert result.status == 0, result.err
    assert {path.suffix for path in tmp_path.glob(f"ops-{STEM}.*")} == {".csv", ".json", ".png", ".svg"}
    report = load(tmp_path, "ops")
    names = ["softmax", "bare", "bare-contiguous", "linear", "normlinear"]
    expected = [(p, n, name) for n in (64, 197) for p in ("forward", "forward+backward") for name in names]
    rows = {(row["pass"], row["tokens"], row["operator"]): row for row in report["rows"]}
    assert [key for key in rows if key in expected] == expected
    for (direction, tokens, _), row in rows.items():
        assert row["status"] == "measured"
        assert row["check"] == "passed"
        assert len(row["times"]) == row["rounds"] == 3
        assert row["seconds_q1"] <= row["seconds"] <= row["seconds_q3"]
        assert row["tokens_per_s"] == pytest.approx(tokens / row["seconds"])
        softmax = rows[direction, tokens, "softmax"]["seconds"]
        bare = min(rows[direction, tokens, name]["seconds"] for name in ("bare", "bare-contiguous"))
        assert row["softmax_speedup"] == pytest.approx(softmax / row["seconds"])
        assert row["bare_ratio"] == pytest.approx(row["seconds"] / bare)
        assert row["floor_share"] == pytest.approx(row["floor_seconds"] / row["seconds"])
        assert row["least_bytes"] == (4 if direction == "forward" else 11) * 6 * tokens * 64 * 4
    # The output and three gradients are T each, and the bare products need little more.
    assert 4 <= rows["forward+backward", 197, "bare"]["peak_T"] < 4.5
    assert report["environment"]["threads"] == 1
    assert report["environment"]["command"].startswith("openclip-linattn bench ops --tiny")
    assert report["methods"]["energy"] == "not measured"
    assert {check["what"] for check in report["checks"]} == {"o", "dq", "dk", "dv", "o rows", "dq rows"}
    with next(tmp_path.glob("ops-*.csv")).open() as file:
        assert [float(row["seconds"]) for row in csv.DictReader(file)] == [
            row["seconds"] for row in report["rows"]
        ]
    for text in ("forward+backward", "bare-contiguous", "softmax/time", "floor/time", "energy: not measured"):
        assert text in result.out


def wrong_at(length, *, gradient=False):
    """Linear attention that is wrong by a hundredth beyond a length, or only in its gradient."""
    right = OPERATORS["linear"]

    def operator(q, k, v, **options):
        o = right(q, k, v, **options)
        if q.shape[-2] <= length:
            return o
        return o + 0.01 * (o - o.detach()) if gradient else 1.01 * o

    return operator


def raising(q, k, v, **_):
    raise ValueError("no kernel for this")


@pytest.mark.parametrize(
    ("operator", "part"),
    [
        pytest.param(wrong_at(0), "o at 1 tokens", id="output"),
        pytest.param(wrong_at(0, gradient=True), "dv at 1 tokens", id="gradient"),
        pytest.param(wrong_at(100), "o rows at 197 tokens", id="long-output"),
        pytest.param(wrong_at(100, gradient=True), "dq rows at 197 tokens", id="long-gradient"),
        pytest.param(raising, "ValueError: no kernel for this", id="raises"),
    ],
)
def test_no_ratio_is_printed_for_an_operator_that_is_wrong(operator, part, monkeypatch, command, tmp_path):
    monkeypatch.setitem(OPERATORS, "linear", operator)
    result = command(
        "bench", "ops", "--tiny", "--device", "cpu", "--operator", "linear", "--tokens", 197, "--rounds", 1,
        "--pass", "forward+backward", "--out", tmp_path,
    )  # fmt: skip
    assert result.status == 1
    assert result.err.count("error: ") == 1
    assert "linear: the check against the reference failed" in result.err
    assert part in result.err
    for (name, _, _), values in ratios(load(tmp_path, "ops")).items():
        if name == "linear":
            assert values == (None, None, None)
        else:
            assert None not in values
    lines = [line.split() for line in result.out.splitlines()]
    for line in (line for line in lines if line[1:2] == ["linear"]):
        assert " ".join(line).count("check failed") == 3
        assert not any(cell.endswith("x") for cell in line)


def test_a_wrong_softmax_takes_every_speed_up_with_it(monkeypatch, command, tmp_path):
    stock = contestants(["linear"], "packed", "cpu")[0].function
    monkeypatch.setattr(
        "torch.nn.functional.scaled_dot_product_attention", lambda q, k, v: 1.01 * stock(q, k, v)
    )
    result = command(
        "bench", "ops", "--tiny", "--device", "cpu", "--rounds", 1, "--pass", "forward", "--tokens", 64,
        "--out", tmp_path,
    )  # fmt: skip
    assert result.status == 1
    assert "softmax: the check" in result.err
    for (name, _, _), (speedup, bare, _) in ratios(load(tmp_path, "ops")).items():
        assert speedup is None
        assert (bare is None) == (name == "softmax")


def test_json_and_a_contiguous_layout(command, tmp_path):
    result = command(
        "bench", "ops", "--tiny", "--device", "cpu", "--json", "--layout", "contiguous", "--dtype", "bf16",
        "--tokens", "70", "--pass", "forward", "--operator", "lininfsa", "--batch", 2, "--heads", 3, "--head-width", 16,
        "--out", tmp_path,
    )  # fmt: skip
    assert result.status == 0, result.err
    report = json.loads(result.out)
    assert [row["operator"] for row in report["rows"]] == ["softmax", "bare", "lininfsa"]
    assert {row["layout"] for row in report["rows"]} == {"contiguous"}
    assert report["rows"][-1]["least_bytes"] == 3 * 2 * 3 * 70 * 16 * 2
    assert report["protocol"]["dtype"] == "bf16"
    assert not any(finding["what"] == "dq rows" for finding in report["checks"])


def test_towers_tiny(command, tmp_path):
    result = command("bench", "towers", "--tiny", "--device", "cpu", "--out", tmp_path)
    assert result.status == 0, result.err
    report = load(tmp_path, "towers")
    rows = {(row["model"], row["pass"], row["pixels"]): row for row in report["rows"]}
    models = ["ViT-T32-8-softmax", "ViT-T32-8-linear", "ViT-T32-8-normlinear"]
    assert list(dict.fromkeys(name for name, _, _ in rows)) == models
    assert {pixels for _, _, pixels in rows} == {48, 64}
    for (_, direction, pixels), row in rows.items():
        twin = rows["ViT-T32-8-softmax", direction, pixels]
        assert row["check"] == "passed"
        assert row["tokens"] == (pixels // 8) ** 2 + 1
        assert row["images_per_s"] == pytest.approx(1 / row["seconds"])
        assert row["softmax_speedup"] == pytest.approx(twin["seconds"] / row["seconds"])
        assert row["flop_ratio"] == pytest.approx(twin["forward_gflop"] / row["forward_gflop"])
        assert row["peak_bytes"] > 0
    assert rows["ViT-T32-8-linear", "forward", 64]["flop_ratio"] > 1.1
    assert rows["ViT-T32-8-linear", "forward", 64]["floor_seconds"] * report["ceilings"][
        "matmul_flops_per_s"
    ] == pytest.approx(1e9 * rows["ViT-T32-8-linear", "forward", 64]["forward_gflop"])
    for text in ("ViT-T32-8-normlinear", "FLOP ratio", "images/s"):
        assert text in result.out


def test_no_ratio_is_printed_for_a_tower_that_is_wrong(monkeypatch, command, tmp_path):
    monkeypatch.setitem(OPERATORS, "linear", wrong_at(0))
    result = command(
        "bench", "towers", "--tiny", "--device", "cpu", "--sizes", 48, "--rounds", 1, "--out", tmp_path
    )
    assert result.status == 1
    assert "ViT-T32-8-linear: the check against the reference failed" in result.err
    speedups = {row["model"]: row["softmax_speedup"] for row in load(tmp_path, "towers")["rows"]}
    assert speedups["ViT-T32-8-linear"] is None
    assert speedups["ViT-T32-8-normlinear"] is not None
    assert "check failed" in result.out


WRONG = [
    ("ops", ["--operator", "nothing"], "unknown operator 'nothing'"),
    ("ops", ["--tokens", "64,many"], "--tokens must be whole numbers"),
    ("ops", ["--tokens", "-5"], "--tokens must be at least 1, got -5"),
    ("ops", ["--batch", "0"], "--batch must be at least 1, got 0"),
    ("ops", ["--heads", "-1"], "--heads must be at least 1"),
    ("ops", ["--head-width", "0"], "--head-width must be at least 1"),
    ("ops", ["--dtype", "int8"], "dtype must be one of fp32, bf16"),
    ("ops", ["--layout", "sparse"], "--layout must be packed or contiguous"),
    ("ops", ["--pass", "sideways"], "pass must be forward or forward+backward"),
    ("ops", ["--rounds", "0"], "--rounds must be at least 1"),
    ("ops", ["--seconds", "0"], "--seconds must be a number above 0"),
    ("ops", ["--run-limit", "nan"], "--run-limit must be a number above 0"),
    ("ops", ["--threads", "0"], "--threads must be at least 1"),
    ("ops", ["--quadratic-limit", "0"], "--quadratic-limit must be at least 1"),
    ("ops", ["--device", "cuda"], "PyTorch finds 0 CUDA devices"),
    ("ops", ["--device", "abacus"], "--device must be auto, cpu, cuda"),
    ("ops", ["--device", "meta"], "--device must be auto, cpu, cuda"),
    ("towers", ["--model", "ViT-T32-8-nothing"], "unknown model"),
    ("towers", ["--model", "ViT-B-32"], "OpenCLIP's own model"),
    ("towers", ["--sizes", "224,100"], "--sizes: 100 pixels do not divide into patches of 8"),
    ("towers", ["--sizes", "-8"], "--sizes: -8 pixels"),
    ("towers", ["--batch", "0"], "--batch must be at least 1"),
    ("towers", ["--model", "ViT-T32-8-linear", "--model", "ViT-S-16-linear"], "patches of 8 and 16 pixels"),
]


@pytest.mark.parametrize(("benchmark", "args", "sentence"), WRONG, ids=lambda value: str(value)[:40])
def test_wrong_input_ends_with_its_sentence(benchmark, args, sentence, monkeypatch, command, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    result = command("bench", benchmark, "--tiny", *args, "--out", tmp_path / "none")
    assert result.status == 2
    assert sentence in result.err
    assert not (tmp_path / "none").exists()


def test_an_operator_without_a_reference_is_refused(monkeypatch, command, tmp_path):
    monkeypatch.setitem(OPERATORS, "mine", OPERATORS["linear"])
    result = command("bench", "ops", "--tiny", "--operator", "mine", "--out", tmp_path)
    assert result.status == 2
    assert "has no N x N formula" in result.err
