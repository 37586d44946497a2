"""`openclip-linattn ladder`: a plan becomes trained runs and a report on their scaling."""

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

if TYPE_CHECKING:
    from openclip_linattn.ladder.budget import Estimate
    from openclip_linattn.ladder.climb import Result


def ladder_command(
    plan: Annotated[Path, typer.Argument(metavar="PLAN.yaml", help="Plans to start from: scaling/plans/.")],
    out: Annotated[Path, typer.Option(help="Folder for data, runs and report.")],
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Print the runs, what they cost and their commands; train none (but the steps of budget.measure).",
        ),
    ] = False,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs side by side on this machine, instead of the plan's.")
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(metavar="PATTERN", help="Only runs of such names, as '*-softmax-*'; the report too."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Train the grid of a plan (sizes x attentions x samples x learning rates x seeds) through OpenCLIP, on this
    machine or SLURM, evaluate, fit scaling laws and write a report.

    Run again, it goes on where it stopped. The exit status is 1 where a run failed, and the report is on the others.
    """
    from openclip_linattn.ladder.climb import climb, estimated
    from openclip_linattn.ladder.plan import read_ladder
    from openclip_linattn.ladder.remarks import remarks

    console = Console(stderr=True)
    ladder = read_ladder(plan, out, only)
    for sentence in remarks(ladder):
        console.print(f"note: {sentence}", markup=False, highlight=False, soft_wrap=True)
    estimate = estimated(ladder, console, jobs)
    if dry_run:
        _show(estimate, as_json)
        return
    for sentence in estimate.sentences:
        console.print(sentence, markup=False, highlight=False, soft_wrap=True)
    result = climb(ladder, console, jobs)
    for outcome in result.failed:
        typer.echo(f"error: {outcome.sentence}", err=True)
    if as_json:
        typer.echo(json.dumps(_result_json(result), indent=2))
    elif result.report is not None:
        typer.echo(result.report)
    if result.failed:
        raise typer.Exit(1)


def _show(estimate: "Estimate", as_json: bool) -> None:
    if as_json:
        found = {"runs": estimate.rows(), "flop": estimate.flop, "wall_hours": estimate.wall_hours}
        typer.echo(json.dumps(found, indent=2))
        return
    Console(width=None if Console().is_terminal else 160).print(estimate.table())
    for sentence in estimate.sentences:
        typer.echo(sentence)
    for row in estimate.rows():
        typer.echo(shlex.join(row["command"]))


def _result_json(result: "Result") -> dict[str, Any]:
    runs = [
        {"run": each.run.name, "status": each.status, "message": each.message} for each in result.outcomes
    ]
    return {"runs": runs, "report": None if result.report is None else str(result.report)}
