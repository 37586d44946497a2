"""The screens of `openclip-linattn analyze`, one file per subcommand."""

import typer

from openclip_linattn.cli.analyze.faithfulness import faithfulness_command
from openclip_linattn.cli.analyze.maps import maps_command
from openclip_linattn.cli.analyze.smoothing import smoothing_command
from openclip_linattn.cli.analyze.spectrum import spectrum_command

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Measure and draw what the attention of a model does.",
)
app.command("spectrum")(spectrum_command)
app.command("smoothing")(smoothing_command)
app.command("maps")(maps_command)
app.command("faithfulness")(faithfulness_command)
