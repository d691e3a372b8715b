"""Folders that others could replace are refused; those of this user are made so that nobody else can look into them."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from tripool.cache.disk_store import DiskStore
from tripool.cache.private_folder import NotPrivate, make_private
from tripool.cache.weight_cache import WeightCache
from tripool.errors import ArenaError, DiskError
from tripool.fabric.folder import remove_if_stale, run_folders
from tripool.serving.disk import disk_of

STRANGER = 4_000_000


@pytest.fixture
def owned(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, int], None]:
    """As if a file belonged to somebody else, which only root could really arrange."""
    owners: dict[str, int] = {}
    lstat = os.lstat

    def fake(path: str | Path) -> os.stat_result:
        found = lstat(path)
        uid = owners.get(str(path))
        return found if uid is None else os.stat_result((*found[:4], uid, *found[5:]))

    monkeypatch.setattr(os, "lstat", fake)
    return lambda path, uid: owners.__setitem__(str(path), uid)


def test_what_is_made_is_private(tmp_path: Path) -> None:
    make_private(tmp_path / "a" / "b")
    make_private(tmp_path / "a" / "b")
    for folder in (tmp_path / "a", tmp_path / "a" / "b"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_below_another_users_folder_nothing_is_made(tmp_path: Path, owned: Callable[[Path, int], None]) -> None:
    theirs = tmp_path / "theirs"
    (theirs / "ours").mkdir(parents=True)
    owned(theirs, STRANGER)
    for folder in (theirs, theirs / "ours", theirs / "ours" / "new", theirs / "new"):
        with pytest.raises(NotPrivate, match="another user"):
            make_private(folder)
    assert [path.name for path in theirs.iterdir()] == ["ours"] and not list((theirs / "ours").iterdir())


@pytest.mark.parametrize(("mode", "fine"), [(0o777, False), (0o757, False), (0o1777, True), (0o755, True)])
def test_folders_on_the_way_that_others_write_to(tmp_path: Path, mode: int, fine: bool) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(mode)
    if fine:
        make_private(shared / "ours")
    else:
        with pytest.raises(NotPrivate, match="written to by others"):
            make_private(shared / "ours")
    shared.chmod(0o700)


def test_the_folder_itself_must_be_ours_alone(tmp_path: Path, owned: Callable[[Path, int], None]) -> None:
    """Made first by somebody else, in a place where everybody may make folders."""
    tmp_path.chmod(0o1777)
    folder = tmp_path / "tripool.models-1000"
    folder.mkdir()
    owned(folder, STRANGER)
    with pytest.raises(NotPrivate):
        make_private(folder)
    with pytest.raises(ArenaError, match="another user"):
        WeightCache(folder, 2**20)
    owned(folder, os.geteuid())
    folder.chmod(0o1777)
    with pytest.raises(ArenaError, match="written to by others"):
        WeightCache(folder, 2**20)
    folder.chmod(0o700)
    WeightCache(folder, 2**20)


def test_links_are_followed_only_where_they_are_ours(tmp_path: Path, owned: Callable[[Path, int], None]) -> None:
    (tmp_path / "real").mkdir(0o700)
    link = tmp_path / "link"
    link.symlink_to("real")
    make_private(link / "a")
    assert (tmp_path / "real" / "a").is_dir()
    owned(link, STRANGER)
    with pytest.raises(NotPrivate, match="link of another user"):
        make_private(link / "b")
    with pytest.raises(ArenaError, match="link of another user"):
        WeightCache(link, 2**20)
    owned(link, os.geteuid())
    (tmp_path / "theirs").mkdir()
    owned(tmp_path / "theirs", STRANGER)
    indirect = tmp_path / "indirect"
    indirect.symlink_to(tmp_path / "theirs" / ".." / "real")
    with pytest.raises(NotPrivate, match="another user"):
        make_private(indirect / "b")
    loop = tmp_path / "loop"
    loop.symlink_to("loop")
    with pytest.raises(NotPrivate):
        make_private(loop / "a")


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(NotADirectoryError):
            make_private(path)
    assert disk_of(0.01, tmp_path / "file", "00" * 16), "the server goes on without"


def test_a_disk_folder_is_refused_before_the_server_starts(tmp_path: Path, owned: Callable[[Path, int], None]) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    owned(theirs, STRANGER)
    with pytest.raises(DiskError, match="another user"):
        disk_of(0.01, theirs / "blocks", "00" * 16)
    with pytest.raises(DiskError, match="another user"):
        DiskStore.open(theirs / "blocks", bytes(16), num_segments=1, segment_bytes=2**16, block_bytes=64)
    assert not list(theirs.iterdir())
    assert disk_of(0.01, tmp_path / "ours", "00" * 16).folder.is_dir()


def test_a_link_with_the_name_of_a_run_is_not_taken_for_one(tmp_path: Path) -> None:
    """It could lead to anything of ours that has a file called lock in it."""
    ours = tmp_path / "ours"
    ours.mkdir()
    (ours / "lock").touch()
    link = tmp_path / "tripool-link"
    link.symlink_to(ours)
    assert run_folders(tmp_path) == []
    remove_if_stale(link)
    assert (ours / "lock").exists() and link.is_symlink()


def test_an_image_that_is_a_link_or_open_to_others_is_a_miss(tmp_path: Path) -> None:
    """Damaged ones are replaced."""
    weight_cache = WeightCache(tmp_path / "images", 2**20)
    writer = weight_cache.writer("key")
    assert writer is not None
    weight_cache.publish("key", writer, b"facts")
    assert weight_cache.find("key") is not None
    path = tmp_path / "images" / "key.image"
    path.chmod(0o666)
    assert weight_cache.find("key") is None and not path.exists()
    (tmp_path / "elsewhere").touch()
    path.symlink_to(tmp_path / "elsewhere")
    assert weight_cache.find("key") is None and not path.is_symlink()
    os.mkfifo(path)
    assert weight_cache.find("key") is None and not path.exists()
    assert (tmp_path / "elsewhere").exists()
