"""The command `openclip-linattn`: thin screens, one file per subcommand, over the package's functions."""

import sys

import typer

from openclip_linattn.cli import (
    analyze,
    bench,
    convert,
    data,
    doctor,
    evaluate,
    export,
    ladder,
    models,
    quickstart,
    train,
)
from openclip_linattn.errors import UserError

app = typer.Typer(
    name="openclip-linattn",
    help="CLIP models with linear and infinite attention for OpenCLIP: train, evaluate, compare.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command("models")(models.models_command)
app.command("train", context_settings=train.CONTEXT, add_help_option=False)(train.train_command)
app.command("eval")(evaluate.evaluate_command)
app.add_typer(data.app, name="data", help="Make, check and describe webdataset shards.")
app.add_typer(bench.app, name="bench", help="Measure time, memory and energy of operators and towers.")
app.add_typer(analyze.app, name="analyze", help="Measure and draw what the attention of a model does.")
app.command("convert")(convert.convert_command)
app.command("export")(export.export_command)
app.command("ladder")(ladder.ladder_command)
app.command("quickstart")(quickstart.quickstart_command)
app.command("doctor")(doctor.doctor_command)


def main() -> None:
    """Runs the command line; wrong input ends with its sentence and exit status 2, without a traceback."""
    try:
        app()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(2)
