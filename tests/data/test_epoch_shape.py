"""The arithmetic of an epoch: against OpenCLIP's own shuffle, and against plain counting."""

import random
from itertools import islice

import pytest

from openclip_linattn.data.training.epoch_notes import epoch_notes
from openclip_linattn.data.training.epoch_shape import SHARD_BUFFER, Reading, worker_batches

open_clip_data = pytest.importorskip("open_clip_train.data")


def shuffled(shards: int, epoch: int, read: list[int]):
    """OpenCLIP's order of shards in an epoch; `read` grows with what the shuffle has taken in."""

    def source():
        for shard in range(shards):
            read.append(shard)
            yield shard

    return open_clip_data.detshuffle2(*SHARD_BUFFER, 0, open_clip_data.SharedEpoch(epoch)).run(source())


@pytest.mark.parametrize("taken", [1, 7, 100, 700, 1600, 2500])
def test_the_reach_is_that_of_openclip_s_own_shuffle(taken):
    # Shards of 5,000 samples, of which one reader draws `taken` x 5,000 less what its own buffer takes in.
    read: list[int] = []
    list(islice(shuffled(5000, 0, read), taken))
    drawn = max(1, taken * 5000 - 4999)
    reading = Reading(held=5000 * 5000, shards=5000, batch_size=1, world_size=1, workers=1)
    assert reading.coverage(drawn, resampled=False).shards == len(read)


def test_openclip_s_buffers_are_those_that_we_count_with():
    module = open_clip_data
    assert (module._SHARD_SHUFFLE_SIZE, module._SHARD_SHUFFLE_INITIAL) == SHARD_BUFFER


def test_thirty_two_short_epochs_of_laion_see_a_fourteenth_of_it():
    shards, epochs = 41_455, 32
    per_epoch = shards // epochs
    seen: set[int] = set()
    for epoch in range(epochs):
        seen.update(islice(shuffled(shards, epoch, []), per_epoch))
    assert 0.05 < len(seen) / shards < 0.08
    held = shards * 9_800
    reading = Reading(held, shards, batch_size=256, world_size=64, workers=6)
    coverage = reading.coverage(held // epochs, resampled=False)
    assert coverage.shards / shards < 0.12
    (note,) = epoch_notes(held // epochs, held, shards, coverage, resampled=False)[1:]
    assert f"the first {coverage.shards:,} of the 41,455 shards" in note
    assert "--dataset-resampled" in note
    whole = reading.coverage(held, resampled=False)
    assert whole.shards == shards
    assert whole.unique > 0.98 * held


@pytest.mark.parametrize(
    ("shards", "world_size", "workers", "unique", "drawn"),
    [
        (8, 1, 1, 128, 128),
        (8, 2, 2, 128, 128),
        (8, 4, 2, 128, 128),
        (8, 1, 0, 128, 128),
        (8, 3, 1, 128, 144),  # 3 shards, 3 and 2 for 6 batches each: the last repeats 16 samples
        (8, 1, 3, 128, 144),
        (5, 4, 1, 72, 96),  # 2 shards and three times 1 for 3 batches each: 8 left out, 3 x 8 repeated
    ],
)
def test_what_an_epoch_leaves_out_and_repeats(shards, world_size, workers, unique, drawn):
    reading = Reading(16 * shards, shards, batch_size=8, world_size=world_size, workers=workers)
    coverage = reading.coverage(16 * shards, resampled=False)
    assert (coverage.unique, coverage.drawn) == (pytest.approx(unique), drawn)


def test_a_cut_batch_is_dropped_in_every_pass():
    coverage = Reading(held=10, shards=1, batch_size=4, world_size=1, workers=1).coverage(8, resampled=False)
    assert (coverage.drawn, coverage.unique) == (8, pytest.approx(8))
    twice = Reading(held=10, shards=1, batch_size=4, world_size=1, workers=1).coverage(16, resampled=False)
    assert twice.unique == pytest.approx(10 - 10 * 0.2 * 0.2)
    none = Reading(held=3, shards=1, batch_size=4, world_size=1, workers=1).coverage(3, resampled=False)
    assert none.unique == 0


def test_draws_with_replacement_repeat_themselves():
    coverage = Reading(held=80, shards=4, batch_size=8, world_size=1, workers=1).coverage(80, resampled=True)
    generator = random.Random(0)
    mean = sum(len({generator.randrange(80) for _ in range(80)}) for _ in range(2000)) / 2000
    assert coverage.unique == pytest.approx(mean, rel=0.01)


def test_batches_are_rounded_up_twice():
    assert worker_batches(100, batch_size=8, world_size=2, workers=3) == 3
    assert worker_batches(96, batch_size=8, world_size=2, workers=0) == 6


def test_what_is_said_of_an_epoch():
    even = Reading(128, 8, 8, 1, 1).coverage(128, resampled=False)
    assert epoch_notes(128, 128, 8, even, resampled=False) == []
    assert "repeats some of the 128" in epoch_notes(200, 128, 8, None, resampled=False)[0]
    assert epoch_notes(200, 128, 8, None, resampled=True) == []
    uneven = Reading(80, 5, 8, 4, 1).coverage(80, resampled=False)
    assert "leaves out about 8 of the 80 samples" in epoch_notes(80, 80, 5, uneven, resampled=False)[0]
    (long,) = epoch_notes(400_000_000, None, 41_455, None, resampled=True)
    assert "a kill loses up to 400,000,000 samples" in long
