"""What to fit, and how."""

from __future__ import annotations

from dataclasses import dataclass

# Residuals beyond 3 % of E count by their size only, so that an outlier cannot rule a fit.
DEFAULT_DELTA = 0.03


@dataclass(frozen=True)
class Settings:
    """metric, x and by are columns; x may be two, joined by a comma, for laws of two scales.

    laws: names of laws. points: the name of a selection. residuals: log, log1p or raw; delta: corner of the Huber
    loss in their unit, None for least squares. batch keeps one global batch size; per_batch makes every batch
    size a group of its own. where: conditions such as "dataset=imagenet1k" or "arch!=x".
    """

    metric: str = "val_loss"
    x: str = "train_flop"
    by: str = "attention"
    laws: tuple[str, ...] = ("power",)
    points: str = "all"
    min_samples: float = 0.0
    delta: float | None = DEFAULT_DELTA
    residuals: str = "log"
    draws: int = 500
    seed: int = 0
    batch: int | None = None
    per_batch: bool = False
    where: tuple[str, ...] = ()

    @property
    def scales(self) -> tuple[str, ...]:
        """The columns of x."""
        return tuple(column.strip() for column in self.x.split(","))
