"""Which checkpoint a run goes on from, settled before OpenCLIP looks for it, and which epochs a run has saved."""

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from openclip_linattn.checkpointing import partial_checkpoints
from openclip_linattn.epochs import damage, numbered_epoch, recorded_epoch, stated_epoch, training_damage
from openclip_linattn.errors import UserError
from openclip_linattn.files import atomic_path

LATEST = "epoch_latest.pt"
UNFINISHED = "tmp.pt"  # what --save-most-recent writes before it becomes epoch_latest.pt


@dataclass(frozen=True)
class Skipped:
    """A checkpoint that is not the one to go on from, why, and the name that it was given."""

    name: str
    reason: str
    kept_as: str

    def __str__(self) -> str:
        return f"--resume latest passes over {self.name}: {self.reason}; it is kept as {self.kept_as}"


@dataclass
class Latest:
    """The checkpoint that a run goes on from, None where it has none yet; its epoch; and those passed over."""

    checkpoint: Path | None = None
    epoch: int = 0
    skipped: list[Skipped] = field(default_factory=list)


def settle_latest(folder: Path, *, save_most_recent: bool) -> Latest:
    """Finds the newest readable checkpoint of a run folder, and makes OpenCLIP's `--resume latest` take it.

    OpenCLIP goes by name: with --save-most-recent it takes epoch_latest.pt or starts anew, without it the last name in
    natural order, which epoch_latest.pt and a tmp.pt win over every number. So what cannot be read and is named as if
    it were newer, and an overtaken epoch_latest.pt or tmp.pt, are renamed (none is deleted); a whole tmp.pt that is
    the newest becomes epoch_latest.pt, as OpenCLIP was about to do; and with --save-most-recent a numbered one that is
    the newest is linked as epoch_latest.pt. Temporary files of a process that was killed as it saved are removed.

    Raises UserError where there are checkpoints and none can be read, for the run would start anew in silence; and
    where OpenCLIP would take another file still.
    """
    checkpoints = folder / "checkpoints"
    for leftover in partial_checkpoints(checkpoints):
        leftover.unlink(missing_ok=True)
    best, damaged = _newest(checkpoints)
    if best is None and damaged:
        reasons = "; ".join(f"{path.name}: {reason}" for path, reason in damaged.items())
        raise UserError(
            f"--resume latest: no checkpoint in {checkpoints} can be read ({reasons}); bring one back, or give the run "
            "another --name to start anew"
        )
    found = Latest(best)
    if best is not None:
        found.epoch = epoch_of(best)
        try:
            found.skipped += [_skip(path, reason, "unreadable") for path, reason in damaged.items()]
            found.skipped += _set_overtaken_aside(checkpoints, best)
            found.checkpoint = _named_for_openclip(best, save_most_recent=save_most_recent)
        except OSError as error:
            raise UserError(
                f"--resume latest cannot rename the files in {checkpoints}: {error.strerror or error}"
            ) from error
    _check_openclip_s_choice(checkpoints, found.checkpoint, save_most_recent=save_most_recent)
    return found


def check_resumed_file(path: Path) -> None:
    """Raises UserError where the file of `--resume PATH` is not there or not whole, and names the newest that is."""
    if not path.exists():
        raise UserError(f"--resume {path}: no such checkpoint")
    reason = damage(path)
    if reason is None:
        return
    best, _ = _newest(path.parent)
    other = f"the newest whole one beside it is {best}" if best else "no whole one is beside it"
    raise UserError(f"--resume {path}: {reason}; {other}")


def epochs_done(folder: Path) -> int:
    """The highest epoch that has a checkpoint in a run folder."""
    return max((epoch_of(path) for path in (folder / "checkpoints").glob("epoch_*.pt")), default=0)


def resumed_epoch(checkpoint: str) -> int:
    """The epoch that OpenCLIP goes on from with `--resume PATH`: what is written in the file, whatever its name.

    A file of weights alone starts at 0. Of a remote file the name tells it.
    """
    path = Path(checkpoint)
    return (stated_epoch(path) if path.exists() else numbered_epoch(path)) or 0


def epoch_of(path: Path) -> int:
    """The epoch that a checkpoint closes: from its name, or for others from inside; 0 where it tells none."""
    return recorded_epoch(path) or 0


def _newest(checkpoints: Path) -> tuple[Path | None, dict[Path, str]]:
    """The newest readable checkpoint, and those that were looked at before it and cannot be read, with reasons."""
    numbered = [path for path in checkpoints.glob("epoch_*.pt") if numbered_epoch(path) is not None]
    others = [path for name in (LATEST, UNFINISHED) if (path := checkpoints / name).exists()]
    best, damaged = None, {}
    for path in (*others, *sorted(numbered, key=epoch_of, reverse=True)):
        if best is not None and path in numbered and epoch_of(path) <= epoch_of(best):
            break
        reason = training_damage(path)
        if reason is not None:
            damaged[path] = reason
        elif best is None or epoch_of(path) > epoch_of(best):
            best = path
    return best, damaged


def _set_overtaken_aside(checkpoints: Path, best: Path) -> list[Skipped]:
    overtaken = [
        path for name in (LATEST, UNFINISHED) if (path := checkpoints / name) != best and path.exists()
    ]
    reason = "it is of epoch {}, and {} is of epoch {}"
    return [
        _skip(path, reason.format(epoch_of(path), best.name, epoch_of(best)), "overtaken")
        for path in overtaken
    ]


def _skip(path: Path, reason: str, ending: str) -> Skipped:
    return Skipped(path.name, reason, set_aside(path, ending).name)


def set_aside(path: Path, ending: str) -> Path:
    """Renames a file so that nothing takes it for what it was, and returns its new name, one that was free."""
    kept, number = path.with_name(f"{path.name}.{ending}"), 1
    while kept.exists():
        number += 1
        kept = path.with_name(f"{path.name}.{ending}-{number}")
    return path.rename(kept)


def _named_for_openclip(best: Path, *, save_most_recent: bool) -> Path:
    """Gives the newest checkpoint the name that OpenCLIP looks for; what held the name before is set aside."""
    latest = best.with_name(LATEST)
    if best.name == UNFINISHED:
        return best.rename(latest)
    if best == latest or not save_most_recent:
        return best
    try:
        os.link(best, latest)
    except OSError:  # a file system without hard links
        with atomic_path(latest) as temporary:
            shutil.copyfile(best, temporary)
    return latest


def _check_openclip_s_choice(checkpoints: Path, ours: Path | None, *, save_most_recent: bool) -> None:
    """Raises UserError for a file in, or in a folder named like, the checkpoints' that OpenCLIP's pattern finds too."""
    if save_most_recent:
        return
    from open_clip_train.main import get_latest_checkpoint

    theirs = get_latest_checkpoint(str(checkpoints), remote=False)
    if theirs == (None if ours is None else str(ours)):
        return
    if theirs is None:
        raise UserError(
            f"--resume latest: OpenCLIP does not find {ours}, for it takes characters such as [ in the path for a "
            "pattern, and would start anew: rename that folder"
        )
    raise UserError(
        f"--resume latest: OpenCLIP would take {theirs} for the latest checkpoint, and that is "
        f"{ours or 'no checkpoint of this run'}; move {theirs} elsewhere"
    )
