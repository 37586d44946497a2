"""Sentences for `pipe:` sources that webdataset would split or run otherwise than they were meant."""

from __future__ import annotations

import re
from collections.abc import Sequence

from openclip_linattn.data.reading import local_path, scheme_of
from openclip_linattn.errors import UserError

# Copies that write to standard output only when told so by a final "-".
_COPIES = re.compile(
    r"^(aws\s+(\S+\s+)*?s3\s+cp|gsutil\s+(\S+\s+)*?cp|gcloud\s+storage\s+cp|rclone\s+copyto)\b"
)
_REMOTE = re.compile(r"\b(s3|gs)://\S+")


def check_split_pipe(components: Sequence[str]) -> None:
    """Raise UserError where `::` cuts one command in two; it joins whole sources only."""
    for before, after in zip(components, components[1:], strict=False):
        if (
            not before.strip().startswith("pipe:")
            or after.strip().startswith("pipe:")
            or _may_be_source(after)
        ):
            continue
        raise UserError(
            f"`::` joins whole sources, but here it cuts a command in two: {after!r} would be opened as a file. "
            f"Write {_whole_commands(components)!r}."
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


def _may_be_source(part: str) -> bool:
    """Whether the part can stand by itself: one word, and local where it is no URL of an object store."""
    word = part.strip()
    if scheme_of(word) != "local":
        return False
    return not re.search(r"\s-$", word) and (local_path(word).parent.is_dir() or " " not in word)


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
