"""Writes a shard to standard output, as a command for `pipe:` sources.

    python -m openclip_linattn.data.cat s3://bucket/00000.tar

It reads what `data check` reads, resumes remote shards where a connection drops, and fails where the end was not
reached, so that an unmodified OpenCLIP notices: `--train-data 'pipe:python -m openclip_linattn.data.cat URL'`.
"""

import shutil
import signal
import sys
from contextlib import closing
from typing import IO, cast

from openclip_linattn.data.reading import open_shard

_CHUNK = 1 << 16


def main(arguments: list[str]) -> int:
    """Write the shard; returns the exit status, 1 after a sentence on standard error.

    Only one is taken: a reader stops where the first of several tars in one stream ends.
    """
    if len(arguments) != 1:
        print("usage: python -m openclip_linattn.data.cat URL (one, for each shard)", file=sys.stderr)  # noqa: T201
        return 2
    url = arguments[0]
    try:
        with closing(cast("IO[bytes]", open_shard(url))) as stream:
            shutil.copyfileobj(stream, sys.stdout.buffer, _CHUNK)
        sys.stdout.buffer.flush()
    except OSError as error:
        print(f"{url}: {error.strerror or error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader that has enough ends the command, as it ends cat
    sys.exit(main(sys.argv[1:]))
