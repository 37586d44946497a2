"""The subcommands of openclip-scaling, one screen per file."""
