"""The folder of a run: private, and swept when everybody is gone."""

from __future__ import annotations

import os
from pathlib import Path

from tripool.fabric.folder import RunFolder, coordinator_address, folder_of


def test_private_and_gone_in_the_end(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert folder_of(coordinator_address(folder.path)) == folder.path
    folder.remove()
    assert list(tmp_path.iterdir()) == []


def test_what_the_dead_left_is_swept_and_what_is_used_is_not(tmp_path: Path) -> None:
    living, dead = RunFolder(tmp_path), RunFolder(tmp_path)
    os.close(dead.lock)  # as the end of its last process does
    (tmp_path / "tripool-notes").mkdir()  # somebody else's: no lock in it
    third = RunFolder(tmp_path)
    assert living.path.exists()
    assert not dead.path.exists()
    assert (tmp_path / "tripool-notes").exists()
    living.remove()
    third.remove()
