"""Which checkpoint a run goes on from, found before OpenCLIP looks for it, and which epochs a run has saved."""

from pathlib import Path

from openclip_linattn.epochs import recorded_epoch
from openclip_linattn.errors import UserError

LATEST = "epoch_latest.pt"


def latest_checkpoint(folder: Path, *, save_most_recent: bool) -> Path | None:
    """The checkpoint that OpenCLIP's `--resume latest` takes from a run folder; None where it starts anew.

    With --save-most-recent OpenCLIP looks for epoch_latest.pt alone, without it for the last name in natural order,
    which epoch_latest.pt and a leftover tmp.pt win over every number. Raises UserError where that is not the newest
    checkpoint: training would lose epochs, or start anew, in silence.
    """
    checkpoints = folder / "checkpoints"
    latest = checkpoints / LATEST
    numbered = max(checkpoints.glob("epoch_[0-9]*.pt"), key=epoch_of, default=None)
    if (checkpoints / "tmp.pt").exists() and not save_most_recent:
        raise UserError(
            f"OpenCLIP would resume from {checkpoints / 'tmp.pt'}, which an interrupted --save-most-recent left; "
            "remove that file, or give --save-most-recent again"
        )
    if not latest.exists():
        if save_most_recent and numbered is not None:
            raise UserError(
                f"with --save-most-recent OpenCLIP resumes from {latest} only, which does not exist, so it would start "
                f"anew and overwrite {numbered.name}; leave --save-most-recent out, or copy {numbered.name} to {LATEST}"
            )
        return numbered
    if numbered is not None and epoch_of(numbered) > epoch_of(latest):
        raise UserError(
            f"OpenCLIP would resume from {latest}, which is of epoch {epoch_of(latest)}, though {numbered.name} is "
            f"there; remove {LATEST}"
        )
    return latest


def epochs_done(folder: Path) -> int:
    """The highest epoch that has a checkpoint in a run folder."""
    return max((epoch_of(path) for path in (folder / "checkpoints").glob("epoch_*.pt")), default=0)


def epoch_of(path: Path) -> int:
    """The epoch that a checkpoint closes: from its name, or for others from inside; 0 where it tells none."""
    return recorded_epoch(path) or 0
