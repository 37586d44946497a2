"""Measures image towers over the resolution: time, peak memory, tokens/s and, on a GPU, energy.

    python scripts/measure_resolution.py --out scripts/results/resolution
    python scripts/measure_resolution.py --tiny --out DIR      a smoke form of a minute

Every measurement runs in a process of its own, so that its peak is that of one model, one image and one pass. A pass is
"low memory" (`openclip_linattn.low_memory.inference`), "plain" (the stock forward pass) or "training" (forward and
backward with gradient checkpointing). What is expected to take longer than --run-limit or more memory than
--memory-limit, by the smaller images of the same model and pass, is not run: its time is extrapolated from the largest
of them, by the ratio of the towers' products, and called so. The same goes for a run that fails or does not end; then
the exit status is 1. The results are resolution.json, .csv and .png in --out, written again after every measurement.
"""

import argparse
import csv
import io
import json
import re
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import open_clip
import torch
from plot_resolution import figure
from torch import nn

from openclip_linattn.bench.energy import METHOD, energy_meter
from openclip_linattn.bench.forecast import Forecast
from openclip_linattn.bench.machine import environment, find_device
from openclip_linattn.bench.passes import DTYPES
from openclip_linattn.bench.sweep import EXTRAPOLATED, MEASURED
from openclip_linattn.bench.timing import clock_of
from openclip_linattn.bench.tower_setup import Entrant, entrants
from openclip_linattn.cli.data.progress import progress
from openclip_linattn.errors import UserError
from openclip_linattn.files import atomic_path, write_json, write_text
from openclip_linattn.low_memory.inference import low_memory_inference
from openclip_linattn.registration import model_name

MODELS = ("ViT-S-16-softmax", "ViT-S-16-normlinear", "InfViT-4-16-softmax", "InfViT-4-16-lininfsa")
SIZES = (224, 512, 1024, 2048, 4096, 9216)
PASSES = ("low memory", "plain", "training")
LONG = 20.0
"""Seconds from which on one run has to do."""
SETTING_UP = 300.0
"""Seconds beyond --run-limit that a process may take to start, to build its model and to repeat a short run."""
FAILED = "failed"
GIB = 2**30


@dataclass(frozen=True)
class Case:
    """One model at one image size in one pass, for a process of its own."""

    model: str
    pixels: int
    mode: str
    threads: int
    device: str
    dtype: str


def main() -> None:
    args = parse()
    if args.child:
        print(json.dumps(measure(Case(**json.loads(args.child)))))
        return
    torch.set_num_threads(args.threads)
    try:
        chosen, device = entrants(args.models, args.sizes), find_device(args.device)
        args.out.mkdir(parents=True, exist_ok=True)
    except (UserError, OSError) as error:
        sys.exit(f"{error}")
    asked = {model_name(name) for name in args.models}
    cases = [
        Case(entrant.name, pixels, mode, args.threads, args.device, args.dtype)
        for mode in dict.fromkeys(args.passes)
        for entrant in chosen
        if entrant.name in asked
        for pixels in sorted(set(args.sizes))
        if mode != "training" or pixels <= args.largest_training
    ]
    report: dict[str, Any] = {
        "environment": environment(device, DTYPES[args.dtype], 64),
        "methods": methods(device),
        "limits": {"run_seconds": args.run_limit, "memory_gib": args.memory_limit},
        "rows": [],
    }
    sweep = Sweep({entrant.name: entrant for entrant in chosen}, args.run_limit, args.memory_limit)
    with progress("measuring", len(cases)) as advance:
        for case in cases:
            report["rows"].append(sweep.row(case))
            write(report, args.out)
            advance(1)
    print(f"{len(cases)} rows; {args.out / 'resolution.csv'}")
    failed = [row for row in report["rows"] if row["failure"]]
    if failed:
        first = failed[0]
        sys.exit(
            f"{len(failed)} of {len(cases)} runs failed, the first of them {first['model']} at {first['pixels']} px "
            f"({first['pass']}): {first['failure']}"
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("resolution"), help="folder of the results")
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument(
        "--sizes", nargs="+", type=int, default=list(SIZES), help="sides of the image in pixels"
    )
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=list(PASSES))
    parser.add_argument(
        "--largest-training", type=int, default=4096, help="largest side in the training pass"
    )
    parser.add_argument(
        "--run-limit", type=float, default=900, help="seconds that one run may take, as expected"
    )
    parser.add_argument(
        "--memory-limit", type=float, default=10, help="GiB that one process may take, as expected"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", choices=list(DTYPES), default="fp32")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--tiny", action="store_true", help="a smoke form")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.tiny:
        args.models, args.sizes = ["ViT-T32-8-softmax", "ViT-T32-8-normlinear"], [48, 96, 192]
    if not (args.run_limit > 0 and args.memory_limit > 0 and args.threads > 0):
        parser.error("--run-limit, --memory-limit and --threads must be above 0")
    return args


