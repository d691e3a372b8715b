"""A running server's view of the book: changes are noticed in time, and a book that is lost is no open door."""

from __future__ import annotations

from pathlib import Path

import pytest

from tripool.tenants.book import Book, BookError, BookMissing
from tripool.tenants.watch import LOOK_S, STALE_S, Watch

from .serving import NOW_S, Clock


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.db"


def test_a_revoked_key_is_refused_within_a_second(path: Path) -> None:
    clock = Clock()
    with Book(path, create=True) as book:
        key = book.add_key("alice", now_s=NOW_S)
        watch = Watch(path, may_be_open=True, clock=clock)
        assert watch.roll().find(key, NOW_S) is not None
        book.revoke("alice", now_s=NOW_S)
        clock.now_s += LOOK_S
        assert watch.roll().find(key, NOW_S) is None
        assert LOOK_S < 1.0
        other = book.add_key("bob", now_s=NOW_S)
        clock.now_s += LOOK_S
        assert watch.roll().find(other, NOW_S) is not None
    watch.close()


def test_what_is_no_change_of_keys_is_not_read_again(path: Path) -> None:
    clock = Clock()
    with Book(path, create=True) as book:
        book.add_key("alice", now_s=NOW_S)
        watch = Watch(path, may_be_open=True, clock=clock)
        roll = watch.roll()
        with book.writing() as db:
            db.execute("INSERT INTO usage VALUES (0, 'alice', 'k', 'm', 1, 1, 1, 1)")
        clock.now_s += LOOK_S
        assert watch.roll() is roll
    watch.close()


def test_a_book_that_comes_later_closes_the_door(path: Path) -> None:
    clock = Clock()
    watch = Watch(path, may_be_open=True, clock=clock)
    assert not watch.roll().keys and watch.is_open
    assert not path.exists(), "looking makes no file"
    with Book(path, create=True) as book:
        key = book.add_key("alice", now_s=NOW_S)
    clock.now_s += LOOK_S
    assert watch.roll().find(key, NOW_S) is not None and not watch.is_open
    watch.close()


def test_a_book_that_is_gone_counts_for_a_while_and_then_nobody_comes_in(path: Path) -> None:
    clock = Clock()
    with Book(path, create=True) as book:
        key = book.add_key("alice", now_s=NOW_S)
    watch = Watch(path, may_be_open=True, clock=clock)
    saved = path.read_bytes()
    path.unlink()
    clock.now_s += LOOK_S
    assert watch.roll().find(key, NOW_S) is not None
    clock.now_s += STALE_S - 2 * LOOK_S
    assert watch.roll().find(key, NOW_S) is not None and not watch.is_open
    clock.now_s += 2 * LOOK_S
    with pytest.raises(BookMissing):
        watch.roll()
    path.touch(0o600)
    path.write_bytes(saved)
    clock.now_s += LOOK_S
    assert watch.roll().find(key, NOW_S) is not None, "it is back"
    watch.close()


def test_another_book_in_its_place_is_the_one_that_counts(path: Path, tmp_path: Path) -> None:
    clock = Clock()
    keys = []
    for name in (path, tmp_path / "new.db"):
        with Book(name, create=True) as book:
            keys.append(book.add_key("alice", now_s=NOW_S))
    watch = Watch(path, may_be_open=True, clock=clock)
    (tmp_path / "new.db").rename(path)
    clock.now_s += LOOK_S
    assert [watch.roll().find(key, NOW_S) is not None for key in keys] == [False, True]
    watch.close()


def test_a_revocation_is_seen_though_the_side_files_were_deleted(path: Path) -> None:
    """SQLite goes on with the deleted ones, and would never see what others write into new ones."""
    clock = Clock()
    with Book(path, create=True) as book:
        key = book.add_key("alice", now_s=NOW_S)
    watch = Watch(path, may_be_open=False, clock=clock)
    assert watch.roll().find(key, NOW_S) is not None
    for suffix in ("-wal", "-shm"):
        Path(f"{path}{suffix}").unlink()
    with Book(path) as book:
        book.revoke("alice", now_s=NOW_S)
    clock.now_s += LOOK_S
    assert watch.roll().find(key, NOW_S) is None
    watch.close()


def test_a_keyed_server_without_a_book_lets_nobody_in_until_there_is_one(path: Path) -> None:
    """As a gateway finds it that is started again while the book is away."""
    clock, learnt = Clock(), list[str]()
    watch = Watch(path, may_be_open=False, on_keyed=lambda: learnt.append("keyed"), clock=clock)
    with pytest.raises(BookMissing):
        watch.roll()
    Book(path, create=True).close()
    clock.now_s += LOOK_S
    with pytest.raises(BookError, match="no keys any more"):
        watch.roll()
    with Book(path) as book:
        key = book.add_key("alice", now_s=NOW_S)
    clock.now_s += LOOK_S
    assert watch.roll().find(key, NOW_S) is not None
    assert not learnt, "it was keyed from the start"
    watch.close()


def test_an_open_server_that_cannot_note_its_first_key_lets_nobody_in(path: Path) -> None:
    clock = Clock()

    def on_keyed() -> None:
        raise BookError("the mark cannot be removed")

    watch = Watch(path, may_be_open=True, on_keyed=on_keyed, clock=clock)
    with Book(path, create=True) as book:
        book.add_key("alice", now_s=NOW_S)
    clock.now_s += STALE_S
    with pytest.raises(BookError, match="mark"):
        watch.roll()
    watch.close()


def test_a_damaged_book_lets_nobody_in(path: Path) -> None:
    path.touch(0o600)
    path.write_text("x" * 5000)
    for may_be_open in (False, True):
        with pytest.raises(BookError, match="damaged"):
            Watch(path, may_be_open=may_be_open, clock=Clock()).roll()
