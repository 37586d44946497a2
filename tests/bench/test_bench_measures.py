"""Clock, peak memory, energy and ceilings: what each number counts."""

import gc
import os
import subprocess
import sys

import pytest
import torch

from openclip_linattn.bench import ceilings, memory
from openclip_linattn.bench.ceilings import Ceilings, least_bytes, measure_ceilings, product_flops
from openclip_linattn.bench.energy import WINDOW, EnergyMeter, energy_meter
from openclip_linattn.bench.machine import file_stem, find_device, free_memory
from openclip_linattn.bench.timing import CpuClock, interleave
from openclip_linattn.errors import UserError

CPU = torch.device("cpu")
MIB = 1 << 20


class FakeTime:
    """Runs take the seconds that they name; the clock is the sum."""

    def __init__(self, monkeypatch):
        self.now, self.order = 0.0, []
        monkeypatch.setattr("openclip_linattn.bench.timing.time.perf_counter", lambda: self.now)

    def run(self, name, seconds):
        def once():
            assert not gc.isenabled()
            self.order.append(name)
            self.now += seconds

        return once


def test_every_round_runs_each_candidate_once_and_rotates_the_order(monkeypatch):
    fake = FakeTime(monkeypatch)
    times = interleave({name: fake.run(name, 1.0) for name in "abc"}, CpuClock(), rounds=4, seconds=100)
    assert "".join(fake.order) == "abc" + "bca" + "cab" + "abc"
    assert times == {name: [1.0] * 4 for name in "abc"}
    assert gc.isenabled()


def test_a_slow_candidate_leaves_after_its_share(monkeypatch):
    fake = FakeTime(monkeypatch)
    runs = {"slow": fake.run("slow", 4.0), "quick": fake.run("quick", 0.5), "huge": fake.run("huge", 50.0)}
    times = interleave(runs, CpuClock(), rounds=10, seconds=30, expected={"huge": 50.0})
    assert {name: len(each) for name, each in times.items()} == {"slow": 2, "quick": 10, "huge": 0}


@torch.library.custom_op("openclip_linattn_test::hungry", mutates_args=())
def hungry(x: torch.Tensor) -> torch.Tensor:
    y = x.new_empty(3 * x.numel())
    del y
    return x.clone()


