"""`openclip-linattn doctor`: does this environment hold together?"""

import json
import os
from importlib.metadata import PackageNotFoundError, distribution, entry_points, version
from typing import Annotated, Any

import typer
from joblib import cpu_count
from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Table


def doctor_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show versions against the bounds that are known to work, devices, kernels, and the state of the autoload."""
    report: dict[str, Any] = {
        "packages": package_rows(),
        "devices": devices(),
        "kernels": kernels(),
        "autoload": autoload_state(),
    }
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        _print(report)
    if not all(row["ok"] for row in report["packages"]):
        raise typer.Exit(1)


def package_rows() -> list[dict[str, Any]]:
    """Name, installed version, bounds and verdict of every dependency."""
    rows = []
    for line in distribution("openclip-linattn").requires or ():
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            installed = None
        good = installed is not None and requirement.specifier.contains(installed, prereleases=True)
        rows.append(
            {
                "name": requirement.name,
                "installed": installed,
                "bounds": str(requirement.specifier),
                "ok": good,
            }
        )
    return rows


def devices() -> list[str]:
    """The devices that PyTorch can use here."""
    import torch

    cards = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return [f"cpu ({cpu_count()} cores)", *cards]


def kernels() -> dict[str, str]:
    """The implementation that computes the operators on each type of device here, in half precision."""
    import torch

    from openclip_linattn.bench.machine import running_kernel

    types = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    return {name: running_kernel(torch.bfloat16, 64, torch.device(name)) for name in types}


def autoload_state() -> str:
    """Whether an unmodified OpenCLIP finds the models, in a word and a reason."""
    names = {point.name for point in entry_points(group="torch.backends")}
    if "openclip_linattn" not in names:
        return "off: the package's entry point is missing; install it again"
    for variable in ("OPENCLIP_LINATTN_AUTOLOAD", "TORCH_DEVICE_BACKEND_AUTOLOAD"):
        if os.environ.get(variable, "1").strip() == "0":
            return f"off: {variable}=0"
    return "on"


def _print(report: dict[str, Any]) -> None:
    console = Console()
    table = Table("package", "installed", "works with", "")
    for row in report["packages"]:
        verdict = "ok" if row["ok"] else "[red]outside the bounds[/red]"
        table.add_row(row["name"], row["installed"] or "missing", row["bounds"], verdict)
    console.print(table)
    console.print(f"devices: {', '.join(report['devices'])}")
    chosen = ", ".join(f"{kernel} on {device}" for device, kernel in report["kernels"].items())
    console.print(f"kernels of the operators: {chosen}")
    console.print(f"plain OpenCLIP commands find the models: {report['autoload']}")
