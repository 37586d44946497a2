"""What is run, what is skipped and in which words, and what is extrapolated."""

import pytest

from openclip_linattn.bench import sweep as sweep_module
from openclip_linattn.bench.effort import Effort
from openclip_linattn.bench.extrapolation import extrapolate
from openclip_linattn.bench.forecast import Forecast, with_scouts
from openclip_linattn.bench.sweep import Measurement, Sweep
from openclip_linattn.bench.words import bytes_text, count_text, seconds_text


@pytest.fixture
def sweep(monkeypatch):
    """Sweeps a workload of functions that return (seconds, bytes) instead of running."""
    monkeypatch.setattr(sweep_module, "with_peak", lambda run, device: (run(), run()[1]))

    def call(workload, sizes, *, free=10**12, rounds=2, seconds=1000.0, run_limit=100.0, first=1, meter=None):
        monkeypatch.setattr(sweep_module, "free_memory", lambda device: free)

        def clock(run):
            result = run()
            return (
                workload.functions[workload.ran[-1][0]](workload.ran[-1][1])[0]
                if result is None
                else result[0]
            )

        measured = Sweep(
            workload, ["forward"], Effort(rounds, seconds, run_limit), clock, meter, lambda text: None
        ).run(with_scouts(sizes, first=first, factor=4))
        return {(m.name, m.size): m for m in measured}

    return call


def test_candidates_too_slow_or_too_large_are_skipped_in_plain_words(fake_workload, sweep):
    workload = fake_workload(
        {
            "quick": lambda n: (1e-6 * n, 4 * n),
            "slow": lambda n: (1e-4 * n**2, n),
            "large": lambda n: (1e-6 * n, 64 * n**2),
        },
        quadratics=["slow"],
    )
    found = sweep(workload, [64, 256, 1024, 4096], free=200 * 2**20)
    assert [m.status for (name, _), m in found.items() if name == "quick"] == ["measured"] * 4
    assert found["quick", 4096].peak == 4 * 4096
    assert len(found["quick", 4096].times) == 2
    assert found["slow", 256].status == "measured"
    assert found["slow", 1024].status == "skipped: a run would take 105 s"
    assert found["large", 1024].status == "measured"
    assert found["large", 4096].status == "skipped: would need 1.0 GiB"
    assert not [entry for entry in workload.ran if entry[:2] in (("slow", 1024), ("large", 4096))]
    assert [name for name, size, _ in workload.inspected if size == 4096] == ["quick"]


def test_inputs_that_do_not_fit_are_never_made(fake_workload, sweep):
    workload = fake_workload({"quick": lambda n: (1e-6, 0)}, standing=lambda size: size * 2**30)
    found = sweep(workload, [1, 64], free=16 * 2**30)
    assert found["quick", 1].status == "measured"
    assert found["quick", 64].status == "skipped: would need 64 GiB"
    assert {size for _, size, _ in workload.ran} == {1, 4}  # 4 is a scout


def test_a_jump_is_scouted_and_scouts_are_not_reported(fake_workload, sweep):
    workload = fake_workload({"slow": lambda n: (1e-6 * n**2, n)}, quadratics=["slow"])
    found = sweep(workload, [65536], seconds=100.0, run_limit=10.0)
    assert list(found) == [("slow", 65536)]
    assert found["slow", 65536].status.startswith("skipped: a run would take 4,295 s")
    assert sorted({size for _, size, _ in workload.ran}) == [1, 4, 16, 64, 256]  # 1024 would take a hundredth


def test_a_run_may_take_a_quarter_of_the_seconds(fake_workload, sweep):
    workload = fake_workload({"slow": lambda n: (float(n), 1)})
    found = sweep(workload, [1, 2, 4], seconds=12.0, rounds=1)
    assert found["slow", 2].status == "measured"
    assert found["slow", 4].status == "skipped: out of time (12 s)"


