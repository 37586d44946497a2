"""`openclip-linattn bench towers`: whole image towers over the resolution."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from openclip_linattn.bench.ceilings import measure_ceilings
from openclip_linattn.bench.checks import Finding
from openclip_linattn.bench.effort import Effort
from openclip_linattn.bench.energy import energy_meter
from openclip_linattn.bench.forecast import with_scouts
from openclip_linattn.bench.machine import environment, file_stem
from openclip_linattn.bench.passes import FORWARD, check_passes, dtype_name
from openclip_linattn.bench.report import Report
from openclip_linattn.bench.sweep import Progress, Stage, Sweep, Workload
from openclip_linattn.bench.timing import Run, clock_of
from openclip_linattn.bench.tower_rows import tower_rows
from openclip_linattn.bench.tower_setup import Entrant, check_tower, entrants, run_tower, train_tower
from openclip_linattn.errors import UserError

CHECK_PATCHES = 6
"""Side, in patches, of the small images on which towers are compared with their explicit formulas."""
FIRST_SCOUT_PATCHES = 6
SCOUT_FACTOR = 2


@dataclass(frozen=True)
class TowerSettings:
    """What is measured. Raises UserError for settings that make no sense.

    names: registered models; each brings its softmax twin. sizes: sides of the square images in pixels.
    """

    names: Sequence[str]
    sizes: Sequence[int]
    batch: int
    dtype: torch.dtype
    device: torch.device
    directions: tuple[str, ...]
    effort: Effort
    tiny: bool = False

    def __post_init__(self) -> None:
        check_passes(self.directions)
        if self.batch < 1:
            raise UserError(f"--batch must be at least 1, got {self.batch}")


def bench_towers(settings: TowerSettings, progress: Progress) -> Report:
    """Checks every tower on small images, measures the machine's ceilings, and then all towers over the sizes."""
    chosen = entrants(settings.names, settings.sizes)
    workload = TowerWorkload(settings, chosen)
    workload.check(progress)
    clock = clock_of(settings.device)
    progress("copy bandwidth and matrix products")
    ceilings = measure_ceilings(settings.device, settings.dtype, clock, tiny=settings.tiny)
    meter = energy_meter(settings.device)
    sweep = Sweep(workload, settings.directions, settings.effort, clock, meter, progress)
    patch = chosen[0].patch
    path = with_scouts(
        list(settings.sizes), first=FIRST_SCOUT_PATCHES * patch, factor=SCOUT_FACTOR, step=patch
    )
    measurements = sweep.run(path)
    tower = chosen[0].config.tower
    return Report(
        benchmark="towers",
        stem=file_stem("towers", settings.device),
        environment=environment(settings.device, settings.dtype, tower.width // tower.heads),
        protocol=_protocol(settings),
        methods=sweep.methods(settings.device.type),
        ceilings=asdict(ceilings),
        findings=workload.findings,
        rows=tower_rows(measurements, chosen, settings.batch, settings.dtype, ceilings, workload.findings),
    )


class TowerWorkload(Workload):
    """Towers of the same patch; a size is the side of the images in pixels."""

    def __init__(self, settings: TowerSettings, chosen: Sequence[Entrant]) -> None:
        self.settings = settings
        self.device = settings.device
        self.entrants = {entrant.name: entrant for entrant in chosen}
        self.names: list[str] = list(self.entrants)
        self.findings: list[Finding] = []

    def check(self, progress: Progress) -> None:
        """Compares every tower with its explicit formulas; one that raises is not measured."""
        for entrant in self.entrants.values():
            progress(f"checking {entrant.name}")
            pixels = CHECK_PATCHES * entrant.patch
            self.findings += check_tower(entrant, pixels, self.settings.dtype, self.device)
        raised = {finding.name for finding in self.findings if finding.problem}
        self.names = [name for name in self.names if name not in raised]

    def tokens(self, size: int) -> int:
        """Tokens of one image."""
        return next(iter(self.entrants.values())).tokens(size)

    def quadratic(self, name: str) -> bool:
        """False: only a part of a tower's work is, so its growth is taken from what was measured."""
        del name
        return False

    def note_failure(self, name: str, size: int, error: Exception) -> None:
        """A failure is a failed check."""
        self.findings.append(Finding.raised(name, self.tokens(size), error))

    def stage(self, size: int) -> Stage:
        """The towers at that resolution, built when they are asked for, and a batch of images."""
        return _TowerStage(self, size)


class _TowerStage(Stage):
    def __init__(self, workload: TowerWorkload, size: int) -> None:
        self.workload, self.size = workload, size
        self.towers: dict[str, nn.Module] = {}
        self.images: Tensor | None = None

    def missing_bytes(self, name: str) -> int:
        settings = self.workload.settings
        images = 0 if self.images is not None else 3 * settings.batch * self.size**2
        built = name in self.towers
        parameters = 0 if built else self.workload.entrants[name].arithmetic(self.size).parameters()
        return (images + parameters) * settings.dtype.itemsize

    def run(self, name: str, direction: str) -> Run:
        settings = self.workload.settings
        images = self._images()
        if name not in self.towers:
            entrant = self.workload.entrants[name]
            self.towers[name] = entrant.build(self.size, settings.dtype, settings.device)
        tower = self.towers[name]
        if direction == FORWARD:
            return lambda: run_tower(tower, images)
        embed_dim = self.workload.entrants[name].config.content["embed_dim"]
        gradient = self._normal(settings.batch, embed_dim, seed=1)
        return lambda: train_tower(tower, images, gradient)

    def inspect(self, name: str, direction: str, result: Any) -> None:
        """Towers are compared on small images only: their explicit formulas need N x N memory in every block."""

    def _images(self) -> Tensor:
        if self.images is None:
            self.images = self._normal(self.workload.settings.batch, 3, self.size, self.size, seed=0)
        return self.images

    def _normal(self, *sizes: int, seed: int) -> Tensor:
        settings = self.workload.settings
        generator = torch.Generator(settings.device).manual_seed(seed)
        return torch.randn(sizes, generator=generator, device=settings.device, dtype=settings.dtype)


def _protocol(settings: TowerSettings) -> dict[str, Any]:
    return {
        "models": list(settings.names),
        "pixels": sorted(set(settings.sizes)),
        "batch": settings.batch,
        "dtype": dtype_name(settings.dtype),
        "passes": list(settings.directions),
        "rounds": settings.effort.rounds,
        "seconds": settings.effort.seconds,
        "run_limit": settings.effort.run_limit,
    }
