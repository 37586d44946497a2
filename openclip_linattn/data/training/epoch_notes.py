"""What the length of an epoch means for the run, in sentences."""

from __future__ import annotations

from openclip_linattn.data.training.epoch_shape import Coverage

LONG_EPOCH = 10_000_000
UNEVEN = 0.05  # of the set left out by an epoch that is as long as the set


def epoch_notes(
    num_samples: int, held: int | None, shards: int, coverage: Coverage | None, *, resampled: bool
) -> list[str]:
    """Sentences on an epoch of `num_samples` from a set of `held` samples, where they are known."""
    notes = []
    if held is not None and not resampled and num_samples > held:
        notes.append(f"An epoch of {num_samples:,} samples repeats some of the {held:,} usable ones.")
    if num_samples > LONG_EPOCH:
        notes.append(
            f"Checkpoints are saved at the end of an epoch, so a kill loses up to {num_samples:,} samples of work: "
            "--train-num-samples with a smaller number, and --dataset-resampled, give shorter epochs."
        )
    if resampled or held is None or coverage is None:
        return notes
    if coverage.shards < shards:
        notes.append(
            f"OpenCLIP shuffles shards within a buffer of 2,000, so epochs of {num_samples:,} samples never get beyond "
            f"the first {coverage.shards:,} of the {shards:,} shards, however many there are: give "
            "--dataset-resampled, or epochs as long as the set."
        )
    elif num_samples == held and coverage.unique < (1 - UNEVEN) * held:
        left = held - coverage.unique
        notes.append(
            f"An epoch leaves out about {left:,.0f} of the {held:,} samples and repeats others, for the shards do not "
            "divide evenly among the data-loader workers, or a worker's samples into batches."
        )
    return notes
