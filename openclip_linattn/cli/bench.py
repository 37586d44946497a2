"""The screens of `openclip-linattn bench`: operators over tokens, image towers over resolution, and reading."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from openclip_linattn.cli.bench_options import OUT, JsonOption, OutOption, TinyOption, numbers, spinner
from openclip_linattn.cli.bench_reading import reading_command

if TYPE_CHECKING:
    from openclip_linattn.bench.effort import Effort
    from openclip_linattn.bench.protocols import Protocol
    from openclip_linattn.bench.report import Report

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Measure time, memory and energy of operators and towers, and the speed of reading.",
)
app.command("reading")(reading_command)

DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")]
DtypeOption = Annotated[
    str | None, typer.Option(help="fp32, bf16, fp16 or fp64; default: fp32 on a CPU, bf16 on a GPU.")
]
PassOption = Annotated[
    list[str] | None,
    typer.Option("--pass", help="forward or forward+backward; repeat the option. Default: both."),
]
RoundsOption = Annotated[
    int | None, typer.Option(help="Rounds per size, in each of which every candidate runs.")
]
SecondsOption = Annotated[
    float | None,
    typer.Option(help="What the measurements may take together; slow candidates get fewer rounds."),
]
LimitOption = Annotated[float, typer.Option(help="Skip a candidate where one run would take more seconds.")]
ThreadsOption = Annotated[int, typer.Option(help="CPU threads.")]


@app.command()
def ops(  # noqa: PLR0913  (the parameters are the command's options)
    operator: Annotated[
        list[str] | None,
        typer.Option(
            "--operator", "-o", help="Attention kind; repeat the option. Softmax is always measured."
        ),
    ] = None,
    tokens: Annotated[str | None, typer.Option(help="Lengths, as in 197,1024,16384.")] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences. Default: 1 on a CPU, 4 on a GPU.")] = None,
    heads: Annotated[int | None, typer.Option(help="Heads. Default: 6 on a CPU, 8 on a GPU.")] = None,
    head_width: Annotated[int, typer.Option(help="Width of a head.")] = 64,
    dtype: DtypeOption = None,
    layout: Annotated[
        str, typer.Option(help="packed: views of one q, k, v projection; contiguous: tensors of their own.")
    ] = "packed",
    passes: PassOption = None,
    device: DeviceOption = "auto",
    threads: ThreadsOption = 1,
    rounds: RoundsOption = None,
    seconds: SecondsOption = None,
    run_limit: LimitOption = 30.0,
    quadratic_limit: Annotated[
        int | None,
        typer.Option(help="Measure quadratic kinds up to this many tokens. Default on a GPU: 2^19."),
    ] = None,
    extrapolate: Annotated[
        bool | None,
        typer.Option(
            "--extrapolate/--no-extrapolate",
            help="Give quadratic kinds N^2 times beyond their last measured length. Default: on a GPU.",
        ),
    ] = None,
    out: OutOption = OUT,
    as_json: JsonOption = False,
    tiny: TinyOption = False,
) -> None:
    """Operators against softmax, the bare products Q (K^T V) and what the machine allows, over the tokens.

    The defaults on a GPU are those of the published comparison: batch 4, 8 heads of width 64, bf16, softmax measured
    up to 2^19 tokens. A candidate that does not agree with its explicit formula in this run gets no ratios, and the
    exit status is 1.
    """
    from openclip_linattn.bench.inputs import Shape  # late: --help stays quick
    from openclip_linattn.bench.machine import cpu_threads, find_device
    from openclip_linattn.bench.operators import OperatorSettings, bench_operators
    from openclip_linattn.bench.passes import PASSES, dtype_of
    from openclip_linattn.bench.protocols import protocol

    where = find_device(device)
    usual = protocol(where.type, tiny=tiny)
    shape = Shape(
        given(batch, usual.batch),
        given(heads, usual.heads),
        head_width,
        dtype_of(dtype or usual.dtype),
        where,
    )
    settings = OperatorSettings(
        operators=operator or usual.operators,
        tokens=usual.tokens if tokens is None else numbers(tokens, "--tokens"),
        shape=shape,
        layout=layout,
        directions=tuple(dict.fromkeys(passes or PASSES)),
        effort=_effort(rounds, seconds, run_limit, usual),
        extrapolate=given(extrapolate, usual.extrapolate),
        quadratic_limit=given(quadratic_limit, usual.quadratic_limit),
        tiny=tiny,
    )
    with cpu_threads(threads), spinner() as progress:
        report = bench_operators(settings, progress)
    _finish(report, out, as_json=as_json)


@app.command()
def towers(  # noqa: PLR0913  (the parameters are the command's options)
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model", "-m", help="Model name; repeat the option. Its softmax twin is always measured."
        ),
    ] = None,
    sizes: Annotated[
        str | None, typer.Option(help="Sides of the images in pixels, as in 224,512,1024.")
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Images. Default: 1 on a CPU, 4 on a GPU.")] = None,
    dtype: DtypeOption = None,
    passes: PassOption = None,
    device: DeviceOption = "auto",
    threads: ThreadsOption = 1,
    rounds: RoundsOption = None,
    seconds: SecondsOption = None,
    run_limit: LimitOption = 30.0,
    out: OutOption = OUT,
    as_json: JsonOption = False,
    tiny: TinyOption = False,
) -> None:
    """Image towers against the softmax tower of the same size, over the resolution; text towers are not run.

    The FLOP ratio is how much the arithmetic alone allows. A tower that does not agree with its explicit formulas in
    this run gets no ratios, and the exit status is 1.
    """
    from openclip_linattn.bench.machine import cpu_threads, find_device  # late: --help stays quick
    from openclip_linattn.bench.passes import PASSES, dtype_of
    from openclip_linattn.bench.protocols import protocol
    from openclip_linattn.bench.towers import TowerSettings, bench_towers

    where = find_device(device)
    usual = protocol(where.type, tiny=tiny)
    settings = TowerSettings(
        names=model or usual.models,
        sizes=usual.pixels if sizes is None else numbers(sizes, "--sizes"),
        batch=given(batch, usual.batch),
        dtype=dtype_of(dtype or usual.dtype),
        device=where,
        directions=tuple(dict.fromkeys(passes or PASSES)),
        effort=_effort(rounds, seconds, run_limit, usual),
        tiny=tiny,
    )
    with cpu_threads(threads), spinner() as progress:
        report = bench_towers(settings, progress)
    _finish(report, out, as_json=as_json)


Value = TypeVar("Value")


def given(value: Value | None, default: Value) -> Value:
    """The value of an option, or its default where it was left out; zero is a value."""
    return default if value is None else value


def _effort(rounds: int | None, seconds: float | None, run_limit: float, usual: Protocol) -> Effort:
    from openclip_linattn.bench.effort import Effort

    return Effort(given(rounds, usual.rounds), given(seconds, usual.seconds), run_limit)


def _finish(report: Report, out: Path, *, as_json: bool) -> None:
    """Writes the files, prints what was found, and ends with status 1 where a check failed."""
    from openclip_linattn.bench.picture import figure
    from openclip_linattn.bench.report import write_report
    from openclip_linattn.bench.tables import print_report
    from openclip_scaling.pictures.plot import save_figure

    paths = write_report(report, out)
    panels = figure(report)
    for suffix in (".png", ".svg"):
        paths.append(out / f"{report.stem}{suffix}")
        save_figure(panels, paths[-1])
    if as_json:
        typer.echo(json.dumps(report.as_dict(), indent=1, allow_nan=False))
    else:
        print_report(report)
        typer.echo("\n".join(map(str, paths)))
    for sentence in report.failures:
        typer.echo(f"error: {sentence}", err=True)
    if report.failures:
        raise typer.Exit(1)
