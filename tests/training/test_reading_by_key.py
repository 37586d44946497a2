"""What many processes read of a set through OpenCLIP's own loader, sample by sample, and how a resumed run goes on.

All readings are one command's, for importing OpenCLIP takes longer than each of them.
"""

import io
import json
import subprocess
import sys
import tarfile
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

from openclip_linattn.data.training.preflight import preflight
from openclip_linattn.manifest import Plan

HERE = Path(__file__).parent
SHARDS, PER_SHARD, BATCH = 8, 16, 8
ALL = {f"{shard:05d}{sample:04d}" for shard in range(SHARDS) for sample in range(PER_SHARD)}
EVEN = [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (4, 2)]  # processes, workers
UNEVEN = [(3, 1, SHARDS), (1, 3, SHARDS), (4, 1, 5), (2, 2, 6)]  # and shards

Answers = dict[str, list[list[list[str]]]]


def tiny_image() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "JPEG")
    return buffer.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8 shards of 16 samples, whose captions are their keys, and a table of 32 rows."""
    folder = tmp_path_factory.mktemp("keys")
    image = tiny_image()
    for shard in range(SHARDS):
        with tarfile.open(folder / f"{shard:05d}.tar", "w") as tar:
            for key in sorted(key for key in ALL if key.startswith(f"{shard:05d}")):
                for suffix, data in (("jpg", image), ("txt", key.encode())):
                    member = tarfile.TarInfo(f"{key}.{suffix}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    (folder / "image.jpg").write_bytes(image)
    rows = [f"{folder}/image.jpg\t{row}" for row in range(32)]
    (folder / "table.csv").write_text("\n".join(["filepath\ttitle", *rows, ""]))
    return folder


def source(folder: Path, shards: int = SHARDS) -> str:
    return f"{folder}/{{00000..{shards - 1:05d}}}.tar"


@pytest.fixture(scope="module")
def read(folder: Path) -> Answers:
    """The answer of every reading by its name."""
    shards = {"train_data": source(folder), "train_num_samples": len(ALL)}
    table = {"train_data": f"{folder}/table.csv", "dataset_type": "csv"}
    drawn = {**shards, "dataset_resampled": True}
    orders = {"": shards, "drawn ": drawn}
    settings = {
        **{
            f"even {world}x{workers}": {**shards, "world_size": world, "workers": workers, "epochs": 2}
            for world, workers in EVEN
        },
        **{
            f"uneven {world}x{workers}": {
                "train_data": source(folder, count),
                "train_num_samples": count * PER_SHARD,
                "world_size": world,
                "workers": workers,
            }
            for world, workers, count in UNEVEN
        },
        **{
            f"{kind}order from {start}": {
                **data,
                "world_size": 2,
                "workers": 2,
                "epochs": 3,
                "start_epoch": start,
                "shards": 2,
            }
            for kind, data in orders.items()
            for start in (0, 1)
        },
        "drawn without workers": {**drawn, "workers": 0, "epochs": 2, "shards": 8},
        "table": {**table, "epochs": 2},
        "table resumed": {**table, "epochs": 2, "start_epoch": 1},
        "table resumed with another seed": {**table, "epochs": 2, "start_epoch": 1, "seed": 1},
    }
    result = subprocess.run(
        [sys.executable, str(HERE / "reading_by_key.py"), json.dumps(list(settings.values()))],
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return dict(zip(settings, json.loads(result.stdout), strict=True))


def predicted(folder: Path, world_size: int, workers: int, shards: int) -> tuple[Plan, float]:
    """What is said before training: the plan, and the number of different samples of an epoch."""
    samples = shards * PER_SHARD
    checked = preflight(
        source(folder, shards),
        world_size=world_size,
        workers=workers,
        resampled=False,
        num_samples=samples,
        batch_size=BATCH,
        cache=False,
    )
    plan = Plan(samples, BATCH, world_size, workers, accum_freq=1, epochs=1)
    assert checked.coverage is not None
    assert checked.coverage.drawn == plan.totals(1)["samples"]
    return plan, checked.coverage.unique


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "workers"), EVEN)
def test_every_sample_is_read_exactly_once_in_every_pass(read, folder, world_size, workers):
    plan, unique = predicted(folder, world_size, workers, SHARDS)
    for epoch in read[f"even {world_size}x{workers}"]:
        assert Counter(key for process in epoch for key in process) == Counter(ALL)
        assert {len(process) for process in epoch} == {len(ALL) // world_size}
    assert plan.steps_per_epoch == len(ALL) // BATCH // world_size
    assert unique == pytest.approx(len(ALL))


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "workers", "shards"), UNEVEN)
def test_what_is_left_out_and_repeated_is_as_predicted(read, folder, world_size, workers, shards):
    plan, unique = predicted(folder, world_size, workers, shards)
    (epoch,) = read[f"uneven {world_size}x{workers}"]
    keys = [key for process in epoch for key in process]
    assert len(keys) == plan.totals(1)["samples"]
    assert len(set(keys)) == pytest.approx(unique)
    assert len({len(process) for process in epoch}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["", "drawn "])
def test_a_resumed_run_goes_on_with_the_order_of_its_epoch(read, kind):
    whole, resumed = read[f"{kind}order from 0"], read[f"{kind}order from 1"]
    assert resumed == whole[1:]
    assert len({json.dumps(epoch) for epoch in whole}) == 3


@pytest.mark.slow
def test_what_we_mend_or_refuse_is_so_in_openclip(read):
    first, second = read["drawn without workers"]
    assert first == second  # refused
    assert read["table"][0] != read["table"][1]
    assert read["table resumed"][0] == read["table"][0]  # and therefore resumed with another seed
    assert sorted(read["table resumed with another seed"][0][0]) == sorted(read["table"][0][0])
    assert read["table resumed with another seed"][0] not in read["table"]
