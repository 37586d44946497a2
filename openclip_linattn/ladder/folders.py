"""What a run's folder holds already: nothing, a run to go on with, a finished one, or something else."""

import shlex
import shutil
from collections.abc import Iterator, Sequence

from openclip_linattn.errors import UserError
from openclip_linattn.ladder.runs import Run
from openclip_linattn.manifest import read_manifest


def prepare(run: Run) -> str:
    """Decides how a run starts: "trained", "resumed" or "already done".

    Clears a folder of ours from which OpenCLIP can neither start nor resume.
    """
    if not run.folder.exists():
        return "trained"
    if read_manifest(run.folder).get("status") == "finished":
        return "already done"
    if any((run.folder / "checkpoints").glob("epoch_*.pt")):
        return "resumed"
    shutil.rmtree(run.folder)
    return "trained"


def check_settings(run: Run) -> None:
    """Raises UserError where the run's folder holds a run with other settings, naming them, or something else."""
    command = read_manifest(run.folder).get("command")
    if command is None:
        if run.folder.exists() and any(run.folder.iterdir()):
            raise UserError(f"{run.folder} exists and is no training run of ours; choose another folder")
        return
    recorded = _flags(shlex.split(command)[3:])
    recorded.pop("--resume", None)
    changes = list(_changes(recorded, _flags(run.arguments)))
    if changes:
        raise UserError(
            f"{run.folder} holds a run with other settings: {'; '.join(changes)}. Choose another folder, or remove "
            "this one"
        )


def _flags(arguments: Sequence[str]) -> dict[str, str]:
    """A command line by its flags; of one that is there twice the first counts, for training adds what it settled."""
    found: dict[str, list[str]] = {}
    values: list[str] = []
    for part in arguments:
        if part.startswith("--"):
            key, _, value = part.partition("=")
            values = [value] if value else []
            found.setdefault(key, values)
        else:
            values.append(part)
    return {key: " ".join(values) for key, values in found.items()}


def _changes(before: dict[str, str], now: dict[str, str]) -> Iterator[str]:
    for key in {**before, **now}:
        if key not in now:
            yield f"{key} {before[key]}".rstrip() + " was given and is not now"
        elif key not in before:
            yield f"{key} {now[key]}".rstrip() + " is new"
        elif before[key] != now[key]:
            yield f"{key} was {before[key]} and is now {now[key]}"
