"""Cleans shards: what training can use is written anew, and an account kept of the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openclip_linattn.data.clean.account import VERSION, make_account
from openclip_linattn.data.clean.folder import Folder, claim
from openclip_linattn.data.clean.judging import changed
from openclip_linattn.data.clean.passes import Stage, first_pass, second_pass
from openclip_linattn.data.clean.sealing import Sealed, read_sealed
from openclip_linattn.data.clean.settings import Settings
from openclip_linattn.data.clean.workers import Unfinished
from openclip_linattn.data.clean.writing import Record
from openclip_linattn.data.drawn.build import no_progress
from openclip_linattn.data.reading import local_path, scheme_of
from openclip_linattn.data.sizes import SIZES
from openclip_linattn.data.sources import expand
from openclip_linattn.errors import UserError
from openclip_linattn.files import read_json, write_json
from openclip_linattn.termination import terminable


@dataclass(frozen=True)
class Cleaned:
    """The account of the cleaned shards, and whether they were all there before this call."""

    account: dict[str, Any]
    already_complete: bool


@contextmanager
def no_stage(_title: str, _total: int) -> Iterator[Callable[[int], None]]:
    """Show nothing of a pass."""
    yield no_progress


def clean(
    source: str, out: Path, settings: Settings, *, workers: int = 1, stage: Stage = no_stage
) -> Cleaned:
    """Write the usable samples of `source` into shards in `out`, with `_stats.json`, sizes.json and account.json.

    Whatever an earlier call with the same arguments has done is kept, however it ended, and the result is the
    same to the byte. `stage(title, total)` shows the progress of a pass over `total` shards. Raises UserError for
    wrong input, and Unfinished where something failed that may pass; the same call goes on from there.
    """
    if workers < 1:
        raise UserError(f"The number of workers must be at least 1, not {workers}.")
    urls = [_absolute(url) for url in expand(source)]
    _check_repeats(urls)
    call = {"version": VERSION, "source": source, "shards": urls, "settings": settings.to_json()}
    try:
        with terminable(), claim(out, call) as folder:
            if folder.account.exists():
                return _found(folder)
            sealed = first_pass(folder, urls, settings, workers, stage)
            records = second_pass(folder, sealed, settings, workers, stage)
            return Cleaned(_finish(folder, call, sealed, records), already_complete=False)
    except OSError as error:
        raise Unfinished(
            f"{error.filename or out} cannot be written: {error.strerror or error}. What is done stays: mend that, and "
            "run the same command again to go on."
        ) from error


def _check_repeats(urls: Sequence[str]) -> None:
    url, count = Counter(urls).most_common(1)[0]
    if count > 1:
        raise UserError(
            f"{url} comes {count} times in the source, and its samples would be written as often: name it once."
        )


def _absolute(url: str) -> str:
    return str(local_path(url).absolute()) if scheme_of(url) == "local" else url


def _found(folder: Folder) -> Cleaned:
    """The result of an earlier call; raises UserError where its input or output is no longer the same."""
    folder.tidy()
    account = read_json(folder.account)
    tars = [folder.tar(number) for number in range(account["output_shards"])]
    gone = next((tar.name for tar in tars if not tar.exists()), None)
    if gone is not None or sum(tar.stat().st_size for tar in tars) != account["output_bytes"]:
        what = f"{gone} is gone" if gone is not None else "its shards have another size"
        raise UserError(f"{folder.out} was complete, and {what} since: delete the folder, and clean again.")
    for shard in read_sealed(folder.sealed).shards:
        if scheme_of(shard.url) == "local" and changed(shard.url, shard.identity):
            raise UserError(
                f"{folder.out} is complete, but {shard.url} has changed since: delete the folder, and clean again."
            )
    return Cleaned(account, already_complete=True)


def _finish(
    folder: Folder, call: Mapping[str, Any], sealed: Sealed, records: Sequence[Record]
) -> dict[str, Any]:
    account = make_account(call, sealed, records)
    sizes = {folder.tar(number).name: record.samples for number, record in enumerate(records)}
    write_json(folder.out / SIZES, sizes)
    write_json(folder.account, account)
    folder.tidy()
    return account
