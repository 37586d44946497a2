"""The screens of `openclip-linattn data`, one file per subcommand or two of a kind."""

import typer

from openclip_linattn.cli.data.check import check_command
from openclip_linattn.cli.data.clean import clean_command
from openclip_linattn.cli.data.flags import flags_command
from openclip_linattn.cli.data.sets import digits_command, shapes_command

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Write captioned sets of shards, and check shards before training.",
)
app.command("shapes")(shapes_command)
app.command("digits")(digits_command)
app.command("check")(check_command)
app.command("clean")(clean_command)
app.command("flags")(flags_command)
