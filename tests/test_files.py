"""Files appear whole or not at all, also where the power is cut; and where a user's cache is."""

import errno
import os
from pathlib import Path

import pytest

from openclip_linattn.files import cache_folder, write_text


def test_content_is_on_disk_before_it_has_the_name(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("old")
    seen = []
    monkeypatch.setattr(os, "fsync", lambda _: seen.append(path.read_text()))
    write_text(path, "new")
    assert seen == ["old", "new"]  # the file's content, then the folder's entry


def test_what_does_not_reach_the_disk_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("old")

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_text(path, "new")
    assert [each.name for each in tmp_path.iterdir()] == ["a.txt"]
    assert path.read_text() == "old"


def test_a_user_without_a_home_has_a_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "openclip_linattn"
    monkeypatch.delenv("XDG_CACHE_HOME")

    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert cache_folder().name == "openclip_linattn"
    assert cache_folder().parent.name == f"cache-{os.getuid()}"