def test_energy_is_measured_where_several_runs_fit_into_its_part_of_the_time(fake_workload, sweep):
    workload = fake_workload({"quick": lambda n: (1e-3, 1), "slow": lambda n: (1.0, 1)})
    windows = []

    def meter(run, expected, window):
        assert expected == 1e-3
        windows.append(window)
        return 3.0

    found = sweep(workload, [8], first=8, seconds=1000.0, meter=meter)
    assert (found["quick", 8].joules, found["slow", 8].joules) == (3.0, None)
    assert windows == [0.5]
    sweep(workload, [8], first=8, seconds=4.0, meter=meter)
    assert windows[1] == pytest.approx(0.5, rel=0.1)
    sweep(workload, [8], first=8, seconds=0.8, meter=meter)
    assert windows[2] == pytest.approx(0.1, rel=0.1)


def test_errors_end_one_candidate_and_not_the_benchmark(fake_workload, sweep):
    def full(n):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    def broken(n):
        raise ValueError("no such kernel")

    workload = fake_workload({"full": full, "broken": broken, "quick": lambda n: (1e-3, n)})
    found = sweep(workload, [8], first=8)
    assert found["full", 8].status == "skipped: out of memory"
    assert found["broken", 8].status == "failed: ValueError"
    assert found["quick", 8].status == "measured"
    assert workload.failures == [("broken", 8, "no such kernel")]


def test_quadratic_kinds_are_extrapolated_from_their_longest_measured_length(fake_workload):
    workload = fake_workload({"slow": None, "linear": None}, quadratics=["slow"])
    rows = [
        Measurement("slow", 10, "forward", "measured", [1.0, 3.0, 2.0]),
        Measurement("slow", 20, "forward", "measured", [8.0]),
        Measurement("slow", 60, "forward", "skipped: a run would take 72 s"),
        Measurement("slow", 5, "forward", "skipped: out of memory"),
        Measurement("slow", 60, "forward", "failed: ValueError"),
        Measurement("slow", 60, "forward+backward", "skipped: a run would take 72 s"),
        Measurement("linear", 60, "forward", "skipped: out of memory"),
    ]
    before = [row.status for row in rows]
    extrapolate(rows, workload)
    assert [row.status for row in rows] == [*before[:2], "extrapolated", *before[3:]]
    assert rows[2].times == [72.0]
    assert rows[2].peak is None


def test_forecasts_of_time_and_memory():
    memory = Forecast(quadratic=False)
    assert memory.seconds(10) is memory.peak(10) is None
    for n in (10, 20):
        memory.add(n, 2.0 * n**1.5, 100 * n + 3 * n * n)
    assert memory.peak(1000) == 100 * 1000 + 3 * 1000**2
    assert memory.seconds(80) == pytest.approx(2.0 * 80**1.5)
    flat = Forecast(quadratic=False)
    for n in (10, 20):
        flat.add(n, 1.0, 500)
    assert flat.seconds(40) == pytest.approx(2.0)  # launch time does not shrink a longer run
    assert flat.peak(40) == 1000
    once = Forecast(quadratic=True)
    once.add(10, 1.0, 7)
    assert (once.seconds(30), once.peak(30)) == (9.0, 63)


@pytest.mark.parametrize(
    ("sizes", "path"),
    [
        ([64, 197, 1024], "64 197 1024"),
        ([16384], "(64) (256) (1024) (4096) 16384"),
        ([64, 4096, 64], "64 (256) (1024) 4096"),
        ([40], "40"),
    ],
)
def test_scouts(sizes, path):
    found = with_scouts(sizes, first=64, factor=4)
    assert " ".join(f"({size})" if scout else str(size) for size, scout in found) == path


def test_scouts_of_image_sizes_are_whole_patches():
    assert with_scouts([1000], first=96, factor=2, step=16) == [
        (112, True),
        (240, True),
        (496, True),
        (1000, False),
    ]


def test_words():
    assert [bytes_text(n) for n in (500, 1536, 64 * 2**30, 3 * 2**50)] == [
        "500 B",
        "1.5 KiB",
        "64 GiB",
        "3072 TiB",
    ]
    assert [seconds_text(s) for s in (4.12e-5, 1.351e-3, 0.5, 165.4)] == [
        "41.2 us",
        "1.35 ms",
        "500 ms",
        "165 s",
    ]
    assert [count_text(n) for n in (640, 12_345, 4.56e6, 1.2e9)] == ["640", "12.3 k", "4.56 M", "1.20 G"]
