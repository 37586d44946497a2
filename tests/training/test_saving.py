"""Checkpoints are whole or not there, and a full disk costs no older one."""

import errno
import io
import os
import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from open_clip_train.main import get_latest_checkpoint

from openclip_linattn.checkpointing import atomic_saving, partial_checkpoints
from openclip_linattn.errors import UserError
from openclip_linattn.manifest import read_manifest
from openclip_linattn.train import main


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """As on a disk with room for so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_replaced_by_a_whole_one(tmp_path):
    stock, path = torch.save, tmp_path / "epoch_1.pt"
    with atomic_saving():
        for number in (1, 2):
            torch.save({"epoch": number}, str(path))
            assert torch.load(path) == {"epoch": number}
        buffer = io.BytesIO()
        torch.save([3], buffer)
    assert torch.save is stock
    assert torch.load(io.BytesIO(buffer.getvalue())) == [3]
    assert names(tmp_path) == ["epoch_1.pt"]


def test_while_it_is_written_it_is_beside_under_a_name_that_openclip_does_not_take(tmp_path, monkeypatch):
    torch.save({}, tmp_path / "epoch_1.pt")
    seen: list[tuple[list[Path], str | None]] = []

    class Looking:
        def __reduce__(self):
            seen.append((partial_checkpoints(tmp_path), get_latest_checkpoint(str(tmp_path), remote=False)))
            return (list, ())

    with atomic_saving():
        torch.save(Looking(), tmp_path / "epoch_2.pt")
    ((partial,), latest) = seen[0]
    assert partial.name.startswith(".epoch_2.pt.")
    assert latest == str(tmp_path / "epoch_1.pt")
    assert partial_checkpoints(tmp_path) == []


@pytest.mark.parametrize("room", [0, 100, 3_000, 90_000])
def test_a_full_disk_keeps_the_old_file_and_is_said(tmp_path, room):
    path = tmp_path / "epoch_latest.pt"
    torch.save({"epoch": 1}, path)
    with largest_file(room), atomic_saving(), pytest.raises(UserError, match="File too large"):
        torch.save({"epoch": 2, "state_dict": {"weight": torch.ones(50_000)}}, path)
    assert torch.load(path) == {"epoch": 1}
    assert names(tmp_path) == ["epoch_latest.pt"]


def test_a_file_system_that_cannot_sync_folders_saves_all_the_same(tmp_path, monkeypatch):
    sync = os.fsync

    def files_only(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", files_only)
    with atomic_saving():
        torch.save({"epoch": 1}, tmp_path / "epoch_1.pt")
    assert torch.load(tmp_path / "epoch_1.pt") == {"epoch": 1}


def test_what_cannot_be_pickled_is_no_matter_of_the_disk(tmp_path):
    with atomic_saving(), pytest.raises(AttributeError, match="lambda"):
        torch.save({"epoch": lambda: 1}, tmp_path / "epoch_1.pt")
    with atomic_saving(), pytest.raises(RuntimeError, match="of the caller"):
        torch.save(Failing(), tmp_path / "epoch_1.pt")
    assert names(tmp_path) == []


class Failing:
    def __reduce__(self):
        raise RuntimeError("of the caller")


def test_a_run_that_cannot_save_fails_with_a_sentence(flags, monkeypatch, tmp_path, capsys):
    checkpoints = tmp_path / "logs" / "x" / "checkpoints"

    def train(argv: list[str]) -> None:
        checkpoints.mkdir()
        for epoch in (1, 2):
            torch.save(
                {"epoch": epoch, "weight": torch.ones(epoch * 10_000)}, checkpoints / f"epoch_{epoch}.pt"
            )

    monkeypatch.setattr("openclip_linattn.train.open_clip_main", train)
    monkeypatch.setattr("openclip_linattn.interruption.LINGER_SECONDS", 0.0)
    with largest_file(60_000):
        assert main(["--model", "ViT-T32-8-linear", *flags, "--name", "x", "--epochs", "2"]) == 2
    error = capsys.readouterr().err
    assert (
        f"error: the checkpoint {checkpoints / 'epoch_2.pt'} could not be written (File too large)" in error
    )
    facts = read_manifest(tmp_path / "logs" / "x")
    assert (facts["status"], facts["seen"]["epochs"]) == ("failed", 1)
    assert "could not be written" in facts["error"]
