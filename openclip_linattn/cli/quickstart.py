"""`openclip-linattn quickstart`."""
def quickstart_command() -> None:
    """The whole job at laptop size."""
