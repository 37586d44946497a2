"""The one measuring loop of both benchmarks: every size, both directions, all candidates interleaved."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from openclip_linattn.bench import energy, memory, timing
from openclip_linattn.bench.effort import Clockwork, Effort
from openclip_linattn.bench.energy import WINDOW, EnergyMeter
from openclip_linattn.bench.forecast import Forecast
from openclip_linattn.bench.machine import free_memory
from openclip_linattn.bench.memory import out_of_memory, with_peak
from openclip_linattn.bench.timing import Clock, Run, interleave
from openclip_linattn.bench.words import bytes_text, seconds_text

MEASURED = "measured"
EXTRAPOLATED = "extrapolated"
LONG_RUN = 1.0
"""Seconds from which on the one run that takes the peak also gives the expected time."""
HEADROOM = 0.9
"""The part of the free memory that may be planned with."""
ENERGY_PART = 1 / 4
"""The part of the seconds of a size that measuring energy may take."""
LARGEST_BITE = 1 / 4
"""The part of all seconds that one run may take."""
SCOUT_BITE = 1 / 100
"""The same for a scout: where its run would be long, shorter ones are enough for a forecast."""

Progress = Callable[[str], None]


@dataclass
class Measurement:
    """One candidate at one size in one direction.

    status: "measured", "extrapolated", "skipped: ..." or "failed: ...". times: seconds of every round. peak: bytes
    held at once beyond the inputs, results included. joules: of one run, None where not measured.
    """

    name: str
    size: int
    direction: str
    status: str
    times: list[float] = field(default_factory=list)
    peak: int | None = None
    joules: float | None = None


class Stage(ABC):
    """A workload at one size: what candidates share there is built when the first of them needs it."""

    @abstractmethod
    def missing_bytes(self, name: str) -> int:
        """Bytes of what `name` needs before it runs (inputs, parameters) and what is not there yet."""

    @abstractmethod
    def run(self, name: str, direction: str) -> Run:
        """The run of a candidate in a direction."""

    @abstractmethod
    def inspect(self, name: str, direction: str, result: Any) -> None:
        """Looks at the result of a first run."""


class Workload(ABC):
    """What a sweep measures: candidates by name, at sizes."""

    device: torch.device
    names: Sequence[str]

    @abstractmethod
    def tokens(self, size: int) -> int:
        """Tokens of one sequence at that size."""

    @abstractmethod
    def quadratic(self, name: str) -> bool:
        """True for a candidate whose time grows with the square of the tokens."""

    @abstractmethod
    def stage(self, size: int) -> Stage:
        """The workload at one size."""

    @abstractmethod
    def note_failure(self, name: str, size: int, error: Exception) -> None:
        """A candidate raised."""

    def refuses(self, name: str, size: int) -> str | None:
        """Why a candidate is not to be measured at a size, None where it is."""
        del name, size
        return None


@dataclass
class Sweep:
    """Measures a workload over a path of sizes; scouts are run once, for the forecasts alone."""

    workload: Workload
    directions: Sequence[str]
    effort: Effort
    clock: Clock
    meter: EnergyMeter | None
    progress: Progress
    forecasts: dict[tuple[str, str], Forecast] = field(default_factory=dict)
    measurements: list[Measurement] = field(default_factory=list)

    def run(self, path: Sequence[tuple[int, bool]]) -> list[Measurement]:
        """The measurements of all sizes of `path` that are no scouts, in its order."""
        sizes = sum(not scout for _, scout in path)
        clockwork = Clockwork(self.effort, sizes * len(self.directions))
        for size, scout in path:
            self._size(size, clockwork, scout=scout)
        return self.measurements

    def methods(self, device_type: str) -> dict[str, str]:
        """How time, memory and energy are measured on a type of device, in words."""
        return {
            "time": timing.METHODS[device_type],
            "memory": memory.METHODS[device_type],
            "energy": energy.METHOD if self.meter else "not measured",
        }

    def _size(self, size: int, clockwork: Clockwork, *, scout: bool) -> None:
        stage = self.workload.stage(size)
        for direction in self.directions:
            cell = _Cell(self, size, direction, stage)
            cell.first_runs(clockwork, SCOUT_BITE if scout else LARGEST_BITE)
            if not scout:
                cell.rounds(clockwork)
                self.measurements += cell.found.values()
                clockwork.cell_done()


class _Cell:
    """All candidates at one size in one direction."""

    def __init__(self, sweep: Sweep, size: int, direction: str, stage: Stage) -> None:
        self.sweep, self.size, self.direction, self.stage = sweep, size, direction, stage
        self.tokens = sweep.workload.tokens(size)
        self.found = {name: Measurement(name, size, direction, MEASURED) for name in sweep.workload.names}
        self.expected: dict[str, float] = {}

    def first_runs(self, clockwork: Clockwork, bite: float) -> None:
        """Runs each candidate that may run: this warms it up, takes its peak and its expected time.

        bite: the part of all seconds that a single run may take.
        """
        for name in self._quickest_first():
            self.sweep.progress(f"{name}, {self.tokens:,} tokens, {self.direction}")
            measurement = self.found[name]
            if reason := self._refusal(name, clockwork, bite):
                measurement.status = f"skipped: {reason}"
            else:
                self._first_run(name, measurement)

    def rounds(self, clockwork: Clockwork) -> None:
        """Interleaved rounds of all that ran, then their energy."""
        runs = {name: self.stage.run(name, self.direction) for name in self.expected}
        share = clockwork.share()
        times = interleave(
            runs,
            self.sweep.clock,
            rounds=self.sweep.effort.rounds,
            seconds=share * (1 - ENERGY_PART if self.sweep.meter else 1),
            expected=self.expected,
        )
        for name, run in runs.items():
            measurement = self.found[name]
            measurement.times = times[name] or measurement.times
            measurement.joules = self._joules(name, run, ENERGY_PART * share / len(runs))

    def _joules(self, name: str, run: Run, seconds: float) -> float | None:
        """Energy of one run, not measured where a single one would take the time for it."""
        window = min(WINDOW, seconds)
        if self.sweep.meter is None or self.expected[name] > window:
            return None
        return self.sweep.meter(run, self.expected[name], window)

    def _refusal(self, name: str, clockwork: Clockwork, bite: float) -> str | None:
        workload, effort = self.sweep.workload, self.sweep.effort
        if reason := workload.refuses(name, self.size):
            return reason
        forecast = self._forecast(name)
        seconds, peak = forecast.seconds(self.tokens) or 0.0, forecast.peak(self.tokens) or 0
        need, free = peak + self.stage.missing_bytes(name), free_memory(workload.device)
        if free is not None and need > HEADROOM * free:
            return f"would need {bytes_text(need)}"
        if seconds > effort.run_limit:
            return f"a run would take {seconds_text(seconds)}"
        if seconds > min(clockwork.left(), bite * effort.seconds):
            return f"out of time ({effort.seconds:g} s)"
        return None

    def _quickest_first(self) -> list[str]:
        """So that a slow candidate takes only time that the others leave."""
        return sorted(self.found, key=lambda name: self._forecast(name).seconds(self.tokens) or 0.0)

    def _first_run(self, name: str, measurement: Measurement) -> None:
        workload = self.sweep.workload
        try:
            seconds, measurement.peak = self._peak_and_seconds(name)
        except Exception as error:
            if isinstance(error, RuntimeError) and out_of_memory(error):
                measurement.status = "skipped: out of memory"
            else:
                measurement.status = f"failed: {type(error).__name__}"
                workload.note_failure(name, self.size, error)
            return
        self.expected[name] = seconds
        measurement.times = [seconds]
        self._forecast(name).add(self.tokens, seconds, measurement.peak)

    def _peak_and_seconds(self, name: str) -> tuple[float, int]:
        """Two runs, the first for its peak; one for both where a run is long."""
        run = self.stage.run(name, self.direction)
        forecast = self._forecast(name).seconds(self.tokens)
        kept: list[tuple[Any, int]] = []
        seconds = self.sweep.clock(lambda: kept.append(with_peak(run, self.sweep.workload.device)))
        result, peak = kept.pop()
        self.stage.inspect(name, self.direction, result)
        del result
        if forecast is None or forecast < LONG_RUN:  # the first may have compiled something
            seconds = self.sweep.clock(run)
        return seconds, peak

    def _forecast(self, name: str) -> Forecast:
        key = (name, self.direction)
        return self.sweep.forecasts.setdefault(key, Forecast(self.sweep.workload.quadratic(name)))
