"""The exceptions that say: the input is wrong, and here is what to do."""


class UserError(ValueError):
    """Wrong input, explained in a sentence; commands print it without a traceback and exit with status 2."""


class AttentionMismatch(UserError, RuntimeError):  # noqa: N818 - says what it is
    """A checkpoint of another attention kind; a RuntimeError too, as `load_state_dict` raises for what does not fit."""
