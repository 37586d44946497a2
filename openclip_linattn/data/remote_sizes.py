"""Sample counts of remote shards, where a sizes.json lies beside them."""

from __future__ import annotations

import json
from collections.abc import Sequence

from openclip_linattn.data.reading import REMOTE, open_shard, scheme_of
from openclip_linattn.errors import UserError

_SILENCE = 10.0  # seconds: without the file there is another way to go on


def remote_counts(urls: Sequence[str]) -> dict[str, int]:
    """Samples of each remote shard that the sizes.json of its folder tells, read once for each folder.

    Raises UserError where such a file is there and no table of counts.
    """
    tables: dict[str, dict[str, int]] = {}
    counts = {}
    for url in urls:
        if scheme_of(url) not in REMOTE:
            continue
        folder, _, name = url.rpartition("/")
        if folder not in tables:
            tables[folder] = _table(f"{folder}/sizes.json")
        if name in tables[folder]:
            counts[url] = tables[folder][name]
    return counts


def _table(url: str) -> dict[str, int]:
    try:
        stream = open_shard(url, silence=_SILENCE)
        try:
            content = stream.read()
        finally:
            stream.close()
    except OSError:
        return {}
    try:
        return {name: _count(count) for name, count in json.loads(content).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f'{url} must hold sample counts by shard, such as {{"00000.tar": 1000}}.') from error


def _count(value: object) -> int:
    if not str(value).isdecimal():  # "-1", "2.5" and "True" are none
        raise ValueError(value)
    return int(str(value))
