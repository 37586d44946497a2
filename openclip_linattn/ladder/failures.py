"""Why a training process ended, and whether it is worth another try."""

import math
import re
from dataclasses import dataclass
from pathlib import Path

from openclip_linattn.errors import UserError
from openclip_linattn.ladder.runs import Run, log_tail

REFUSED = 2  # the exit status of a command that training refuses before it begins
DIVERGED_AFTER = 3  # logged losses in a row; mixed precision passes over one that is not finite
_TORCH_LOG = re.compile(r"[IWEV]\d{4} \d\d:\d\d:")  # statistics that PyTorch prints at its exit
_REASON = re.compile(r"error: |[\w.]*(Error|Exception|Interrupt|Exit)\b")
_LOSS = re.compile(r" Loss: (\S+)")


@dataclass(frozen=True)
class Failure:
    """Why a run failed, and whether another try may end otherwise."""

    reason: str
    again: bool


def failure_of(run: Run, status: int, begin: int) -> Failure | None:
    """What a training process failed by that ended with `status` and began to print at byte `begin`; None for none."""
    if status == 0:
        return None
    reason = f"exit status {status}; {last_line(run.console_log, begin)} ({run.console_log})"
    return Failure(reason, again=status != REFUSED)


def divergence(run: Run, begin: int) -> Failure | None:
    """Whether the last losses that a run has logged since byte `begin` of its log are not finite."""
    losses = _LOSS.findall(log_tail(run.folder, begin))[-DIVERGED_AFTER:]
    if len(losses) < DIVERGED_AFTER or any(_is_finite(loss) for loss in losses):
        return None
    return Failure(
        f"it diverged: its loss is {losses[-1]} after {run.samples_seen():,} samples; lower its learning rate",
        again=False,
    )


def last_line(path: Path, begin: int = 0) -> str:
    """The last line after byte `begin` that names an error, else the last that is not PyTorch's own statistics."""
    text = path.read_bytes()[begin:].decode(errors="replace")
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    lines = [line for line in lines if not _TORCH_LOG.match(line)]
    reasons = [line for line in lines if _REASON.match(line)]
    return (reasons or lines or ["no output"])[-1]


def said(error: Exception) -> str:
    """What an exception says, with its kind where it is no sentence for the user."""
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"


def _is_finite(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return True  # a line that is being written
