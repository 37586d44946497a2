"""`openclip-linattn data check`: what of a source can be trained on, what is lost and why."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from openclip_linattn.cli.data.check_page import MAX_ROWS, print_report
from openclip_linattn.cli.data.check_progress import check_progress
from openclip_linattn.data.checks.check import Watch, survey
from openclip_linattn.data.checks.check import check as check_source
from openclip_linattn.data.checks.cluster import ClusterReader, parse_options
from openclip_linattn.data.checks.dataset_report import DatasetReport, report_text
from openclip_linattn.data.checks.verdicts import VerdictStore, open_store
from openclip_linattn.data.shard_pool import available_cores
from openclip_linattn.data.sizes import write_sizes
from openclip_linattn.data.sources import expand
from openclip_linattn.errors import UserError
from openclip_linattn.files import write_text


@dataclass(frozen=True)
class Options:
    """How the shards are read."""

    workers: int | None
    sample_shards: int | None
    allow_missing: bool
    state: Path | None
    afresh: bool
    sizes: bool
    tasks: int | None
    slurm: list[str]


def check_command(  # noqa: PLR0913 - one parameter is one option
    sources: Annotated[
        list[str], typer.Argument(metavar="SOURCE...", help="Folders, shards, patterns or pipe: commands.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1, help="Processes that share the work (default: all cores for more than 40 shards, else 1)."
        ),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of the shards' results, from which a stopped check goes on (default: beside the shards).",
        ),
    ] = None,
    afresh: Annotated[
        bool, typer.Option("--afresh", help="Drop earlier results and read all shards.")
    ] = False,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Write the whole report, all shards included.")
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png", help="Draw losses, shards, image sizes, caption lengths."),
    ] = None,
    sample_shards: Annotated[
        int | None, typer.Option(min=1, help="Check only so many shards: first, last and evenly between.")
    ] = None,
    no_write: Annotated[bool, typer.Option("--no-write", help="Do not write sizes.json.")] = False,
    allow_missing: Annotated[
        bool, typer.Option("--allow-missing", help="Pass over shards that do not exist, and list them.")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with status 1 for warnings too.")] = False,
    slurm_array: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Share the shards among N tasks of a SLURM array; all nodes must see the results' folder.",
        ),
    ] = None,
    slurm: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE", help="An option of the array: partition=cpu, cpus_per_task=16, time=600."
        ),
    ] = None,
) -> None:
    """Read shards as OpenCLIP does: what can be trained on, what is lost and why.

    Writes the usable samples of each local shard into the sizes.json of its folder, which OpenCLIP reads. Started
    again, it reads only shards that are new or have changed.

    Exit status 0: training can run (warnings tell what is lost).
    Exit status 1: it would hang, fail or mix captions up, or not all shards could be read (errors).
    Exit status 2: the source cannot be read as it is written.
    """
    if picture is not None and len(sources) > 1:
        raise UserError(f"--picture draws one source, not {len(sources)}: join them by `::`.")
    for path in (report, picture):
        if path is not None:
            _refuse_unwritable(path)
    options = Options(
        workers, sample_shards, allow_missing, state, afresh, not no_write, slurm_array, slurm or []
    )
    _refuse_wrong(options)
    # All sources are expanded before the first is read, which may take hours.
    urls = [expand(source, allow_missing=allow_missing) for source in sources]
    checked = [_check(source, shards, options) for source, shards in zip(sources, urls, strict=True)]
    reports = [result.report for result in checked]
    if report is not None:
        _write(report, lambda path: write_text(path, report_text(reports)))
    if picture is not None:
        from openclip_linattn.data.checks.picture import draw_report  # matplotlib is slow to import

        _write(picture, lambda path: draw_report(reports[0], path))
    if as_json:
        typer.echo(report_text(reports), nl=False)
    else:
        for found in reports:
            print_report(found)
    for result in checked:
        for text in (*result.failures, *result.unwritten):
            typer.echo(text, err=True)
    bad = any(result.failures or result.report.errors for result in checked)
    warned = any(result.unwritten or result.report.warnings for result in checked)
    raise typer.Exit(1 if bad or (strict and warned) else 0)


@dataclass
class Checked:
    """A report, and sentences on what failed and on sizes.json files that could not be written."""

    report: DatasetReport
    failures: list[str]
    unwritten: list[str]


def _refuse_unwritable(path: Path) -> None:
    folder = path.absolute().parent
    if path.is_dir():
        raise UserError(f"{path} is a folder: give the name of a file.")
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise UserError(f"{path} cannot be written: {folder} is no folder that takes new files.")


def _refuse_wrong(options: Options) -> None:
    if options.slurm and options.tasks is None:
        raise UserError("--slurm sets up an array: give --slurm-array N, the number of its tasks, too.")
    if options.workers is not None and options.tasks is not None:
        raise UserError("--workers is for this machine: the tasks of an array take --slurm cpus_per_task=N.")


def _check(source: str, urls: Sequence[str], options: Options) -> Checked:
    store = open_store(urls, options.state)
    if options.afresh:
        store.forget()
    finished = False
    try:
        with check_progress(min(len(set(urls)), options.sample_shards or len(urls))) as watch:
            report, failures = _read(source, len(urls), options, store, watch)
        finished = not (failures or report.unfinished or any(shard.died for shard in report.shards))
    except KeyboardInterrupt:
        kept = f"what was read is kept in {store.folder}, and the same command goes on from there"
        typer.echo(f"\nStopped: {kept}.", err=True)
        raise
    finally:
        store.close(finished)
    if report.unread:
        failures.append(f"error: the samples of {report.unread:,} shards were not looked at.")
    if not options.allow_missing:
        failures += _unreadable(report)
    unwritten = write_sizes(report) if options.sizes else []
    return Checked(report, failures, [f"warning: {text}" for text in unwritten])


def _unreadable(report: DatasetReport) -> list[str]:
    shards = [shard for shard in report.shards if not (shard.settled or shard.blocks or shard.died)]
    if not shards:
        return []
    return [
        f"error: the samples of {len(shards):,} shards that could not be read are not counted (such as "
        f"{shards[0].name}): run the same command again, or pass over them with --allow-missing."
    ]


def _read(
    source: str, shards: int, options: Options, store: VerdictStore, watch: Watch
) -> tuple[DatasetReport, list[str]]:
    if options.tasks is None:
        # A process takes a moment to start, which a few shards do not repay.
        workers = available_cores() if shards > MAX_ROWS else 1
        report = check_source(
            source,
            sample_shards=options.sample_shards,
            workers=workers if options.workers is None else options.workers,
            allow_missing=options.allow_missing,
            store=store,
            watch=watch,
        )
        return report, []
    reader = ClusterReader(store, options.tasks, parse_options(options.slurm))
    report = survey(
        source,
        reader,
        sample_shards=options.sample_shards,
        allow_missing=options.allow_missing,
        store=store,
        watch=watch,
    )
    return report, reader.failures


def _write(path: Path, write: Callable[[Path], None]) -> None:
    try:
        write(path)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}.") from error
