"""Measures the throughput of training by a few steps of a ladder's smallest run."""

import os
import re
import shutil
import statistics
import subprocess
from dataclasses import replace

from rich.console import Console

from openclip_linattn.errors import UserError
from openclip_linattn.ladder.budget import Throughput
from openclip_linattn.ladder.failures import last_line
from openclip_linattn.ladder.folders import check_settings, prepare
from openclip_linattn.ladder.machine import Machine
from openclip_linattn.ladder.places import Local
from openclip_linattn.ladder.plan import Ladder, Rung
from openclip_linattn.ladder.runs import Run

STEPS = 16  # the first half, in which caches fill and clocks settle, is not counted
MEASURE = "measure"  # folder below that of a ladder
_RATE = re.compile(r"Batch \(t\): \S+ ([\d.e+]+)/s")


def measured(ladder: Ladder, console: Console) -> Throughput:
    """The throughput of a card or a core; what was measured before in this ladder's folder is used again.

    Raises UserError where the steps fail.
    """
    place = ladder.spec.executor.place
    assert isinstance(place, Local)  # the schema sees to it
    rung = min(ladder.rungs, key=lambda rung: rung.flop)
    run = _short_run(ladder, rung)
    try:
        check_settings(run)
    except UserError:  # those of another plan
        shutil.rmtree(run.folder)
    if prepare(run) != "already done":
        with console.status(f"measuring {STEPS} steps of {run.model}"):
            _train(run, Machine(1, place.gpus))
    log = run.folder / "out.log"
    rates = [float(rate) for rate in _RATE.findall(log.read_text(errors="replace"))]
    if not rates:
        raise UserError(f"{log} does not tell how fast the steps were; give budget.tflops instead of measure")
    rate = statistics.median(rates[len(rates) // 2 :])
    devices = run.processes * (1 if ladder.gpus else run.threads)
    tflops = rate * rung.cost.train_flops(1) / devices / 1e12
    return Throughput(tflops, f"measured: {run.model} trains on {rate:,.0f} samples/s")


def _short_run(ladder: Ladder, rung: Rung) -> Run:
    recipe = rung.run.recipe
    short = replace(
        recipe,
        val_data=None,
        val_samples=None,
        epoch_samples=STEPS * recipe.batch_size,
        epochs=1,
        warmup_steps=min(recipe.warmup_steps, STEPS // 2),
        extra=(*recipe.extra, "--log-every-n-steps", "1"),
    )
    return replace(rung.run, recipe=short, logs=ladder.out / MEASURE)


def _train(run: Run, machine: Machine) -> None:
    run.logs.mkdir(parents=True, exist_ok=True)
    (slot,) = machine.slots(run.processes)
    with run.console_log.open("wb") as output:
        status = subprocess.run(
            run.command(),
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **run.environment, **slot.environment},
            check=False,
        ).returncode
    if status:
        raise UserError(
            f"the steps that measure the throughput failed: exit status {status}; {last_line(run.console_log)} "
            f"({run.console_log})"
        )
    shutil.rmtree(run.folder / "checkpoints")  # nothing goes on from them
