"""Looks at the parquet files of a download before days are spent on it.

    python download_lists.py PARQUETS URL_COLUMN CAPTION_COLUMN '["NSFW", "similarity"]'

Exit status 2 where there are none, or one cannot be read or lacks a column. Needs pyarrow.
"""

import json
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet


def trouble(parquets: Path, columns: list[str]) -> str | None:
    """Why the lists cannot be downloaded; None where they can."""
    files = sorted(parquets.glob("*.parquet")) if parquets.is_dir() else [parquets]
    if not files:
        return f"{parquets} has no .parquet files; those in folders within it are not looked for"
    for file in files:
        try:
            there = pyarrow.parquet.read_schema(file).names
        except (OSError, pyarrow.ArrowException) as error:
            return f"{file} cannot be read: {error}"
        if missing := [column for column in columns if column not in there]:
            return (
                f"{file} has no column {', '.join(missing)}, but {', '.join(there)}: "
                "set URL_COLUMN, CAPTION_COLUMN and KEEP"
            )
    return None


def main(parquets: str, url: str, caption: str, kept: str) -> int:
    """Prints what is wrong; returns the exit status."""
    try:
        columns = [url, caption, *map(str, json.loads(kept))]
    except (TypeError, ValueError):
        reason = f'KEEP must be a list such as ["NSFW","similarity"], and is {kept}'
    else:
        reason = trouble(Path(parquets), columns)
    if reason is None:
        return 0
    print(f"error: {reason}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
