"""Logged training steps as columns: 48 bytes a step, so that a log of gigabytes becomes arrays of megabytes."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


class TrainRecord(NamedTuple):
    """One logged training step.

    epoch counts from 0; seen and epoch_samples are global samples within the epoch; loss is this step's; seconds
    are those since the first line of its process (NaN where no time is known). learning_rate is None where the
    log prints 0.000000 (below 5e-7).
    """

    epoch: int
    seen: int
    epoch_samples: int
    loss: float
    learning_rate: float | None
    seconds: float


class TrainRecords:
    """The training steps of one process, in order; as rows for a few, as arrays for all."""

    def __init__(self) -> None:
        self._epochs, self._seen, self._epoch_samples = array("q"), array("q"), array("q")
        self._losses, self._rates, self._seconds = array("d"), array("d"), array("d")

    def append(
        self, epoch: int, seen: int, epoch_samples: int, loss: float, learning_rate: float, seconds: float
    ) -> None:
        """Add a step; learning_rate is NaN where it is not known, all else as in `TrainRecord`."""
        self._epochs.append(epoch)
        self._seen.append(seen)
        self._epoch_samples.append(epoch_samples)
        self._losses.append(loss)
        self._rates.append(learning_rate)
        self._seconds.append(seconds)

    def __len__(self) -> int:
        return len(self._epochs)

    def __getitem__(self, index: int) -> TrainRecord:
        rate = self._rates[index]
        return TrainRecord(
            self._epochs[index],
            self._seen[index],
            self._epoch_samples[index],
            self._losses[index],
            None if math.isnan(rate) else rate,
            self._seconds[index],
        )

    def __iter__(self) -> Iterator[TrainRecord]:
        return (self[index] for index in range(len(self)))

    def goes_back(self, epoch: int, seen: int) -> bool:
        """Whether a step lies before the last one."""
        return bool(self._epochs) and (epoch, seen) < (self._epochs[-1], self._seen[-1])

    @property
    def epochs(self) -> IntArray:
        return np.array(self._epochs, dtype=np.int64)

    @property
    def seen(self) -> IntArray:
        return np.array(self._seen, dtype=np.int64)

    @property
    def epoch_samples(self) -> IntArray:
        return np.array(self._epoch_samples, dtype=np.int64)

    @property
    def losses(self) -> FloatArray:
        return np.array(self._losses, dtype=np.float64)

    @property
    def learning_rates(self) -> FloatArray:
        """NaN where it is not known."""
        return np.array(self._rates, dtype=np.float64)

    @property
    def seconds(self) -> FloatArray:
        return np.array(self._seconds, dtype=np.float64)
