"""Sentences for `pipe:` sources that webdataset would split or run otherwise than they were meant."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import pairwise

from openclip_linattn.data.reading import local_path, scheme_of
from openclip_linattn.errors import UserError

# Copies that write to standard output only when told so by a final "-".
_COPIES = re.compile(
    r"^(aws\s+(\S+\s+)*?s3\s+cp|gsutil\s+(\S+\s+)*?cp|gcloud\s+storage\s+cp|rclone\s+copyto)\b"
)
# What webdataset opens by itself, and commands for the rest.
_OPENED = ("local", "pipe", "http", "https", "ais", "sftp", "ftps", "scp", "gs", "htgs")
_READERS = {"hdfs": "hdfs dfs -cat {}"}
_STOCK = {"s3": "pipe:aws s3 cp {} -", "gs": "pipe:gcloud storage cat {}"}
_REMOTE = re.compile(r"\b(s3|gs)://\S+")


def check_split_pipe(components: Sequence[str]) -> None:
    """Raise UserError where `::` cuts one command in two; it joins whole sources only."""
    for before, after in pairwise(part.strip() for part in components):
        if not before.startswith("pipe:") or after.startswith("pipe:") or _may_be_source(after):
            continue
        raise UserError(
            f"`::` joins whole sources, but here it cuts a command in two: {after!r} would be opened as a "
            f"file. Write {_whole_commands(components)!r}."
        )


def check_pipe(component: str) -> None:
    """Raise UserError for an empty command and for a copy that does not write to standard output."""
    command = component[len("pipe:") :].strip()
    if not command:
        raise UserError(f"{component!r} has no command: write pipe:cat data/{{00000..00099}}.tar, say.")
    if _COPIES.match(command) and not _writes_to_output(command):
        raise UserError(
            f"The command {command!r} does not write to its standard output: "
            f"write {'pipe:' + _strip_target(command) + ' -'!r}."
        )


def check_scheme(component: str) -> None:
    """Raise UserError for a scheme that neither this package nor webdataset opens, with the command that reads it."""
    scheme = scheme_of(component)
    if scheme in _OPENED or scheme in os.environ.get("USE_AIS_FOR", "").split(":"):
        return
    if scheme == "s3":
        if find_spec("s3fs") is None:
            raise UserError(
                f"{component!r} needs a client for S3: pip install 'openclip-linattn[remote]', or write "
                f"{stock_form(component)!r}."
            )
        return
    command = _READERS.get(scheme)
    hint = f"write {'pipe:' + command.format(component)!r}" if command else "read it through a pipe: command"
    raise UserError(f"webdataset cannot open {component!r} ({scheme}:): {hint}.")


def stock_form(component: str) -> str:
    """`component` as OpenCLIP opens it without the readers of this package: through the store's own command."""
    command = _STOCK.get(scheme_of(component))
    if command is None:
        return component
    # Braces are for OpenCLIP, and gone before the shell sees the command.
    plain = re.sub(r"[{},]", "", component)
    return command.format(component if shlex.quote(plain) == plain else shlex.quote(component))


def _may_be_source(part: str) -> bool:
    """Whether the part can stand by itself: one word, or a path with blanks to a folder that exists."""
    if " " not in part:
        return True
    folder = local_path(part).parent
    return scheme_of(part) == "local" and not part.endswith(" -") and os.path.isdir(folder)  # noqa: PTH112


def _writes_to_output(command: str) -> bool:
    first = re.split(r"[|;&]", command, maxsplit=1)[0].split()
    return first[-1] in ("-", "/dev/stdout") or "-" in first


def _strip_target(command: str) -> str:
    match = _REMOTE.search(command)
    return command[: match.end()] if match else command


def _whole_commands(components: Sequence[str]) -> str:
    """The source with the command of the first part, and the end of the last one, around every part."""
    head, _, first = components[0].strip().rpartition(" ")
    last, _, tail = components[-1].strip().partition(" ")
    words = [first, *(part.strip() for part in components[1:-1]), last]
    return "::".join(f"{head} {word} {tail}".strip() for word in words)