class Sweep:
    """Runs cases in rising size, and looks at the runs before to see what the next will take."""

    def __init__(self, chosen: dict[str, Entrant], run_limit: float, memory_limit: float) -> None:
        self.chosen, self.run_limit, self.memory_limit = chosen, run_limit, memory_limit
        self.forecasts: dict[tuple[str, str], Forecast] = {}
        self.largest: dict[tuple[str, str], tuple[int, float]] = {}

    def row(self, case: Case) -> dict[str, Any]:
        """The measurement of a case, or its extrapolation with the reason."""
        entrant, key = self.chosen[case.model], (case.model, case.mode)
        tokens = entrant.tokens(case.pixels)
        forecast = self.forecasts.setdefault(key, Forecast(quadratic=False))
        found = dict.fromkeys(
            ("seconds", "cpu_seconds", "rounds", "peak_bytes", "energy_joules", "skipped", "failure")
        )
        found["skipped"] = self._refusal(forecast, tokens)
        if found["skipped"] is None:
            found |= run_child(case, self.run_limit + SETTING_UP)
        status = FAILED
        if found["seconds"] is not None:
            status = MEASURED
            forecast.add(tokens, found["seconds"], found["peak_bytes"])
            self.largest[key] = case.pixels, found["seconds"]
        elif key in self.largest:
            status = EXTRAPOLATED
            pixels, seconds = self.largest[key]
            found["seconds"] = seconds * entrant.forward_flops(case.pixels) / entrant.forward_flops(pixels)
        return {
            "model": case.model,
            "attention": entrant.config.tower.kind,
            "pass": case.mode,
            "pixels": case.pixels,
            "tokens": tokens,
            "status": status,
            **found,
            "tokens_per_s": tokens / found["seconds"] if found["seconds"] else None,
            "forward_gflop": entrant.forward_flops(case.pixels) / 1e9,
        }

    def _refusal(self, forecast: Forecast, tokens: int) -> str | None:
        seconds, peak = forecast.seconds(tokens), expected_peak(forecast.seen, tokens)
        if seconds is not None and seconds > self.run_limit:
            return f"one run would take {seconds:,.0f} s"
        if peak > self.memory_limit * GIB:
            return f"it would take {peak / GIB:.1f} GiB"
        return None


def expected_peak(seen: list[tuple[int, float, int]], tokens: int) -> float:
    """Bytes by the line through the two last runs (tokens, seconds, bytes); no pass here keeps an N x N matrix."""
    if len(seen) < 2:
        return float(seen[0][2]) if seen else 0.0
    (n1, _, m1), (n2, _, m2) = seen[-2:]
    return m2 + max(0.0, (m2 - m1) / (n2 - n1)) * (tokens - n2)