def test_peak_memory_is_exact_and_sees_inside_custom_operators():
    x = torch.zeros(MIB // 4)
    assert memory.with_peak(lambda: x + x, CPU)[1] == MIB
    assert memory.with_peak(lambda: (x + x) + x, CPU)[1] == 2 * MIB
    result, peak = memory.with_peak(lambda: hungry(x), CPU)
    assert peak == 3 * MIB
    assert torch.equal(result, x)


RESIDENT = """
import torch
from openclip_linattn.bench.checks import run_training
from openclip_linattn.bench.contestants import contestants
from openclip_linattn.bench.inputs import Shape, make_inputs
from openclip_linattn.bench.memory import with_peak

def resident(field):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field)) * 1024

torch.set_num_threads(1)
shape = Shape(1, 6, 64, torch.float32, torch.device("cpu"))
for entrant in contestants(["linear", "normlinear", "infsa"], "packed", "cpu"):
    tokens = 1024 if entrant.quadratic else 16384
    inputs = make_inputs(shape, tokens, entrant.layout)
    run_training(entrant.function, make_inputs(shape, 64, entrant.layout))
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = resident("VmRSS")
    run_training(entrant.function, inputs)
    rise = resident("VmHWM") - before
    print(entrant.name, rise, with_peak(lambda: run_training(entrant.function, inputs), shape.device)[1])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_agrees_with_what_the_system_sees(tmp_path):
    script = tmp_path / "resident.py"
    script.write_text(RESIDENT)
    result = subprocess.run(
        [sys.executable, str(script)],
        # Tensors go back to the system when they are freed, instead of to the heap.
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if "clear_refs" in result.stderr:
        pytest.skip("this system does not reset the high-water mark")
    assert result.returncode == 0, result.stderr
    lines = [line.split() for line in result.stdout.splitlines()]
    assert [name for name, *_ in lines] == [
        "softmax",
        "bare",
        "bare-contiguous",
        "linear",
        "normlinear",
        "infsa",
    ]
    for name, rise, peak in lines:
        assert int(rise) == pytest.approx(int(peak), rel=0.1, abs=6 * MIB), name


@pytest.mark.parametrize("text", ["CUDA out of memory. Tried", "DefaultCPUAllocator: can't allocate memory"])
def test_errors_of_full_memory_are_told_from_others(text):
    assert memory.out_of_memory(RuntimeError(text))
    assert not memory.out_of_memory(RuntimeError("shape mismatch"))


def test_free_memory_is_known_and_smaller_in_a_container(monkeypatch, tmp_path):
    free = free_memory(CPU)
    assert free is not None
    assert free > MIB
    monkeypatch.setattr("openclip_linattn.bench.machine._available_to_group", lambda: 12345)
    assert free_memory(CPU) == 12345


def test_energy_is_what_the_counter_rose_by_divided_by_the_runs():
    """A board of 200 W whose counter steps every 50 ms, and runs of 10 ms: 2 J each."""
    now = [0.0]

    def run():
        now[0] += 0.01

    meter = EnergyMeter(lambda: int(round(now[0] / 0.05, 6)) * 10_000, lambda: None, lambda: now[0])
    assert meter(run, 0.01) == pytest.approx(2.0)
    assert now[0] == pytest.approx(WINDOW, abs=0.011)
    # Two steps are waited for beyond a window that is shorter.
    assert meter(run, 0.01, 0.03) == pytest.approx(2.0)
    assert now[0] == pytest.approx(WINDOW + 0.1, abs=0.021)


def test_short_runs_are_launched_together_before_the_counter_is_read():
    now, reads, runs = [0.0], [], []

    def run():
        now[0] += 0.001
        runs.append(now[0])

    def count():
        reads.append(len(runs))
        return int(round(now[0] / 0.05, 6)) * 10_000

    assert EnergyMeter(count, lambda: None, lambda: now[0])(run, 0.001) == pytest.approx(0.2)
    assert reads == [10 * number for number in range(len(reads))]


def test_energy_of_a_counter_that_stands_still_is_not_measured():
    now = [0.0]

    def run():
        now[0] += 0.5

    assert EnergyMeter(lambda: 7, lambda: None, lambda: now[0])(run, 0.5) is None
    assert energy_meter(CPU) is None


def test_the_floor_is_the_slower_of_bytes_and_products():
    limits = Ceilings(copy_bytes_per_s=100.0, matmul_flops_per_s=1000.0, buffer_bytes=1, matrix_size=1)
    assert limits.floor_seconds(300, 1000) == 3.0
    assert limits.floor_seconds(100, 5000) == 5.0
    assert [least_bytes("linear", p, 10) for p in ("forward", "forward+backward")] == [40, 110]
    assert [least_bytes("lininfsa", p, 10) for p in ("forward", "forward+backward")] == [30, 100]
    sizes = {"batch": 2, "heads": 3, "tokens": 10, "head_width": 4}
    assert product_flops("linear", "forward", **sizes) == 2 * 2 * 3 * (2 * 10 * 4 * 4)
    assert product_flops("softmax", "forward+backward", **sizes) == 3 * 2 * 2 * 3 * (2 * 10 * 10 * 4)
    assert product_flops("unknown", "forward", **sizes) == 0


def test_ceilings_are_the_best_of_their_repeats(monkeypatch):
    seconds = iter([9.0, 2.0, 4.0, 8.0, 0.5, 1.0])
    monkeypatch.setattr(ceilings, "_REPEATS", 3)
    limits = measure_ceilings(CPU, torch.float32, lambda run: next(seconds), tiny=True)
    assert limits.copy_bytes_per_s == 2 * limits.buffer_bytes / 2.0
    assert limits.matmul_flops_per_s == 2 * limits.matrix_size**3 / 0.5


def test_a_device_of_cuda_has_its_index_and_becomes_the_current_one(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    names = ("auto", "cuda", "cuda:1")
    assert [find_device(name) for name in names] == [torch.device("cuda", index) for index in (0, 0, 1)]
    assert chosen == [torch.device("cuda", index) for index in (0, 0, 1)]
    with pytest.raises(UserError, match="finds 2 CUDA devices"):
        find_device("cuda:2")


def test_files_are_named_by_device_and_version(monkeypatch):
    monkeypatch.setattr("openclip_linattn.bench.machine.device_name", lambda device: "NVIDIA H200, (rev. 2)")
    monkeypatch.setattr(torch, "__version__", "2.14.1+cu130")
    assert file_stem("ops", CPU) == "ops-nvidia-h200-rev-2-torch2.14.1"
