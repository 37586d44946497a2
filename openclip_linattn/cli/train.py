"""`openclip-linattn train`: OpenCLIP's own training entrypoint with our models, flags unchanged."""

import typer

# Every flag belongs to OpenCLIP's parser, --help included.
CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}


def train_command(context: typer.Context) -> None:
    """Train through OpenCLIP's own entrypoint; every flag passes through (--help lists them)."""
    from openclip_linattn.train import main

    raise typer.Exit(main(context.args))