def run_child(case: Case, limit: float) -> dict[str, Any]:
    """What `measure` returns in a process of its own; the failure of one that fails or takes `limit` seconds."""
    command = [sys.executable, str(Path(__file__).resolve()), "--child", json.dumps(asdict(case))]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit)
    except subprocess.TimeoutExpired:
        return {"failure": f"it did not end within {limit:,.0f} s"}
    if result.returncode:
        last = result.stderr.strip().splitlines()[-1:] or [f"exit status {result.returncode}"]
        return {"failure": last[0][:200]}
    outcome: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return outcome


def measure(case: Case) -> dict[str, Any]:
    """Times one case in this process: the median of three runs after one to warm up, or one long run."""
    torch.set_num_threads(case.threads)
    device = find_device(case.device)
    clock, meter = clock_of(device), energy_meter(device)
    of_the_clock = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    torch.manual_seed(0)
    model = open_clip.create_model(case.model, force_image_size=case.pixels, device=device)
    model = model.to(DTYPES[case.dtype]).eval()
    images = torch.randn(1, 3, case.pixels, case.pixels, device=device, dtype=DTYPES[case.dtype])
    with passing(case.mode, model):
        run = training_step(model, images) if case.mode == "training" else lambda: model.encode_image(images)
        before = time.process_time()
        times = [clock(run)]
        if times[0] < LONG:
            before = time.process_time()
            times = [clock(run) for _ in range(3)]
        cpu_seconds = (time.process_time() - before) / len(times)
        seconds = statistics.median(times)
        joules = meter(run, seconds, max(2 * seconds, 0.5)) if meter and seconds < LONG else None
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "rounds": len(times),
        "peak_bytes": peak(device) - of_the_clock,
        "energy_joules": joules,
    }


@contextmanager
def passing(mode: str, model: nn.Module) -> Iterator[None]:
    """The circumstances of a pass."""
    if mode == "low memory":
        with low_memory_inference(model), torch.no_grad():
            yield
    elif mode == "plain":
        with torch.no_grad():
            yield
    else:
        model.train()
        model.set_grad_checkpointing()
        yield


def training_step(model: nn.Module, images: torch.Tensor) -> Any:
    """A forward and a backward pass of the image tower."""

    def step() -> None:
        model.zero_grad()
        model.encode_image(images, normalize=True)[:, 0].sum().backward()

    return step


def peak(device: torch.device) -> int:
    """The most bytes that were held at once: resident in the process on a CPU, by PyTorch on a GPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():  # getrusage there counts what the parent held before it became this process
        found = re.search(r"^VmHWM:\s*(\d+) kB$", status.read_text(encoding="utf-8"), re.MULTILINE)
        if found:
            return int(found[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


def methods(device: torch.device) -> dict[str, str]:
    """How the numbers are measured, in words."""
    whole = "with the whole CLIP model, the image and the libraries"
    cuda = "torch.cuda.max_memory_allocated: weights, image and run"
    return {
        "time": "median of three runs of one image after one to warm up; one run where it takes 20 s or more",
        "cpu_seconds": "processor time of one run, the mean over the runs: on a shared machine it says more than time",
        "memory": cuda if device.type == "cuda" else f"the largest resident set of the process, {whole}",
        "energy": METHOD if energy_meter(device) else "not measured",
        "extrapolated": "seconds of the largest image that was run, times the ratio of the towers' products",
    }


def write(report: dict[str, Any], folder: Path) -> None:
    """resolution.json, .csv and, once there is something to draw, .png of the rows so far."""
    write_json(folder / "resolution.json", report)
    buffer = io.StringIO()
    rows = csv.DictWriter(buffer, list(report["rows"][0]), lineterminator="\n")
    rows.writeheader()
    rows.writerows(report["rows"])
    write_text(folder / "resolution.csv", buffer.getvalue())
    if any(row["seconds"] for row in report["rows"]):
        with atomic_path(folder / "resolution.png") as path:
            figure(report).savefig(path, format="png", dpi=130)


if __name__ == "__main__":
    main()
