"""`openclip-linattn bench ops`: operators and baselines over the number of tokens."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from openclip_linattn.bench.ceilings import measure_ceilings
from openclip_linattn.bench.checks import (
    PREFIX_TOKENS,
    SHORT_TOKENS,
    TINY_TOKENS,
    Finding,
    check_rows,
    check_short,
    run_forward,
    run_training,
)
from openclip_linattn.bench.contestants import Contestant, contestants
from openclip_linattn.bench.effort import Effort
from openclip_linattn.bench.energy import energy_meter
from openclip_linattn.bench.extrapolation import extrapolate
from openclip_linattn.bench.forecast import with_scouts
from openclip_linattn.bench.inputs import CONTIGUOUS, LAYOUTS, Inputs, Shape, make_inputs
from openclip_linattn.bench.machine import environment, file_stem
from openclip_linattn.bench.operator_rows import operator_rows
from openclip_linattn.bench.passes import FORWARD, check_passes, dtype_name
from openclip_linattn.bench.report import Report
from openclip_linattn.bench.sweep import Progress, Stage, Sweep, Workload
from openclip_linattn.bench.timing import Run, clock_of
from openclip_linattn.errors import UserError

FIRST_SCOUT = 64
SCOUT_FACTOR = 4


@dataclass(frozen=True)
class OperatorSettings:
    """What is measured. Raises UserError for settings that make no sense.

    operators: keys of `openclip_linattn.ops.OPERATORS`; softmax and the bare products are always measured.
    quadratic_limit: quadratic kinds are measured up to this many tokens, None for no bound but time and memory.
    tiny: a smoke form, whose checks and ceilings are small too.
    """

    operators: Sequence[str]
    tokens: Sequence[int]
    shape: Shape
    layout: str
    directions: tuple[str, ...]
    effort: Effort
    extrapolate: bool = False
    quadratic_limit: int | None = None
    tiny: bool = False

    def __post_init__(self) -> None:
        check_passes(self.directions)
        if self.layout not in LAYOUTS:
            raise UserError(f"--layout must be {' or '.join(LAYOUTS)}, got {self.layout!r}")
        for tokens in self.tokens:
            if tokens < 1:
                raise UserError(f"--tokens must be at least 1, got {tokens}")
        if self.quadratic_limit is not None and self.quadratic_limit < 1:
            raise UserError(f"--quadratic-limit must be at least 1, got {self.quadratic_limit}")


def bench_operators(settings: OperatorSettings, progress: Progress) -> Report:
    """Checks every candidate, measures the machine's ceilings, and then all candidates over the lengths."""
    shape = settings.shape
    entrants = contestants(settings.operators, settings.layout, shape.device.type)
    workload = OperatorWorkload(settings, entrants)
    workload.check(progress)
    clock = clock_of(shape.device)
    progress("copy bandwidth and matrix products")
    ceilings = measure_ceilings(shape.device, shape.dtype, clock, tiny=settings.tiny)
    meter = energy_meter(shape.device)
    sweep = Sweep(workload, settings.directions, settings.effort, clock, meter, progress)
    measurements = sweep.run(with_scouts(list(settings.tokens), first=FIRST_SCOUT, factor=SCOUT_FACTOR))
    if settings.extrapolate:
        extrapolate(measurements, workload)
    rows = operator_rows(measurements, entrants, shape, ceilings, workload.findings)
    return Report(
        benchmark="ops",
        stem=file_stem("ops", shape.device),
        environment=environment(shape.device, shape.dtype, shape.head_width),
        protocol=_protocol(settings),
        methods=sweep.methods(shape.device.type),
        ceilings=asdict(ceilings),
        findings=workload.findings,
        rows=rows,
    )


class OperatorWorkload(Workload):
    """The candidates on shared inputs; a size is a number of tokens."""

    def __init__(self, settings: OperatorSettings, entrants: Sequence[Contestant]) -> None:
        self.settings = settings
        self.device = settings.shape.device
        self.entrants = {entrant.name: entrant for entrant in entrants}
        self.names: list[str] = list(self.entrants)
        self.findings: list[Finding] = []

    def check(self, progress: Progress) -> None:
        """Compares every candidate with its formula; one that raises is not measured."""
        lengths = TINY_TOKENS if self.settings.tiny else (*SHORT_TOKENS, PREFIX_TOKENS[self.device.type])
        for entrant in self.entrants.values():
            progress(f"checking {entrant.name}")
            self.findings += check_short(entrant, self.settings.shape, lengths)
        raised = {finding.name for finding in self.findings if finding.problem}
        self.names = [name for name in self.names if name not in raised]

    def tokens(self, size: int) -> int:
        """The size itself."""
        return size

    def quadratic(self, name: str) -> bool:
        """By the kind's definition."""
        return self.entrants[name].quadratic

    def refuses(self, name: str, size: int) -> str | None:
        """Quadratic kinds stop at their limit."""
        limit = self.settings.quadratic_limit
        if limit is not None and size > limit and self.quadratic(name):
            return f"quadratic kinds are measured up to {limit:,} tokens"
        return None

    def note_failure(self, name: str, size: int, error: Exception) -> None:
        """A failure is a failed check."""
        self.findings.append(Finding.raised(name, size, error))

    def stage(self, size: int) -> Stage:
        """The inputs of that length, made when they are asked for."""
        return _OperatorStage(self, size)


class _OperatorStage(Stage):
    def __init__(self, workload: OperatorWorkload, size: int) -> None:
        self.workload, self.size = workload, size
        self.inputs: dict[str, Inputs] = {}

    def missing_bytes(self, name: str) -> int:
        layout = self.workload.entrants[name].layout
        if layout in self.inputs:
            return 0
        copies = 2 if layout == CONTIGUOUS else 1  # made from packed ones
        return 4 * copies * self.workload.settings.shape.tensor_bytes(self.size)

    def run(self, name: str, direction: str) -> Run:
        entrant = self.workload.entrants[name]
        if entrant.layout not in self.inputs:
            self.inputs[entrant.layout] = make_inputs(
                self.workload.settings.shape, self.size, entrant.layout, seed=self.size
            )
        inputs = self.inputs[entrant.layout]
        once = run_forward if direction == FORWARD else run_training
        return lambda: once(entrant.function, inputs)

    def inspect(self, name: str, direction: str, result: Any) -> None:
        del direction
        entrant = self.workload.entrants[name]
        self.workload.findings += check_rows(entrant, self.inputs[entrant.layout], result)


def _protocol(settings: OperatorSettings) -> dict[str, Any]:
    shape = settings.shape
    return {
        "batch": shape.batch,
        "heads": shape.heads,
        "head_width": shape.head_width,
        "dtype": dtype_name(shape.dtype),
        "layout": settings.layout,
        "tokens": sorted(set(settings.tokens)),
        "passes": list(settings.directions),
        "rounds": settings.effort.rounds,
        "seconds": settings.effort.seconds,
        "run_limit": settings.effort.run_limit,
        "extrapolate": settings.extrapolate,
        "quadratic_limit": settings.quadratic_limit,
    }
