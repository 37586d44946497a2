"""What a ladder is said to cost, against arithmetic by hand."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from openclip_linattn.cli import app
from openclip_linattn.errors import UserError
from openclip_linattn.ladder.budget import Throughput, estimate
from openclip_linattn.ladder.measure import measured
from openclip_linattn.ladder.plan import read_ladder

SMALL, LARGE = 0.00307712e9, 0.011245568e9  # multiply-adds of a pair, ViT-T32-8-linear and ViT-T64-8-linear
TRAINING = {"batch": 32, "learning_rate": 1e-3, "warmup": 2, "epochs": 2, "precision": "fp32"}


def linear(write_plan, **sections):
    return write_plan(attentions="linear", **{"budget": {"tflops": 0.01}, **sections})


def test_flop_and_hours_are_those_of_arithmetic_by_hand(write_plan, tmp_path):
    found = estimate(
        read_ladder(linear(write_plan, samples=3_200_000), tmp_path), Throughput(0.01, "assumed"), 1
    )
    large, small = (3 * 2 * macs * 3_200_000 for macs in (LARGE, SMALL))
    assert [row["train_flop"] for row in found.rows()] == pytest.approx([large, small])
    assert [row["hours"] for row in found.rows()] == pytest.approx([large / 1e10 / 3600, small / 1e10 / 3600])
    assert found.flop == pytest.approx(large + small)
    assert found.wall_hours == pytest.approx((large + small) / 1e10 / 3600)
    assert found.sentences == [
        "2 runs, 2.75e+14 FLOP, about 7.64 CPU-hours: 7.64 hours, 1 side by side",
        "FLOP = 3 x 2 x multiply-adds of a forward pass x samples; 0.01 TFLOP/s of each core (assumed)",
    ]


def test_runs_side_by_side_end_with_the_longest_queue(write_plan, tmp_path):
    ladder = read_ladder(linear(write_plan, samples=3_200_000, seeds=[0, 1, 2]), tmp_path)
    large, small = (3 * 2 * macs * 3_200_000 / 1e10 / 3600 for macs in (LARGE, SMALL))
    wall = {jobs: estimate(ladder, Throughput(0.01, ""), jobs).wall_hours for jobs in (1, 2, 3, 6)}
    assert wall == pytest.approx({
        1: 3 * (large + small), 2: 2 * large, 3: large + small, 6: large
    })  # fmt: skip


def test_cards_divide_the_hours_of_a_run_and_count_as_gpu_hours(write_plan, tmp_path):
    executor = {"slurm": {"nodes": 2, "gpus_per_node": 4}}
    found = estimate(read_ladder(linear(write_plan, executor=executor), tmp_path), Throughput(1, ""), 1)
    rows = found.rows()
    assert {row["devices"] for row in rows} == {8}
    assert [row["hours"] for row in rows] == pytest.approx([row["device_hours"] / 8 for row in rows])
    assert found.wall_hours == pytest.approx(rows[0]["hours"])
    assert "GPU-hours" in found.sentences[0]
    assert "if all run at once" in found.sentences[0]


def test_samples_are_rounded_as_openclip_rounds_them(write_plan, tmp_path):
    # An epoch of 250 samples is 4 batches of 64 for each of 1 worker, and 6 with 3 workers.
    training = {**TRAINING, "batch": 64, "workers": 3}
    ladder = read_ladder(linear(write_plan, samples=500, training=training), tmp_path)
    assert {rung.samples for rung in ladder.rungs} == {2 * 6 * 64}


def test_a_ladder_above_its_limit_does_not_start(write_plan, tmp_path):
    for limit, fits in ((8, True), (7, False)):
        budget = {"tflops": 0.01, "max_cpu_hours": limit}
        path = linear(write_plan, samples=3_200_000, budget=budget)
        found = estimate(read_ladder(path, tmp_path), Throughput(0.01, ""), 1)
        if fits:
            found.check()
        else:
            with pytest.raises(UserError, match=r"about 7.639 CPU-hours, more than budget.max_cpu_hours, 7"):
                found.check()
    path = linear(write_plan, budget={"tflops": 1, "max_gpu_hours": 1})
    with pytest.raises(
        UserError, match=r"budget.max_gpu_hours: the runs are trained on CPUs; give max_cpu_hours"
    ):
        estimate(read_ladder(path, tmp_path), Throughput(1, ""), 1).check()


def test_a_dry_run_prints_costs_and_commands_and_leaves_nothing(write_plan, tmp_path):
    path = linear(write_plan, samples=3_200_000)
    command = ["ladder", str(path), "--out", str(tmp_path / "out"), "--dry-run"]
    shown = CliRunner().invoke(app, command)
    assert shown.exit_code == 0
    assert "2.16e+14" in shown.stdout
    assert "2 runs, 2.75e+14 FLOP, about 7.64 CPU-hours" in shown.stdout
    commands = [line for line in shown.stdout.splitlines() if "-m openclip_linattn.train --model" in line]
    assert len(commands) == 2
    rows = json.loads(CliRunner().invoke(app, [*command, "--json", "--only", "*T32*"]).stdout)
    assert [row["model"] for row in rows["runs"]] == ["ViT-T32-8-linear"]
    assert rows["flop"] == pytest.approx(3 * 2 * SMALL * 3_200_000)
    assert not (tmp_path / "out").exists()


def test_a_dry_run_of_a_plan_without_throughput_says_how_to_get_hours(write_plan, tmp_path):
    shown = CliRunner().invoke(
        app, ["ladder", str(linear(write_plan, budget=None)), "--out", str(tmp_path), "--dry-run"]
    )
    assert "hours are not known: give budget.tflops, or budget.measure: true" in shown.stdout


def test_the_throughput_is_measured_once_on_the_smallest_run(write_plan, tmp_path, monkeypatch):
    ladder = read_ladder(linear(write_plan, budget={"measure": True}), tmp_path / "out")
    started = []

    def train(command: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        started.append(command)
        folder = tmp_path / "out" / "measure" / "ViT-T32-8-linear-256-lr1e-3-seed0"
        (folder / "checkpoints").mkdir(parents=True)
        record = {"status": "finished", "command": " ".join(["python", *command[1:]])}
        (folder / "run.json").write_text(json.dumps(record))
        rates = [50, 90, 400, 200, 300, 250]
        (folder / "out.log").write_text(
            "".join(f"Train Epoch: 0 [{n}] Batch (t): 0.1, {n}.5/s, 1/s/gpu LR: 0\n" for n in rates)
        )
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr("subprocess.run", train)
    from rich.console import Console

    console = Console(stderr=True)
    first, second = measured(ladder, console), measured(ladder, console)
    assert first == second
    assert first.tflops == pytest.approx(250.5 * 3 * 2 * SMALL / 1e12)
    assert first.basis == "measured: ViT-T32-8-linear trains on 250 samples/s"
    (command,) = started
    assert command[-2:] == ["--log-every-n-steps", "1"]
    assert command[command.index("--train-num-samples") + 1] == str(16 * 32)
    assert "--val-data" not in command


def test_steps_that_fail_are_told_with_their_reason(write_plan, tmp_path, monkeypatch):
    stand_in = tmp_path / "python"
    stand_in.write_text("#!/bin/sh\necho error: no shards\nexit 2\n")
    stand_in.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stand_in))
    path = linear(write_plan, budget={"measure": True})
    shown = CliRunner().invoke(app, ["ladder", str(path), "--out", str(tmp_path / "out"), "--dry-run"])
    assert isinstance(shown.exception, UserError)
    assert "the throughput failed: exit status 2; error: no shards (" in str(shown.exception)


def test_a_run_s_threads_are_its_devices_on_a_cpu(write_plan, tmp_path):
    ladder = read_ladder(linear(write_plan, executor={"local": {"threads": 4}}), tmp_path)
    found = estimate(ladder, Throughput(0.01, ""), 1)
    assert {row["devices"] for row in found.rows()} == {4}
    assert ladder.runs[0].environment["OMP_NUM_THREADS"] == "4"
