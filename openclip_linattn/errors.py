"""The one exception that says: the input is wrong, and here is what to do."""


class UserError(ValueError):
    """Wrong input, explained in a sentence; commands print it without a traceback and exit with status 2."""
