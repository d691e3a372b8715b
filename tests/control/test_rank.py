"""A rank's thread: it installs the newest map that names it, and reports ranks that do not answer."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tripool.control.instance import Instance, map_file
from tripool.control.rank import _ALONE_S, SILENCE_S, Rank
from tripool.errors import EngineStopped
from tripool.experts.layout import Layout
from tripool.fabric.supervisor_channel import SupervisorChannel
from tripool.messages import MapChanged, SilentRank, WorkerId

DEADLINE_S = 60.0
ME = WorkerId("decode-0-r1", 7)


class FakeExchange:
    """Notes what it is told."""

    rank = 1

    def __init__(self) -> None:
        self.installed: list[tuple[int, list[int], list[bool]]] = []
        self.fences: list[tuple[int, int]] = []
        self.silence = [0.0, 0.0, 0.0]
        self.closed = False

    def install(self, epoch: int, table: np.ndarray, alive: Sequence[bool]) -> None:
        assert table.dtype == np.int32
        self.installed.append((epoch, np.unique(table).tolist(), list(alive)))

    def fence(self, rank: int, epoch: int) -> None:
        self.fences.append((rank, epoch))

    def silence_s(self) -> list[float]:
        return self.silence

    def close(self) -> None:
        self.closed = True


class Setup:
    def __init__(self, folder: Path) -> None:
        layout = Layout(ranks=3, layers=2, experts=8, top_k=2, hidden=64, slab_rows=4)
        self.instance, self.exchange = Instance("decode-0", folder, layout), FakeExchange()
        self.supervisor, theirs = SupervisorChannel.pair()
        self.channel = SupervisorChannel(theirs)
        self.file = map_file(folder, "decode-0")
        self.ended: list[int] = []

    def start(self) -> Rank:
        self.rank = Rank(self.exchange, self.file, ME, self.channel, self.ended.append)
        return self.rank

    def change(self, change: Callable[[int], bool], rank: int) -> None:
        assert change(rank)
        self.supervisor.send(MapChanged(self.instance.epoch))


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[Setup]:
    made = Setup(tmp_path)
    yield made
    made.rank.close()
    assert made.exchange.closed
    made.channel.close()
    made.supervisor.close()


def until(what: Callable[[], Any]) -> Any:
    deadline_s = time.monotonic() + DEADLINE_S
    while not (found := what()):
        assert time.monotonic() < deadline_s
        threading.Event().wait(0.005)
    return found


def test_the_first_map_is_one_that_names_this_rank(setup: Setup) -> None:
    """An older one was made without it: when its last process died."""
    setup.instance.enter(0)
    rank = setup.start()
    assert rank.receive() == () and not rank.ended
    setup.change(setup.instance.enter, 2)
    setup.change(setup.instance.enter, 1)
    rank.ready()
    assert setup.exchange.installed[0] == (3, [0, 1, 2], [True, True, True])


def test_a_lost_rank_is_fenced_and_asked_no_more(setup: Setup) -> None:
    for rank in range(3):
        setup.instance.enter(rank)
    setup.start().ready()
    setup.change(setup.instance.leave, 0)
    until(lambda: len(setup.exchange.installed) == 2)
    assert setup.exchange.installed[1] == (4, [1, 2], [False, True, True])
    assert setup.exchange.fences == [(1, 0), (0, 4), (1, 0)]


def test_a_map_is_noticed_without_a_message(setup: Setup) -> None:
    setup.start()
    setup.instance.enter(1)
    setup.rank.ready()
    assert setup.exchange.installed == [(1, [1], [False, True, False])]


def test_a_map_is_noticed_in_a_file_of_the_same_inode_and_time(setup: Setup) -> None:
    """Maps that follow each other within a tick of the file system's clock."""
    setup.instance.enter(1)
    setup.instance.enter(2)
    old = setup.file.read_bytes()
    setup.start().ready()
    setup.instance.leave(2)
    new = setup.file.read_bytes()
    until(lambda: setup.exchange.installed[-1][0] == 3)
    setup.file.write_bytes(old)
    until(lambda: setup.exchange.installed[-1][0] == 2)
    at = setup.file.stat()
    with setup.file.open("r+b") as file:
        file.write(new)
        file.flush()
        os.utime(setup.file, ns=(at.st_atime_ns, at.st_mtime_ns))
    assert setup.file.stat().st_mtime_ns == at.st_mtime_ns
    until(lambda: setup.exchange.installed[-1][0] == 3)


def test_without_a_map_no_step_may_run(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tripool.control.rank._FIRST_MAP_S", 0.01)
    with pytest.raises(EngineStopped, match="no expert map"):
        setup.start().ready()


def test_silence_is_reported_of_ranks_that_are_there(setup: Setup) -> None:
    setup.instance.enter(1)
    setup.instance.enter(2)
    setup.exchange.silence = [9.0, 0.0, SILENCE_S + 0.25]
    setup.start().ready()
    report = until(lambda: next((m for m in setup.supervisor.receive() if isinstance(m, SilentRank)), None))
    assert report == SilentRank(ME, 2, 2, SILENCE_S + 0.25)


def test_without_a_supervisor_a_silent_rank_is_given_up(setup: Setup) -> None:
    """Nobody else writes maps any more."""
    for rank in range(3):
        setup.instance.enter(rank)
    setup.start().ready()
    setup.supervisor.close()
    until(lambda: setup.rank.ended)
    setup.exchange.silence = [_ALONE_S - 1.0, 0.0, _ALONE_S + 1.0]
    until(lambda: len(setup.exchange.installed) == 2)
    assert setup.exchange.installed[1] == (4, [0, 1], [True, True, False])
    assert (2, 4) in setup.exchange.fences


def test_the_end_of_the_supervisor_is_noticed(setup: Setup) -> None:
    rank = setup.start()
    setup.supervisor.close()
    until(lambda: rank.ended)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_rank_that_cannot_follow_the_map_ends(setup: Setup) -> None:
    """Here its process goes on, and its thread ends with the error."""
    setup.instance.enter(1)
    setup.start().ready()
    setup.file.write_bytes(b"no map")
    until(lambda: setup.ended == [1])
